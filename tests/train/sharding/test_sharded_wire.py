"""`sharding="optimizer"` with `wire=`: the weights are those of a run with the same `wire=` that is
not sharded, to the last bit. Runs of other tests, with rounded gradients. More of them are in
`tests/train/test_equals_plain_run.py`."""

import dataclasses

import pytest

from tests.kit.again import slow
from tests.train import test_sharded_optimizer as of_runs
from tests.train.jobs import average_and_plateau
from tests.train.sharding import test_sharded_on_devices as of_devices
from tests.train.sharding.test_sharded_on_devices import _no_device_is_left  # noqa: F401  a fixture


@pytest.fixture(autouse=True, params=[pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def _wire(request, monkeypatch):
    def sharded(spec):
        return dataclasses.replace(spec, sharding="optimizer", wire=request.param)

    monkeypatch.setattr(of_runs, "sharded", sharded)
    if request.param == "int8":
        monkeypatch.setattr(of_runs, "SMALL_UNIT_BYTES", 1024)  # a block


READ = of_runs.test_checkpoint_is_read_with_and_without_sharding_by_any_number_of_workers
ON_DEVICES = of_devices.test_kill_in_a_sharded_step_that_uses_the_communicator_costs_no_state
POINTS = of_devices.IN_CI, of_devices.OTHERS


@pytest.mark.parametrize(
    "rerun",
    [
        *slow(of_runs.test_workers_join_and_several_leave_at_once),
        *slow(of_runs.test_workers_that_leave_with_notice_take_no_part_of_the_state_with_them),
        *slow(of_runs.test_run_goes_back_to_a_checkpoint_when_both_holders_of_a_piece_are_lost),
        *slow(READ, first=["sharded", "replicated"]),
        *slow(
            of_runs.test_loss_in_a_step_with_a_checkpoint_leaves_its_bytes_as_they_are,
            point=["gathered"],
        ),
        *slow(ON_DEVICES, points=POINTS, train=[average_and_plateau], workers=[4]),
    ],
)
def test_run_with_rounded_gradients(rerun, request):
    rerun(request)
