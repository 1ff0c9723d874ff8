"""`sharding="optimizer"`: the weights are those of a run that is not sharded, to the last bit, for
any number of workers and whatever happens to them."""

import dataclasses

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.config import CheckpointConfig, MapStyleData
from elastic_dp.coordinator.messages import SizeRequested, StopRequested, WorkerLocation
from elastic_dp.distributed import gradient_units
from elastic_dp.storage import Store
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import eventually
from tests.runs import (
    ENDLESS,
    Points,
    goes_on,
    group,
    local,
    losses_of,
    never_put_off,
    spec_of,
    texts_of,
)
from tests.train.jobs import average_and_plateau, plain
from tests.train.test_kills import IN_A_STEP, with_faults

SMALL_UNIT_BYTES = 256


def in_small_units(train):
    """In a process of its own: parameters are divided into many units, as large ones are."""

    def cut(ctx):
        gradient_units.UNIT_BYTES = SMALL_UNIT_BYTES
        train(ctx)

    return cut


def sharded(spec):
    return dataclasses.replace(spec, sharding="optimizer")


def not_sharded(spec, train):
    """The undisturbed run that is not sharded. Its norms are added over the same units."""
    before = gradient_units.UNIT_BYTES
    gradient_units.UNIT_BYTES = SMALL_UNIT_BYTES
    try:
        return local(dataclasses.replace(spec, sharding=None), train)
    finally:
        gradient_units.UNIT_BYTES = before


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_weights_equal_those_of_a_run_that_is_not_sharded(workers):
    spec = sharded(spec_of(steps=6, workers=workers, min_workers=workers))
    outcome, _ = group(spec, in_small_units(plain))
    assert outcome.error is None, outcome.traceback
    assert (outcome.digest, outcome.step) == (not_sharded(spec, plain).digest, 6)


def job(steps=ENDLESS, workers=4, checkpoint=None, **options):
    config = {
        "eval": MapStyleData(Points(60), micro_batch_size=8),
        "body_s": 0.02,
        "hold": {0: workers},
        **options,
    }
    spec = spec_of(steps=steps, workers=workers, virtual=4, min_workers=1, standby=1, config=config)
    return sharded(dataclasses.replace(spec, checkpoint=checkpoint or spec.checkpoint))


def kill_each(point, workers, tmp_path):
    """One rank after another dies at `point`, with the group at full size."""
    files = [str(tmp_path / str(rank)) for rank in range(workers)]
    return tuple(
        WorkerFault(
            point, rank=rank, world_size=workers, once=file, after=tuple(files[:rank]), settled=True
        )
        for rank, file in enumerate(files)
    )


def check(outcome, train, spec):
    assert outcome.error is None, outcome.traceback
    undisturbed = not_sharded(dataclasses.replace(spec, max_steps=outcome.step), train)
    assert outcome.digest == undisturbed.digest


def kill_two_members(run):
    """Not the standby, which is whoever was ready last."""
    workers = run.controller.status()["workers"]
    members = [worker for worker, stage in workers.items() if stage == "member"]
    for worker in members[:2]:
        run.worker_group.processes[worker].kill()


