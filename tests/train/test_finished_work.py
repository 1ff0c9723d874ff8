"""What survivors have finished of a step is used again when a peer is lost: only the leaves
(virtual workers' micro-batches) that are missing or torn run again, and the bits are the same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.step.finished_work import (
    FinishedNode,
    FinishedWork,
    StepInputs,
    finished_of,
)
from elastic_dp.train.step.micro_batch import MicroBatchResult
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold

STEP, VIRTUAL = 6, 12


def counted(folder: Path, *, precision: str | None = None) -> Any:
    """Each forward pass in a step leaves a line: the step, and the first row of its micro-batch."""

    def train(ctx: Any) -> None:
        model = classifier()

        def loss_fn(m: Any, batch: Any) -> torch.Tensor:
            with open(folder / "passes", "a", encoding="utf-8") as file:
                file.write(f"{ctx._session.position.step + 1} {int(batch['i'][0])}\n")
            return cross_entropy(m, batch)

        for step in ctx.steps(model, adamw(model), loss_fn, precision=precision, clip_norm=0.5):
            hold(ctx, step)

    return train


def passes(folder: Path, step: int = STEP) -> Counter[int]:
    lines = (folder / "passes").read_text(encoding="utf-8").splitlines()
    return Counter(int(line.split()[1]) for line in lines if int(line.split()[0]) == step)


def job(**options: Any) -> Any:
    return spec_of(
        steps=9, workers=3, virtual=VIRTUAL, rows=480, config={"hold": {1: 3}}, **options
    )


@pytest.mark.parametrize(("point", "torn"), [("before_forward", 2), ("backward", 3)])
def test_lost_worker_with_a_replacement_only_its_leaves_run_again(point, torn, tmp_path):
    dead = WorkerFault(point, step=STEP, rank=2, nth=3, once=str(tmp_path / "dead"))
    spec = job(min_workers=3, standby=1)
    outcome, _ = group(spec, counted(tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    times = passes(tmp_path)
    assert len(times) == VIRTUAL and sum(times.values()) == VIRTUAL + torn
    assert max(times.values()) == 2
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, counted(tmp_path)).digest
    assert sum(passes(tmp_path).values()) == VIRTUAL


@pytest.mark.parametrize("rank", range(3))
def test_lost_worker_without_a_replacement_only_its_leaves_run_again(rank, tmp_path):
    """The two survivors keep their 4 virtual workers each, and take 2 of the lost ones."""
    dead = WorkerFault("backward", step=STEP, rank=rank, nth=4, once=str(tmp_path / "dead"))
    spec = job(min_workers=2)
    outcome, _ = group(spec, counted(tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    times = passes(tmp_path)
    assert len(times) == VIRTUAL and sum(times.values()) == VIRTUAL + 4
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, counted(tmp_path)).digest


def test_two_lost_workers_one_after_the_other_only_their_leaves_run_again(tmp_path):
    """The second one is lost in the same step, when it runs what it took from the first one."""
    first = WorkerFault("backward", step=STEP, rank=0, nth=4, once=str(tmp_path / "first"))
    second = WorkerFault("backward", step=STEP, rank=0, world_size=2, once=str(tmp_path / "second"))
    spec = job(min_workers=1)
    outcome, _ = group(spec, counted(tmp_path), faults=(first, second))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 2
    times = passes(tmp_path)
    # 4 of the first one, of which its survivors ran 2 each; then 6 of the second one.
    assert len(times) == VIRTUAL and sum(times.values()) <= VIRTUAL + 4 + 6
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, counted(tmp_path)).digest


INPUTS = StepInputs(6, 48.0, 1024.0, frozenset(), (1, 2))
CHANGES: list[dict[str, Any]] = [
    {"step": 7},
    {"expected_weight": 44.0},
    {"loss_scale": 512.0},
    {"bad_row_groups": frozenset({3})},
    {"parameters": (1,)},
]


def node_of(first: int) -> FinishedNode:
    return FinishedNode([None], {first: MicroBatchResult(1.0, 4.0, {})}, {})


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_finished_work_of_other_inputs_is_forgotten(change):
    work = FinishedWork(INPUTS)
    work.add((0, 4), node_of(0))
    assert finished_of(dataclasses.replace(INPUTS), work) is work
    changed = dataclasses.replace(INPUTS, **change)
    assert finished_of(changed, work) == FinishedWork(changed) == finished_of(changed, None)


def test_finished_node_is_taken_once_and_only_where_it_lies_in_the_range():
    work = FinishedWork(INPUTS)
    work.add((0, 2), node_of(0))
    work.add((4, 8), node_of(4))
    assert work.take(4, 6) is None and work.take(1, 8) is None
    assert work.take(4, 8) == ((4, 8), node_of(4)) and work.take(4, 8) is None
    work.add((0, 4), node_of(0))  # in place of what it contains
    assert list(work.nodes) == [(0, 4)]
