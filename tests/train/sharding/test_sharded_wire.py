"""`sharding="optimizer"` with `wire=`: the weights are those of a run with the same `wire=` that is
not sharded, to the last bit. Runs of other tests, with rounded gradients."""

import dataclasses
from functools import partial

import pytest

from tests.train import test_master_weights as of_masters
from tests.train import test_sharded_optimizer as of_runs
from tests.train.jobs import ZOO, average_and_plateau
from tests.train.sharding import test_sharded_on_devices as of_devices
from tests.train.sharding.test_sharded_on_devices import _no_device_is_left  # noqa: F401  a fixture

SLOW = pytest.mark.slow
IN_CI = "int8"


@pytest.fixture(autouse=True, params=[pytest.param("bf16", marks=SLOW), IN_CI])
def _wire(request, monkeypatch):
    def sharded(spec):
        return dataclasses.replace(spec, sharding="optimizer", wire=request.param)

    for module in of_runs, of_masters:
        monkeypatch.setattr(module, "sharded", sharded)
    if request.param == "int8":
        monkeypatch.setattr(of_runs, "SMALL_UNIT_BYTES", 1024)  # a block


@pytest.mark.parametrize(
    ("point", "rank"),
    [("prepared", 1), pytest.param("gathered", 2, marks=SLOW)],
)
def test_loss_of_a_worker_with_rounded_gradients_costs_no_state(point, rank, tmp_path):
    of_runs.test_loss_of_a_worker_costs_no_state(point, rank, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", range(1, 9))
def test_weights_equal_those_of_a_run_with_rounded_gradients_that_is_not_sharded(workers):
    of_runs.test_weights_equal_those_of_a_run_that_is_not_sharded(workers)


@pytest.mark.slow
@pytest.mark.parametrize("point", [*of_runs.SHARDED_POINTS, *of_runs.OTHERS])
def test_kill_at_each_point_of_a_step_with_rounded_gradients_changes_no_bit(point, tmp_path):
    of_runs.test_kill_at_each_point_of_a_step_has_the_digest_of_the_undisturbed_run(point, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in of_runs.REFUSED])
def test_zoo_model_with_rounded_gradients_through_changing_sizes_has_the_local_digest(name):
    test = of_runs.test_zoo_model_through_changing_sizes_has_the_digest_of_a_run_that_is_not_sharded
    test(name)


@pytest.mark.slow
def test_growing_batch_with_rounded_gradients_has_the_local_digest():
    of_runs.test_growing_batch_has_the_digest_of_a_run_that_is_not_sharded(4)


@pytest.mark.slow
def test_workers_join_and_leave_a_sharded_run_with_rounded_gradients(tmp_path):
    of_runs.test_workers_join_and_several_leave_at_once(tmp_path)


@pytest.mark.slow
def test_workers_leave_a_sharded_run_with_rounded_gradients_with_notice():
    of_runs.test_workers_that_leave_with_notice_take_no_part_of_the_state_with_them()


@pytest.mark.slow
def test_run_with_rounded_gradients_goes_back_when_both_holders_of_a_piece_are_lost(
    tmp_path, monkeypatch
):
    """Three of four are lost: with so few pieces, not each two hold one together."""
    monkeypatch.setattr(of_runs, "kill_two_members", partial(of_runs.kill_members, number=3))
    of_runs.test_run_goes_back_to_a_checkpoint_when_both_holders_of_a_piece_are_lost(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["sharded", "replicated"])
def test_checkpoint_of_rounded_gradients_is_read_with_and_without_sharding(first, tmp_path):
    of_runs.test_checkpoint_is_read_with_and_without_sharding_by_any_number_of_workers(
        first, tmp_path
    )


@pytest.mark.slow
def test_loss_in_a_step_with_a_checkpoint_and_rounded_gradients_leaves_its_bytes(tmp_path):
    of_runs.test_loss_in_a_step_with_a_checkpoint_leaves_its_bytes_as_they_are("gathered", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("points", [of_devices.IN_CI, of_devices.OTHERS])
def test_kills_of_sharded_workers_on_devices_with_rounded_gradients_cost_no_state(points, tmp_path):
    of_devices.test_kill_in_a_sharded_step_that_uses_the_communicator_costs_no_state(
        points, average_and_plateau, 4, tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_sharded_workers_on_devices_with_rounded_gradients_have_the_local_digest(
    workers, monkeypatch
):
    monkeypatch.setenv("ELASTIC_DP_SIMULATED_DEVICE", "1")
    of_devices.test_weights_on_devices_equal_those_of_a_run_that_is_not_sharded(workers)


# The norm's parameters are in fp32, and all others in bfloat16.


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "point"), [(1, None), (3, None), (4, "prepared")])
def test_sharded_masters_with_rounded_gradients_have_the_local_digest(workers, point, tmp_path):
    of_masters.test_sharded_run_has_the_digest_of_one_that_is_not(workers, point, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["sharded", "replicated"])
def test_masters_with_rounded_gradients_are_read_with_and_without_sharding(first, tmp_path):
    of_masters.test_masters_of_a_checkpoint_are_read_with_and_without_sharding(first, tmp_path)
