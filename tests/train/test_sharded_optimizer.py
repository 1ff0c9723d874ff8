"""`sharding="optimizer"`: the weights are those of a run that is not sharded, to the last bit, for
any number of workers and whatever happens to them."""

import copy
import dataclasses
import time

import pytest
import safetensors.torch
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load, verify
from elastic_dp.checkpoint.exporting import export, load_state
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.coordinator.messages import (
    DrainNoticed,
    SizeRequested,
    StopRequested,
    WorkerLocation,
)
from elastic_dp.distributed import gradient_units
from elastic_dp.extensions.sharding import sharded_optimizer
from elastic_dp.storage import Store
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.state.train_state import TrainState
from tests.patience import eventually
from tests.runs import (
    ENDLESS,
    at_size,
    goes_on,
    group,
    local,
    losses_of,
    never_put_off,
    scaled,
    texts_of,
)
from tests.train import test_kills
from tests.train.checkpointing.test_worker_checkpointer import EVERY_5, steps_of
from tests.train.jobs import adamw, average_and_plateau, classifier, loop, plain

SMALL_UNIT_BYTES = 256


def in_small_units(train):
    """In a process of its own: parameters are divided into many units, as large ones are."""
    nbytes = SMALL_UNIT_BYTES

    def cut(ctx):
        gradient_units.UNIT_BYTES = nbytes
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


def begins_with_state(ctx):
    """A state that was loaded before the loop, as of an optimizer that has taken steps."""
    model = classifier()
    other = copy.deepcopy(model)
    before = adamw(other)
    for _ in range(3):
        for number, p in enumerate(other.parameters(), 1):
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p) / number
        before.step()
    optimizer = adamw(model)
    optimizer.load_state_dict(before.state_dict())
    loop(ctx, model, optimizer)


def job(steps=ENDLESS, workers=4, checkpoint=None, **options):
    spec = test_kills.job(steps, workers, **options)
    return sharded(dataclasses.replace(spec, checkpoint=checkpoint or spec.checkpoint))


def check(outcome, train, spec, run=None):
    """And in this run no part of the state was lost."""
    assert run is None or not any("optimizer's state" in text for text in texts_of(run))
    undisturbed = not_sharded(dataclasses.replace(spec, max_steps=outcome.step), train)
    assert outcome.digest == undisturbed.digest


def kill_three_of_four(run):
    """Whoever is left holds half of the pieces. Some two share none. Not the standby, which is
    whoever was ready last."""
    workers = run.controller.status()["workers"]
    members = [worker for worker, stage in workers.items() if stage == "member"]
    assert len(members) == 4
    for worker in members[:3]:
        run.worker_group.processes[worker].kill()


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
    check(outcome, average_and_plateau, spec, run)


def test_workers_that_leave_with_notice_take_no_part_of_the_state_with_them():
    """Two of four at once, who hold both copies of some parts."""

    def take_away(run):
        at_size(4)(run)
        leaving = {member.worker for member in run.controller.coordinator.membership.members[1:3]}
        for worker in leaving:
            run.controller.post(DrainNoticed(worker, time.monotonic() + 30.0))
        status = run.controller.status
        eventually(lambda: not leaving & set(status()["workers"]), status)
        goes_on(run)

    script = [(5, take_away), (5, StopRequested("enough"))]
    spec = job(hold={})
    outcome, run = group(spec, in_small_units(average_and_plateau), script=script)
    assert outcome.workers_lost == 0, losses_of(run)
    check(outcome, average_and_plateau, spec, run)


def of_many_pieces(ctx):
    model = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
    loop(ctx, model, adamw(model))


def copies_slowly(train, dead, told):
    """Behind the loss, copies for new backups take many steps. The body of the first of them waits
    until the coordinator has been told of what comes next. A replacement starts only then: one that
    were ready before would end the generation while members wait here."""

    def cut(ctx):
        if dead.exists():
            eventually(told.exists)
        sharded_optimizer.STEP_BYTES = SMALL_UNIT_BYTES
        sharded_optimizer.STEP_PART = 1 << 20
        session, commits = ctx._session, ctx._session._committed

        def committed(record):
            commits(record)
            sharding = session.state.holders
            survivors = session.world_size == 3  # the step of the loss may be committed by four
            if survivors and dead.exists() and not told.exists() and not sharding.backups_are_made:
                (dead.parent / f"missing-{session.worker}").touch()
                eventually(told.exists)

        session._committed = committed
        train(ctx)

    return cut


@pytest.mark.parametrize("leaving", [1, 2])
def test_notice_right_behind_a_loss_costs_no_state(leaving, tmp_path):
    """The generation ends as planned before each part has two holders again. There is no
    checkpoint."""
    dead, told = tmp_path / "dead", tmp_path / "told"

    def take_away(run):
        eventually(lambda: len([*tmp_path.glob("missing-*")]) == 3, run.controller.status)
        members = run.controller.coordinator.membership.members
        gone = {member.worker for member in members[:leaving]}
        for worker in gone:
            run.controller.post(DrainNoticed(worker, time.monotonic() + 1.0))
        told.touch()
        status = run.controller.status
        eventually(lambda: not gone & set(status()["workers"]), status)
        goes_on(run)

    spec = scaled(job(hold=dict.fromkeys(range(1, 7), 4)), standby=0)
    fault = WorkerFault("after_step", 8, rank=3, world_size=4, once=str(dead))
    train = copies_slowly(in_small_units(of_many_pieces), dead, told)
    script = [(1, take_away), (1, StopRequested("enough"))]
    outcome, run = group(spec, train, faults=(fault,), script=script)
    assert outcome.workers_lost == 1, losses_of(run)
    check(outcome, of_many_pieces, spec, run)


STEPS = 20


