"""Workers that survive the end of a generation live on, on a simulated device with torch's
watchdog, which by default ends each process a minute after a peer is lost. A minute is 0.4 s."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import DrainNoticed
from elastic_dp.distributed import device_connection
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.cluster.test_budgets import is_first
from tests.patience import eventually
from tests.runs import PATIENT, group, local, never_put_off, resize, spec_of, texts_of
from tests.train.checkpointing.test_worker_checkpointer import when_committed
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


def lost_by_a_kill(spec, train, tmp_path, device):
    dead = str(tmp_path / "dead")
    fault = WorkerFault("exchange", rank=1, world_size=3, once=dead, settled=True)
    trained = faults_while_switched(goes_last(train, tmp_path))
    outcome, _ = group(spec, trained, faults=(fault,), device=device)
    assert (tmp_path / "dead").exists()
    return outcome


@pytest.mark.parametrize(
    "abort_s",
    [
        pytest.param(0.0, id="abort"),
        pytest.param(2 * MINUTE_S, id="abort that blocks", marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_lost_peer_live_on_for_three_minutes(abort_s, tmp_path):
    spec = spec_for(tmp_path)
    device = SimulatedDevice(watchdog_s=MINUTE_S, abort_s=abort_s)
    outcome = lost_by_a_kill(spec, plain, tmp_path, device)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest


@pytest.mark.slow
def test_members_that_stay_after_a_drain_live_on_for_three_minutes(tmp_path):
    spec = spec_for(tmp_path)
    outcome, _ = group(spec, told_when_switched(plain), script=[(6, drain)], device=WATCHED)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 0 and outcome.generations >= 2
    assert outcome.digest == local(spec, plain).digest


@pytest.mark.slow
def test_members_that_take_in_a_joiner_live_on_for_three_minutes(tmp_path):
    spec = spec_of(steps=STEPS, config={"body_s": BODY_S})
    script = [resize(1, 2), resize(6, 3)]
    outcome, _ = group(spec, told_when_switched(plain), script=script, device=WATCHED)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 0 and outcome.generations >= 3
    assert outcome.digest == local(spec, plain).digest


def connection_breaks(train, file):
    """NCCL reports it to one member, in the first step from the sixth on that uses the
    communicator. Its peers live."""

    def breaks(ctx):
        control, may_attempt = ctx._session.control, ctx._session.control.may_attempt

        def begins(step):
            of_device = transport(ctx)
            used = of_device is not None and of_device.switched
            if step >= 6 and used and is_first(file):
                of_device._connection.communicator.failure = lambda: "NCCL reports REMOTE_ERROR"
            return may_attempt(step)

        control.may_attempt = begins
        told_when_switched(train)(ctx)

    return breaks


@pytest.mark.slow
def test_members_whose_connection_breaks_live_on_for_three_minutes(tmp_path):
    spec, file = spec_for(tmp_path), str(tmp_path / "broken")
    outcome, _ = group(spec, connection_breaks(plain, file), device=WATCHED)
    assert outcome.error is None, outcome.traceback
    assert os.path.exists(file)
    assert outcome.workers_lost == 0 and outcome.generations >= 2
    assert outcome.digest == local(spec, plain).digest


@pytest.mark.slow
def test_survivors_whose_communicator_reports_the_loss_live_on_for_three_minutes(tmp_path):
    spec = spec_for(tmp_path)
    device = dataclasses.replace(WATCHED, reports_failures=True)
    outcome = lost_by_a_kill(spec, plain, tmp_path, device)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest


def tries_again_soon(train):
    def soon(ctx):
        device_connection.FIRST_PAUSE_S = 0.05
        train(ctx)

    return soon


@pytest.mark.slow
def test_members_whose_devices_fail_to_connect_live_on_for_three_minutes(tmp_path):
    spec = spec_for(tmp_path)
    device = dataclasses.replace(WATCHED, connect_fails=1)
    outcome, _ = group(spec, tries_again_soon(told_when_switched(plain)), device=device)
    assert outcome.error is None, outcome.traceback
    assert (tmp_path / "switched").exists()
    assert outcome.workers_lost == 0
    assert outcome.digest == local(spec, plain).digest


@pytest.mark.slow
def test_members_that_go_back_to_a_checkpoint_live_on_for_three_minutes(tmp_path):
    """A bit of one replica's weights flips, while the communicator is in use. The other two restore
    the last state on which all agreed."""
    url, committed = str(tmp_path / "run"), tmp_path / "committed"
    config = {"body_s": BODY_S, "gates": {11: str(committed)}}
    spec = dataclasses.replace(
        spec_of(steps=STEPS, min_workers=3, config=config),
        checkpoint=CheckpointConfig(every_steps=5),
        failure=dataclasses.replace(PATIENT, compare_weights_every=6),
    )
    flipped = str(tmp_path / "flipped")
    fault = WorkerFault("before_forward", 12, 1, action="flip", once=flipped)
    script = [(10, when_committed(url, 10, lambda run: committed.touch()))]
    trained = faults_while_switched(never_put_off(plain))
    outcome, run = group(spec, trained, faults=(fault,), script=script, url=url, device=WATCHED)
    assert outcome.error is None, outcome.traceback
    assert os.path.exists(flipped)
    assert any("back to step 10" in text for text in texts_of(run))
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest


def with_torchs_defaults(train):
    """Train as if nobody had set the variables of `nccl_environment`."""

    def unset(ctx):
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.pop(name, None)
        train(ctx)

    return unset


def test_survivors_with_torchs_defaults_end_with_their_peer(tmp_path):
    """So the tests above fail without the settings of each worker."""
    spec = spec_for(tmp_path)
    outcome = lost_by_a_kill(spec, with_torchs_defaults(plain), tmp_path, WATCHED)
    assert outcome.workers_lost > 1
