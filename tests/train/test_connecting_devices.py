"""Whole runs whose devices connect late, or not at once, or while a member is lost."""

from __future__ import annotations

import dataclasses

from elastic_dp.config import FailureConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.distributed import abort_limit, device_connection
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import PATIENCE_S
from tests.runs import ENDLESS, at_size, group, lines_of, local, texts_of
from tests.train.jobs import plain
from tests.train.test_simulated_device import job, told_when_switched


def in_each_worker(train, change):
    def changed(ctx):
        change()
        train(ctx)

    return changed


def tries_soon():
    device_connection.FIRST_PAUSE_S = 0.05


def generations(run):
    return [line for line in lines_of(run) if line.get("command") == "FormGeneration"]


def test_devices_that_connect_later_than_a_group_must_form_end_no_generation(tmp_path):
    """The group trains meanwhile, and uses them once they are connected. To form takes a busy
    machine less than these seconds."""
    forming_s = 5.0
    failure = FailureConfig(heartbeat_timeout_s=30.0, forming_timeout_s=forming_s)
    spec = job(tmp_path, workers=2, steps=12, failure=failure)
    device = SimulatedDevice(connect_s=forming_s + 0.5)
    outcome, run = group(spec, told_when_switched(plain), device=device)
    assert outcome.digest == local(spec, plain).digest
    assert (tmp_path / "switched").exists()
    assert len(generations(run)) <= 2  # of one worker, and of two


def test_devices_that_cannot_be_connected_are_said_once_and_tried_again(tmp_path):
    spec = job(tmp_path, workers=2, steps=12)
    trained = in_each_worker(told_when_switched(plain), tries_soon)
    outcome, run = group(spec, trained, device=SimulatedDevice(connect_fails=2))
    assert outcome.digest == local(spec, plain).digest
    assert (tmp_path / "switched").exists()
    texts = [text for text in texts_of(run) if "devices" in text]
    assert [text.partition(":")[0] for text in texts] == [
        "connecting the devices failed",
        "the devices are connected, at attempt 3",
    ]
    assert "no route to a peer. Gradients travel through the host meanwhile" in texts[0]


def test_kill_while_devices_connect_ends_no_other_worker(tmp_path):
    """An abort would block until they have connected, and its limit ends the process."""
    spec = job(tmp_path, workers=3, steps=12)

    def hurries():
        abort_limit.ABORT_LIMIT_S = 0.05

    fault = WorkerFault("backward", 6, rank=1, once=str(tmp_path / "dead"))
    trained = in_each_worker(plain, hurries)
    outcome, _ = group(spec, trained, faults=(fault,), device=SimulatedDevice(connect_hangs=True))
    assert (outcome.digest, outcome.workers_lost) == (local(spec, plain).digest, 1)


def test_pause_does_not_wait_for_devices_that_connect(tmp_path):
    """A member is lost while they do, and its replacement joins."""
    spec = job(tmp_path, workers=3, steps=ENDLESS)
    fault = WorkerFault("backward", 6, rank=1, once=str(tmp_path / "dead"))
    script = [(6, at_size(3)), (6, StopRequested("enough"))]
    device = SimulatedDevice(connect_s=2 * PATIENCE_S)
    outcome, _ = group(spec, plain, faults=(fault,), device=device, script=script)
    assert (outcome.error, outcome.workers_lost) == (None, 1)
    calm = dataclasses.replace(spec, max_steps=outcome.step)
    assert outcome.digest == local(calm, plain).digest