def test_run_goes_back_to_a_checkpoint_when_both_holders_of_a_piece_are_lost(tmp_path):
    url, gate = tmp_path / "run", tmp_path / "gate"

    def kill(run):
        eventually(lambda: max(steps_of(url), default=0) >= 10, run.controller.status)
        kill_three_of_four(run)
        eventually(lambda: any("optimizer's state" in text for text in texts_of(run)))
        gate.touch()

    spec = job(steps=STEPS, checkpoint=EVERY_5, gates={13: str(gate)})
    train = never_put_off(in_small_units(average_and_plateau))
    outcome, _ = group(spec, train, script=[(1, kill)], url=str(url))
    check(outcome, average_and_plateau, spec)
    assert outcome.step == STEPS
    assert steps_of(url)[-1] == STEPS


def test_run_without_a_checkpoint_fails_when_both_holders_of_a_piece_are_lost():
    outcome, run = group(job(), in_small_units(plain), script=[(5, kill_three_of_four)], fails=True)
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
    outcome, _ = group(other, train, url=str(tmp_path))
    check(outcome, average_and_plateau, other)
    assert (outcome.step, steps_of(tmp_path)) == (STEPS, [10, 15, 20])


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_checkpoints_have_the_bytes_of_those_of_a_run_that_is_not_sharded(tmp_path):
    spec, url = job(steps=5, checkpoint=EVERY_5), tmp_path / "sharded"
    outcome, _ = group(spec, never_put_off(in_small_units(plain)), url=str(url))
    assert checkpoints_of(url) == checkpoints_without_sharding(spec, plain, tmp_path)
    check_exports(url, outcome.digest)


def check_exports(url, digest):
    """torch reads what is exported, into a model and an optimizer that are not sharded."""
    import torch.distributed.checkpoint as dcp  # which takes a second

    catalog = Catalog(Store(str(url)))
    commit = catalog.read(catalog.names()[-1])
    export(catalog, commit, str(url / "of_torch"))
    model = classifier()
    optimizer = adamw(model)
    for p in model.parameters():  # so that the optimizer has a state to read into
        p.grad = torch.zeros_like(p)
    optimizer.step()
    read = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(read, checkpoint_id=url / "of_torch", no_dist=True)
    optimizer.load_state_dict(read["optimizer"])
    assert TrainState(model, optimizer, None, None, {}).digest() == digest
    stored = load_state(str(url)).optimizer["state"]
    for number, p in enumerate(model.parameters()):
        assert optimizer.state[p]["exp_avg"].any()
        assert all(torch.equal(optimizer.state[p][key], x) for key, x in stored[number].items())
    export(catalog, commit, str(url / "model.safetensors"))
    opened = safetensors.torch.load_file(url / "model.safetensors")
    assert opened.keys() == model.state_dict().keys()
    assert all(torch.equal(x, opened[key]) for key, x in model.state_dict().items())


def checkpoints_of(url):
    """By step, the digests of what they have, in whatever files it lies."""
    catalog = Catalog(Store(str(url)))
    digests = {}
    for name in catalog.names():
        assert verify(catalog, name) == []
        snapshot = Snapshot()
        snapshot.take(name.step, load(catalog, catalog.read(name)))
        digests[name.step] = snapshot.manifest().digest
    return digests


def checkpoints_without_sharding(spec, train, tmp_path):
    url = str(tmp_path / "not_sharded")
    group(dataclasses.replace(spec, sharding=None), never_put_off(in_small_units(train)), url=url)
    return checkpoints_of(url)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["prepared", "gathered", "after_commit", "after_step", "keeping"])
def test_loss_in_a_step_with_a_checkpoint_leaves_its_bytes_as_they_are(point, tmp_path):
    fault = WorkerFault(point, 10, rank=1, world_size=4, once=str(tmp_path / "dead"))
    spec = job(steps=STEPS, checkpoint=EVERY_5)
    train = never_put_off(in_small_units(average_and_plateau))
    outcome, run = group(spec, train, faults=(fault,), url=str(tmp_path / "run"))
    check(outcome, average_and_plateau, spec)
    assert outcome.workers_lost == 1, losses_of(run)
    without = checkpoints_without_sharding(spec, average_and_plateau, tmp_path)
    assert checkpoints_of(tmp_path / "run") == without
    assert set(without) == {10, 15, 20}


def node_of(worker):
    return WorkerLocation(node=f"n{int(worker[1:]) % 2}")


def later_node_of(worker):  # the fifth worker is on the node of the first four, and later ones not
    return WorkerLocation(node="n0" if int(worker[1:]) <= 5 else "n1")


JOINS = [(5, step) for size in (1, 2, 3, 4) for step in (SizeRequested(size), at_size(size))]


@pytest.mark.slow
@pytest.mark.parametrize(("joins", "node"), [([], node_of), (JOINS, later_node_of)])
def test_loss_of_a_whole_node_costs_no_state(joins, node):
    """Each piece is on both nodes of two workers each, also if they have joined one by one."""

    def lose_node(run):
        status = run.controller.status()["workers"].items()
        lost = [w for w, stage in status if stage == "member" and node(w).node == "n0"]
        assert len(lost) == 2, status
        for worker in lost:
            run.worker_group.processes[worker].kill()

    script = [(5, at_size(4)), *joins, (5, lose_node), (5, goes_on), (5, StopRequested("enough"))]
    # A standby could be among the first four, three of which may then be on one node.
    spec = scaled(job(**({"hold": {}} if joins else {})), standby=0)
    train = in_small_units(average_and_plateau)
    outcome, run = group(spec, train, script=script, location=node)
    assert outcome.workers_lost == 2, losses_of(run)
    check(outcome, average_and_plateau, spec, run)
