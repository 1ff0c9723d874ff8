"""Workers that survive the end of a generation live on, on a simulated device with torch's
watchdog, which by default ends each process a minute after a peer is lost. A minute is 0.4 s."""

from __future__ import annotations

import os
import time

import pytest

from elastic_dp.coordinator.messages import DrainNoticed
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local
from tests.train.jobs import plain
from tests.train.test_simulated_device import job, told_when_switched

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


def lost_by_a_kill(spec, train, tmp_path, device):
    before = (str(tmp_path / "switched"),)
    fault = WorkerFault("gather", rank=1, world_size=3, once=str(tmp_path / "dead"), after=before)
    outcome, _ = group(spec, told_when_switched(train), faults=(fault,), device=device)
    assert (tmp_path / "dead").exists()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("abort_s", [0.0, 2 * MINUTE_S], ids=["abort", "abort that blocks"])
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


def with_torchs_defaults(train):
    """Train as if nobody had set the variables of `nccl_environment`."""

    def unset(ctx):
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.pop(name, None)
        train(ctx)

    return unset


@pytest.mark.slow
def test_survivors_with_torchs_defaults_end_with_their_peer(tmp_path):
    """So the tests above fail without the settings of each worker."""
    spec = spec_for(tmp_path)
    outcome = lost_by_a_kill(spec, with_torchs_defaults(plain), tmp_path, WATCHED)
    assert outcome.workers_lost > 1
