"""`sharding="optimizer"` with `wire=`: the weights are those of a run with the same `wire=` that is
not sharded, to the last bit. Runs of other tests, with rounded gradients."""

import dataclasses
from functools import partial

import pytest

from tests.kit.again import again, slow
from tests.train import test_master_weights as of_masters
from tests.train import test_sharded_optimizer as of_runs
from tests.train.jobs import ZOO, average_and_plateau
from tests.train.sharding import test_sharded_on_devices as of_devices
from tests.train.sharding.test_sharded_on_devices import _no_device_is_left  # noqa: F401  a fixture


@pytest.fixture(autouse=True, params=[pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def _wire(request, monkeypatch):
    def sharded(spec):
        return dataclasses.replace(spec, sharding="optimizer", wire=request.param)

    for module in of_runs, of_masters:
        monkeypatch.setattr(module, "sharded", sharded)
    if request.param == "int8":
        monkeypatch.setattr(of_runs, "SMALL_UNIT_BYTES", 1024)  # a block
    # Three of four are lost: with so few pieces, not each two hold one together.
    monkeypatch.setattr(of_runs, "kill_two_members", partial(of_runs.kill_members, number=3))


LOSS = of_runs.test_loss_of_a_worker_costs_no_state
KILL = of_runs.test_kill_at_each_point_of_a_step_has_the_digest_of_the_undisturbed_run
SIZES = of_runs.test_zoo_model_through_changing_sizes_has_the_digest_of_a_run_that_is_not_sharded
READ = of_runs.test_checkpoint_is_read_with_and_without_sharding_by_any_number_of_workers
ON_DEVICES = of_devices.test_kill_in_a_sharded_step_that_uses_the_communicator_costs_no_state
# The norm's parameters are in fp32, and all others in bfloat16.
MASTERS = of_masters.test_sharded_run_has_the_digest_of_one_that_is_not
READ_MASTERS = of_masters.test_masters_of_a_checkpoint_are_read_with_and_without_sharding
POINTS = of_devices.IN_CI, of_devices.OTHERS


@pytest.mark.parametrize(
    "rerun",
    [
        *again(LOSS, point=["prepared"], rank=[1]),
        *slow(LOSS, point=["gathered"], rank=[2]),
        *slow(of_runs.test_weights_equal_those_of_a_run_that_is_not_sharded, workers=range(1, 9)),
        *slow(KILL, point=[*of_runs.SHARDED_POINTS, *of_runs.OTHERS]),
        *slow(SIZES, name=[name for name in ZOO if name not in of_runs.REFUSED]),
        *slow(of_runs.test_growing_batch_has_the_digest_of_a_run_that_is_not_sharded, workers=[4]),
        *slow(of_runs.test_workers_join_and_several_leave_at_once),
        *slow(of_runs.test_workers_that_leave_with_notice_take_no_part_of_the_state_with_them),
        *slow(of_runs.test_run_goes_back_to_a_checkpoint_when_both_holders_of_a_piece_are_lost),
        *slow(READ, first=["sharded", "replicated"]),
        *slow(
            of_runs.test_loss_in_a_step_with_a_checkpoint_leaves_its_bytes_as_they_are,
            point=["gathered"],
        ),
        *slow(ON_DEVICES, points=POINTS, train=[average_and_plateau], workers=[4]),
        *slow(of_devices.run_on_devices_has_the_local_digest, workers=[1, 2, 3, 5]),
        *slow(MASTERS, workers=[1, 3], point=[None]),
        *slow(MASTERS, workers=[4], point=["prepared"]),
        *slow(READ_MASTERS, first=["sharded", "replicated"]),
    ],
)
def test_run_with_rounded_gradients(rerun, request):
    rerun(request)
