"""What survivors have finished of a step is used again when a peer is lost: only the leaves
(virtual workers' micro-batches) that are missing or torn run again, and the bits are the same."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.generations.state_transfer import StateTransfer
from elastic_dp.train.step.leaf_runner import FinishedNode, FinishedWork, LeafRunner, StepInputs
from elastic_dp.train.step.micro_batch import MicroBatchResult
from elastic_dp.train.step.precision import LossScale
from tests.patience import eventually
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, loop, plain
from tests.train.test_kills import held_before_its_commit

STEP, VIRTUAL = 6, 12
LARGE_LOSS, SMALL_LOSS = 5, 6  # steps


def counted(folder, *, optimizer=adamw, large_loss=0, **options):
    """Each forward pass in a step leaves a line: the step, and the first row of its micro-batch.

    In step `large_loss` the loss is so large that the scaled gradient overflows.
    """

    def train(ctx):
        model = classifier()

        def loss_fn(m, batch):
            step, scale = ctx._session.position.step + 1, ctx._session.state.loss_scale
            with open(folder / "passes", "a", encoding="utf-8") as file:
                file.write(f"{step} {int(batch['i'][0])}\n")
            if scale is not None:
                with open(folder / "scales", "a", encoding="utf-8") as file:
                    file.write(f"{step} {scale.scale}\n")
            return cross_entropy(m, batch) * (1e4 if step == large_loss else 1.0)

        loop(ctx, model, optimizer(model), loss_fn, clip_norm=0.5, **options)

    return train


def passes(folder, step=STEP):
    lines = (folder / "passes").read_text(encoding="utf-8").splitlines()
    return Counter(int(line.split()[1]) for line in lines if int(line.split()[0]) == step)


def job(workers=3, virtual=VIRTUAL, **options):
    """All workers are there before the first step in which one may die: a body waits no longer than
    until the group changes, and the third may join after the second."""
    config = {"hold": dict.fromkeys(range(1, LARGE_LOSS), workers)}
    return spec_of(steps=9, workers=workers, virtual=virtual, rows=480, config=config, **options)


def dies_last(train, folder):
    """Who is to die in a step does so when the others have run their leaves: one of theirs that is
    torn would run again, too. A delayed step begins with the sums of the one before, by `run`."""

    def waits(ctx):
        session, run, point = ctx._session, LeafRunner.run_step, ctx._session.faults.point

        def ran(rank):
            return folder / f"ran-{session.generation}-{session.position.step + 1}-{rank}"

        def runs(leaves, *given, **more):
            results = run(leaves, *given, **more)
            ran(session.rank).touch()
            return results

        def passes(name, step, rank, world_size, generation):
            plan = session.faults.plan
            if any((fault.point, fault.step, fault.rank) == (name, step, rank) for fault in plan):
                others = [ran(other) for other in range(world_size) if other != rank]
                over = session.control._over
                eventually(lambda: all(file.exists() for file in others) or over())
            point(name, step, rank, world_size, generation)

        LeafRunner.run_step, session.faults.point = runs, passes
        train(ctx)

    return waits


def test_two_lost_workers_one_after_the_other_only_their_leaves_run_again(tmp_path):
    """The second one is lost in the same step, when it runs what it took from the first one."""
    first = WorkerFault("backward", step=STEP, rank=0, nth=4, once=str(tmp_path / "first"))
    second = WorkerFault("backward", step=STEP, rank=0, world_size=2, once=str(tmp_path / "second"))
    spec = job(min_workers=1)
    outcome, _ = group(spec, dies_last(counted(tmp_path), tmp_path), faults=(first, second))
    assert outcome.workers_lost == 2
    times = passes(tmp_path)
    # 4 of the first one, of which its survivors ran 2 each; then 6 of the second one.
    assert len(times) == VIRTUAL and sum(times.values()) <= VIRTUAL + 4 + 6
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, counted(tmp_path)).digest


def waits_for_the_others(train, folder, what, step=STEP):
    """In this step rank 0 does not go on behind its gradients until all others have come through
    that method of theirs: "send", or "reduce", which adds to what they received."""

    def waits(ctx):
        session, owner = ctx._session, GradientReducer if what == "send" else GradientExchange
        does = getattr(owner, what)

        def came_through(rank):
            return folder / f"{what}-{rank}"

        def notes(summing):
            does(summing)
            if session.position.step + 1 == step:
                came_through(session.rank).touch()

        setattr(owner, what, notes)
        send = GradientReducer.send

        def sends(reducer):
            send(reducer)
            if session.position.step + 1 == step and session.rank == 0:
                others = [came_through(rank) for rank in range(1, session.world_size)]
                eventually(lambda: all(file.exists() for file in others))

        GradientReducer.send = sends
        train(ctx)

    return waits


@pytest.mark.parametrize(("workers", "virtual"), [(3, 12), (2, 4)], ids=["gathered", "swapped"])
def test_lost_worker_in_the_exchange_only_its_leaves_run_again(workers, virtual, tmp_path):
    """Each has one subtree, which the survivors have added to what they received."""
    dead = WorkerFault("sent", step=STEP, rank=0, once=str(tmp_path / "dead"))
    spec = job(workers, virtual, min_workers=1)
    train = waits_for_the_others(counted(tmp_path), tmp_path, "reduce")
    outcome, _ = group(spec, train, faults=(dead,))
    assert outcome.workers_lost == 1
    times = passes(tmp_path)
    assert len(times) == virtual and sum(times.values()) == virtual + virtual // workers
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, counted(tmp_path)).digest


def test_worker_that_receives_a_step_forgets_what_it_has_finished(tmp_path):
    """Rank 0 has finished its virtual workers of step 22, and cannot commit it when rank 2, which
    has, dies in step 23."""
    fault = WorkerFault("before_forward", 23, rank=2, once=str(tmp_path / "dead"))
    held = held_before_its_commit(plain, 22, 0, tmp_path / "committed")

    def train(ctx):
        moved = StateTransfer.move

        def move(transfer, group, plan, payload, *given):
            if payload is None:
                kept = ctx._session.transaction.leaves._finished
                (tmp_path / ctx._session.worker).write_text(str(kept and [*kept.nodes]))
            return moved(transfer, group, plan, payload, *given)

        StateTransfer.move = move
        held(ctx)

    spec = spec_of(steps=25, config={"hold": {0: 3}}, min_workers=3, standby=1)
    outcome, _ = group(spec, train, faults=(fault,))
    assert outcome.digest == local(spec, plain).digest
    behind = [path.read_text() for path in tmp_path.glob("w*") if path.name[1:].isdigit()]
    assert behind and set(behind) == {"None"}


CHANGES = {
    "lineage": lambda leaves: setattr(leaves, "lineage_id", 3),
    "loss scale": lambda leaves: setattr(leaves.state, "loss_scale", LossScale(2.0)),
    "bad row groups": lambda leaves: leaves.state.bad_row_groups.add(3),
    "layout": lambda leaves: setattr(leaves.gradients, "parameters", (1,)),
    "weight": lambda leaves: setattr(leaves.data, "rows", lambda step, v: 4.0),
}


class Leaves(LeafRunner):
    """Has work of step 6 that is finished, and runs nothing."""

    def __init__(self):
        self.state = SimpleNamespace(loss_scale=LossScale(), bad_row_groups=set())
        self.gradients = SimpleNamespace(parameters=(1, 2))
        self.data = SimpleNamespace(rows=lambda step, v: 6.0)
        self.shares = SimpleNamespace(
            of_all=lambda step: [()], rank=0, virtual_workers=lambda step: 8
        )
        self.lineage_id, self._finished = 1, None
        self.run_step(6)
        self._finished.add((0, 4), node_of(0))

    def run(self, *given: Any, **more: Any) -> Any: ...


@pytest.mark.parametrize(("change", "step"), [("none", 6), ("none", 7), *((c, 6) for c in CHANGES)])
def test_finished_work_is_kept_for_the_same_inputs_and_forgotten_for_others(change, step):
    leaves = Leaves()
    CHANGES.get(change, lambda leaves: None)(leaves)
    leaves.run_step(step)
    assert list(leaves._finished.nodes) == ([(0, 4)] if (change, step) == ("none", 6) else [])


def test_finished_work_is_forgotten_when_a_stop_is_requested():
    """No leaf runs then, so the headers of all say that there is nothing to add."""
    leaves = Leaves()
    leaves.run_step(6, idle=True)
    assert leaves._finished is None


def node_of(first):
    return FinishedNode([None], {first: MicroBatchResult(1.0, 4.0, {})}, {})


def test_finished_node_is_taken_once_and_only_where_it_lies_in_the_range():
    work = FinishedWork(StepInputs(6, 1, 48.0, None, frozenset(), (1, 2)))
    work.add((0, 2), node_of(0))
    work.add((4, 8), node_of(4))
    assert work.take(4, 6) is None and work.take(1, 8) is None
    assert work.take(4, 8) == ((4, 8), node_of(4)) and work.take(4, 8) is None
    work.add((0, 4), node_of(0))  # in place of what it contains
    assert list(work.nodes) == [(0, 4)]
