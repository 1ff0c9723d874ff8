"""Workers that survive the end of a generation live on, on a simulated device with torch's
watchdog, which by default ends each process a minute after a peer is lost. A minute is 0.4 s. And
runs whose devices connect late, or not at once, or while a member is lost."""

import dataclasses
import time

import pytest

from elastic_dp.config import FailureConfig
from elastic_dp.coordinator.messages import DrainNoticed, StopRequested
from elastic_dp.distributed import device_connection
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.train.fault_injection import WorkerFault
from tests.cluster.test_budgets import is_first
from tests.kit.simulated_device import SimulatedDevice
from tests.patience import PATIENCE_S, eventually
from tests.runs import ENDLESS, at_size, group, lines_of, local, resize, spec_of, texts_of
from tests.train.jobs import plain
from tests.train.test_simulated_device import (
    faults_while_switched,
    job,
    told_when_switched,
    transport,
)

MINUTE_S = 0.4
WATCHED = SimulatedDevice(watchdog_s=MINUTE_S)
# After the end at about step 6: three minutes and more.
STEPS, BODY_S = 50, 0.05


def drain(run):
    drained = run.controller.coordinator.membership.members[-1].worker
    run.controller.post(DrainNoticed(drained, time.monotonic() + 60.0))


def spec_for(tmp_path):
    spec = job(tmp_path, steps=STEPS)
    spec.config["body_s"] = BODY_S
    return spec


def goes_last(train, folder):
    """Rank 1 goes on to its exchange when the others have launched all of theirs: what they have
    launched cannot end without it."""

    def last(ctx):
        session, send, reduce = ctx._session, GradientReducer.send, GradientExchange.reduce

        def launched(rank):
            return folder / f"launched-{session.generation}-{session.position.step}-{rank}"

        def used():
            of_device = transport(ctx)
            return of_device is not None and of_device.switched and session.world_size == 3

        def sends(reducer):
            send(reducer)
            if used() and session.rank == 1:
                over = session.control._over
                eventually(lambda: all(launched(r).exists() for r in (0, 2)) or over())

        def reduces(exchange):
            reduce(exchange)
            if used():
                launched(session.rank).touch()

        GradientReducer.send, GradientExchange.reduce = sends, reduces
        train(ctx)

    return last


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="abort"),
        pytest.param({"abort_s": 2 * MINUTE_S}, id="abort that blocks", marks=SLOW),
        pytest.param({"reports_failures": True}, id="reported", marks=SLOW),
    ],
)
def test_survivors_of_a_lost_peer_live_on_for_three_minutes(how, tmp_path):
    spec, device = spec_for(tmp_path), dataclasses.replace(WATCHED, **how)
    dead = str(tmp_path / "dead")
    fault = WorkerFault("exchange", rank=1, world_size=3, once=dead, settled=True)
    trained = faults_while_switched(goes_last(plain, tmp_path))
    outcome, _ = group(spec, trained, faults=(fault,), device=device)
    assert (tmp_path / "dead").exists()
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest


def connection_breaks(train):
    """NCCL reports it to one member, in the first step from the sixth on that uses the
    communicator. Its peers live."""

    def breaks(ctx):
        control, may_attempt = ctx._session.control, ctx._session.control.may_attempt

        def begins(step):
            of_device = transport(ctx)
            used = of_device is not None and of_device.switched
            if step >= 6 and used and is_first(ctx.config["broken"]):
                of_device._connection.communicator.failure = lambda: "NCCL reports REMOTE_ERROR"
            return may_attempt(step)

        control.may_attempt = begins
        told_when_switched(train)(ctx)

    return breaks


# What cuts the train function, the script, the device, and how many generations there are at least.
LIVE_ON = {
    "drain": (told_when_switched, [(6, drain)], WATCHED, 2),
    "joiners": (told_when_switched, [resize(1, 2), resize(6, 3)], WATCHED, 3),
    "a connection that breaks": (connection_breaks, [], WATCHED, 2),
    "devices that fail to connect": (
        lambda train: in_each_worker(told_when_switched(train), tries_soon),
        [],
        dataclasses.replace(WATCHED, connect_fails=1),
        1,
    ),
}


@SLOW
@pytest.mark.parametrize("what", LIVE_ON)
def test_members_live_on_for_three_minutes(what, tmp_path):
    cut, script, device, generations = LIVE_ON[what]
    spec = spec_for(tmp_path)
    if what == "joiners":
        spec = spec_of(steps=STEPS, config={"body_s": BODY_S})
    spec.config["broken"] = str(tmp_path / "broken")
    outcome, _ = group(spec, cut(plain), script=script, device=device)
    assert outcome.workers_lost == 0 and outcome.generations >= generations
    assert outcome.digest == local(spec, plain).digest
    found = {path.name for path in tmp_path.iterdir()}
    wanted = {"a connection that breaks": "broken", "devices that fail to connect": "switched"}
    assert what not in wanted or wanted[what] in found


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
        device_connection.ABORT_LIMIT_S = 0.05

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