@pytest.mark.parametrize(("point", "rank"), [("prepared", 1), ("gathered", 2), ("after_commit", 0)])
def test_loss_of_a_worker_costs_no_state(point, rank, tmp_path):
    """Before the parameters are sent, after they have arrived, and when one alone may have
    committed. There is no checkpoint."""
    config = {"hold": dict.fromkeys(range(1, 5), 4)}  # step 5 has four workers
    spec = sharded(spec_of(steps=10, workers=4, min_workers=1, config=config))
    fault = WorkerFault(point, 5, rank, world_size=4, once=str(tmp_path / "dead"))
    outcome, run = group(spec, in_small_units(plain), faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    check(outcome, plain, spec)
    assert outcome.step == 10


SHARDED_POINTS = ("prepared", "gathered", "before_commit", "after_commit", "optimizer")
OTHERS = [point for point in IN_A_STEP if point not in (*SHARDED_POINTS, "buffers")]


@pytest.mark.slow
@pytest.mark.parametrize("point", [*SHARDED_POINTS, *OTHERS])
def test_kill_at_each_point_of_a_step_has_the_digest_of_the_undisturbed_run(point, tmp_path):
    faults = kill_each(point, 4, tmp_path)
    spec = job()
    outcome, run = with_faults(spec, in_small_units(average_and_plateau), faults)
    assert outcome.workers_lost == 4, losses_of(run)
    assert not any("optimizer's state" in text for text in texts_of(run))
    check(outcome, average_and_plateau, spec)


def test_workers_join_and_several_leave_at_once(tmp_path):
    """Four workers, one, three, two: no part of the state is lost, although those who leave hold
    both copies of some."""
    spec = job(hold={}, body_s=0.02)
    script = [
        (10, SizeRequested(1)),
        (10, at_size(1)),
        (10, SizeRequested(3)),
        (10, at_size(3)),
        (10, SizeRequested(2)),
        (10, at_size(2)),
        (10, StopRequested("enough")),
    ]
    outcome, run = group(spec, in_small_units(average_and_plateau), script=script)
    assert not any("optimizer's state" in text for text in texts_of(run))
    check(outcome, average_and_plateau, spec)


def at_size(size):
    def wait(run):
        status = run.controller.status
        eventually(lambda: (status()["world_size"], status()["phase"]) == (size, "running"), status)
        goes_on(run)

    return wait


EVERY_5 = CheckpointConfig(every_steps=5)
STEPS = 20


def steps_of(url):
    return [name.step for name in Catalog(Store(str(url))).names()]


def test_run_goes_back_to_a_checkpoint_when_both_holders_of_a_piece_are_lost(tmp_path):
    url, gate = tmp_path / "run", tmp_path / "gate"

    def kill_two(run):
        eventually(lambda: max(steps_of(url), default=0) >= 10, run.controller.status)
        kill_two_members(run)
        eventually(lambda: any("optimizer's state" in text for text in texts_of(run)))
        gate.touch()

    spec = job(steps=STEPS, checkpoint=EVERY_5, gates={13: str(gate)})
    train = never_put_off(in_small_units(average_and_plateau))
    outcome, _ = group(spec, train, script=[(1, kill_two)], url=str(url))
    check(outcome, average_and_plateau, spec)
    assert outcome.step == STEPS
    assert steps_of(url)[-1] == STEPS


def test_run_without_a_checkpoint_fails_when_both_holders_of_a_piece_are_lost():
    outcome, run = group(job(), in_small_units(plain), script=[(5, kill_two_members)])
    assert outcome.error is not None
    assert any("optimizer's state are lost" in text for text in texts_of(run))


@pytest.mark.parametrize("first", ["sharded", "replicated"])
def test_checkpoint_is_read_with_and_without_sharding_by_any_number_of_workers(first, tmp_path):
    one = job(steps=10, checkpoint=EVERY_5)
    other = dataclasses.replace(job(steps=STEPS, workers=3, checkpoint=EVERY_5), sharding=None)
    if first == "replicated":
        one = dataclasses.replace(one, sharding=None)
        other = sharded(other)
    train = never_put_off(in_small_units(average_and_plateau))
    outcome, _ = group(one, train, url=str(tmp_path))
    assert outcome.error is None, outcome.traceback
    outcome, _ = group(other, train, url=str(tmp_path))
    check(outcome, average_and_plateau, other)
    assert (outcome.step, steps_of(tmp_path)) == (STEPS, [10, 15, 20])


def test_checkpoints_have_the_bytes_of_those_of_a_run_that_is_not_sharded(tmp_path):
    digests = []
    for name, spec in (("sharded", job(steps=5, checkpoint=EVERY_5)), ("plain", job(steps=5))):
        spec = dataclasses.replace(
            spec, sharding=None if name == "plain" else "optimizer", checkpoint=EVERY_5
        )
        train = never_put_off(in_small_units(plain))
        outcome, _ = group(spec, train, url=str(tmp_path / name))
        assert outcome.error is None, outcome.traceback
        catalog = Catalog(Store(str(tmp_path / name)))
        (commit,) = [catalog.read(one) for one in catalog.names()]
        digests.append(commit.manifest.digest)
    assert digests[0] == digests[1]


def node_of(worker):
    return WorkerLocation(node=f"n{int(worker[1:]) % 2}")


@pytest.mark.slow
def test_loss_of_a_whole_node_costs_no_state():
    """Two workers on each of two nodes: the copies of each piece are on both nodes."""

    def lose_node(run):
        processes = dict(run.worker_group.processes)
        members = [
            w for w, stage in run.controller.status()["workers"].items() if stage == "member"
        ]
        assert len(members) == 4, members
        for worker in members:
            if node_of(worker).node == "n0":
                processes[worker].kill()

    script = [(5, at_size(4)), (5, lose_node), (5, goes_on), (5, StopRequested("enough"))]
    spec = job()
    train = in_small_units(average_and_plateau)
    outcome, run = group(spec, train, script=script, location=node_of)
    assert outcome.workers_lost == 2, losses_of(run)
    assert not any("optimizer's state" in text for text in texts_of(run))
    check(outcome, average_and_plateau, spec)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_loss_while_pieces_are_copied_has_the_digest_of_the_undisturbed_run(rank, tmp_path):
    """The second loss comes before the copies that the first one took are made again. What is lost
    with both is read from the checkpoint."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    faults = (
        WorkerFault("after_step", 8, rank=3, world_size=4, once=first),
        WorkerFault("receiving_pieces", rank=rank, once=second, after=(first,)),
    )
    spec = job(steps=STEPS, checkpoint=EVERY_5, hold={})
    train = never_put_off(in_small_units(average_and_plateau))
    outcome, _ = group(spec, train, faults=faults, url=str(tmp_path / "run"))
    check(outcome, average_and_plateau, spec)
    assert outcome.step == STEPS
