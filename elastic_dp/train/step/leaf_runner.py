"""Runs a worker's share of the virtual workers of a step. Each is a leaf of the reduction tree, and
a `Leaf` makes its gradient.

A lost peer ends the step of all members. The weights have not moved, the rows are the same, and the
sums follow one tree, so the sum of a subtree that this worker has finished is still right, bit for
bit. In the next generation it is used where the subtree lies within the worker's range of virtual
workers (`FinishedWork`): only what is missing runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from elastic_dp.coordinator.messages import Membership, whole_blocks
from elastic_dp.distributed.gradient_buckets import Gradients
from elastic_dp.distributed.reduction_tree import Node, Share, TreeLeaf, fold
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.state.module_buffers import LeafBuffers, ModuleBuffers
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.micro_batch import MicroBatchResult
from elastic_dp.train.step.participants import StepParticipant

if TYPE_CHECKING:
    from elastic_dp.train.step_builder import StepBuilder


class WorkShares:
    """Which virtual workers each member of a generation runs in a step. `virtual_workers`: their
    number, by step. `equal`: members are meant to run equally many."""

    def __init__(self, virtual_workers: StepSchedule, *, equal: bool) -> None:
        self._schedule, self._equal = virtual_workers, equal
        self.least = virtual_workers.least
        self.membership: Membership | None = None  # of the present generation, with this rank
        self.rank = 0
        self.joining: frozenset[int] = frozenset()  # ranks without virtual workers; gradual_join.py

    def open(self, membership: Membership, rank: int, joining: frozenset[int]) -> None:
        self.membership, self.rank, self.joining = membership, rank, joining

    def virtual_workers(self, step: int) -> int:
        return self._schedule.at(step)

    def of_all(self, step: int) -> Sequence[Share]:
        """Returns the share of each rank."""
        assert self.membership is not None
        total, ranks = self._schedule.at(step), range(len(self.membership.members))
        if not self.joining:
            return self.membership.shares(total, equal=self._equal)
        others = [rank for rank in ranks if rank not in self.joining]
        ends = [total * number // len(others) for number in range(len(others) + 1)]
        ranges = dict(zip(others, pairwise(ends), strict=True))
        return [(ranges[rank],) if rank in ranges else () for rank in ranks]

    def mine(self, step: int) -> list[int]:
        """Returns the virtual workers of this rank."""
        return [v for first, last in self.of_all(step)[self.rank] for v in range(first, last)]


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of one virtual worker in a step."""

    step: int
    leaf: TreeLeaf
    is_last: bool  # of this worker: buckets of gradients are sent during its backward pass
    expected: float  # the weight of the step
    virtual_worker: int
    runner: LeafRunner


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the gradients of a step depend on: a sum is used again only if all of it is the same.
    Step and lineage stand for the weights and the rows."""

    step: int
    lineage_id: int  # of the worker's state
    expected_weight: float
    loss_scale: float | None
    bad_row_groups: frozenset[int]
    parameters: tuple[int, ...]  # the identities of those that require a gradient, in layout order


@dataclass(frozen=True, slots=True)
class FinishedNode:
    """The sum of a subtree, with what its leaves (virtual workers) gave."""

    gradients: Gradients
    results: Mapping[int, MicroBatchResult]
    buffers: Mapping[int, LeafBuffers]


@dataclass(slots=True)
class FinishedWork:
    """The finished nodes of one step. No two of them overlap. `inputs` is None for the last
    committed step; see extensions/delayed."""

    inputs: StepInputs | None = None
    nodes: dict[Node, FinishedNode] = field(default_factory=dict)

    def take(self, first: int, limit: int) -> tuple[Node, FinishedNode] | None:
        """Removes and returns the node that begins at virtual worker `first`, if there is one and
        it ends at `limit` or before. Its gradients may be overwritten from then on."""
        for node in self.nodes:
            if node[0] == first and node[1] <= limit:
                return node, self.nodes.pop(node)
        return None

    def covers(self, share: Share) -> bool:
        """Returns whether these nodes are all that `take` is asked for of a share."""
        for first, limit in share:
            while first < limit:
                node = next((n for n in self.nodes if n[0] == first and n[1] <= limit), None)
                if node is None:
                    return False
                first = node[1]
        return True

    def add(self, node: Node, finished: FinishedNode) -> None:
        """Adds a node, in place of those that it overlaps."""
        low, high = node
        self.nodes = {n: f for n, f in self.nodes.items() if n[1] <= low or high <= n[0]}
        self.nodes[node] = finished


class LeafRunner:
    def __init__(self, build: StepBuilder, buffers: ModuleBuffers, shares: WorkShares) -> None:
        self.leaf, self.data, self.exact = build.new_leaf(build), build.rows, build.spec.exact
        self.state, self.gradients = build.state, build.gradients
        self.buffers: ModuleBuffers = buffers
        self.shares: WorkShares = shares
        self.control, self.points = build.session.control, build.reporter.points
        self.speed: ComputeSpeed = build.speed
        # The processes of a worker have not finished the same of a step that was aborted.
        self._keeps_finished = build.gang is None
        self.lineage_id: int = 0  # of the state; see `Membership.lineage_id`
        # Advances gradients of an earlier step that are in flight.
        self.between_leaves: Callable[[], None] | None = None
        self.results: dict[int, MicroBatchResult] = {}  # of the present step
        self._finished: FinishedWork | None = None  # of a step that was aborted
        self._observers: Sequence[StepParticipant] = ()
        self._expected = 0, 0.0  # the weight of a step, in one attempt

    # ----------------------------------------------------------------------------- a step

    def begin(self, step: int, participants: Sequence[StepParticipant]) -> None:
        self._observers = [p for p in participants if p.observes_leaves(step)]

    @property
    def scale(self) -> float:
        """What each loss is multiplied by."""
        return self.state.loss_scale.scale if self.state.loss_scale else 1.0

    @property
    def is_observed(self) -> bool:
        """Whether a participant observes the gradients of this step's leaves."""
        return bool(self._observers)

    def expected_weight(self, step: int) -> float:
        """Returns the weight of a step: the rows of all its virtual workers."""
        if self._expected[0] != step:
            numbers = range(self.shares.virtual_workers(step))
            self._expected = step, float(sum([self.data.rows(step, v) for v in numbers]))
        return self._expected[1]

    def run_step(
        self, step: int, *, sends: bool = True, idle: bool = False
    ) -> dict[int, MicroBatchResult]:
        """Runs this worker's share of the step; see `run`. Uses what is finished of it."""
        self._expected = 0, 0.0  # rows may be left out since the last attempt
        # An idle worker has nothing to send with what is finished.
        inputs = self._inputs(step)
        if idle or self._finished is None or self._finished.inputs != inputs:
            self._finished = None if idle else FinishedWork(inputs)
        share = self.shares.of_all(step)[self.shares.rank]
        return self.run(step, share, self._finished, sends=sends, idle=idle)

    def run(
        self,
        step: int,
        share: Share,
        finished: FinishedWork | None,
        *,
        sends: bool,
        idle: bool = False,
    ) -> dict[int, MicroBatchResult]:
        """Runs the leaves of `share` that are not `finished`. Returns the results of all of them.
        With `sends`, the gradients of the last leaf are sent in its backward pass. An `idle` worker
        runs none. Raises GroupError, and LossError if a loss function has changed a parameter."""
        self.state.model_guard.leaves_begin()
        self.speed.begin(self.leaf.micro_batches(step))
        last = share[-1][1] if sends and share else None
        virtual_workers, expected = self.shares.virtual_workers(step), self.expected_weight(step)
        self.results = {}
        for first, limit in share:
            leaves = fold(first, limit, virtual_workers)
            reused_until = first
            for leaf in leaves:
                v = leaf.virtual_worker
                if v < reused_until:
                    continue
                self.control.may_continue()
                taken = finished.take(v, limit) if finished and finished.nodes else None
                if taken is None:
                    turn = Turn(step, leaf, v + 1 == last, expected, v, self)
                    self._run_leaf(turn, idle=idle)
                    continue
                node, work = taken
                reused_until = node[1]
                merges = leaves[reused_until - 1 - first].merges
                merges -= fold(*node, virtual_workers)[-1].merges
                self.gradients.add_finished(node, work.gradients, merges, reused_until == last)
                self.results |= work.results
                self.buffers.reuse(work.buffers)
        self.leaf.check_written()
        return self.results

    def _run_leaf(self, turn: Turn, *, idle: bool) -> None:
        self.gradients.before_leaf(turn.leaf, turn.is_last)
        if idle:
            self.add(turn, None, contributes=False)
        else:
            self.leaf.run(turn)
        if self.speed.measures:
            self.speed.end_micro_batch()
        if self.between_leaves is not None:
            self.between_leaves()

    def add(
        self,
        turn: Turn,
        result: MicroBatchResult | None,
        *,
        contributes: bool,
        given: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Adds the buffers, and what a backward pass has left in `p.grad`, or the gradients that
        are `given` up, by parameter."""
        if result is not None:
            self.results[turn.virtual_worker] = result
        self.buffers.after_leaf(turn.virtual_worker, contributes=contributes)
        if given is not None:
            self.gradients.add_leaf(turn.leaf, given, turn.is_last)
            return
        observed = self.gradients.after_leaf(
            turn.leaf, turn.is_last, observed=bool(self._observers)
        )
        if result is not None and contributes:
            for participant in self._observers:
                participant.leaf_ended(result, observed)

    # ------------------------------------------------------------------------ finished work

    def _inputs(self, step: int) -> StepInputs:
        """Returns what the gradients of a step depend on."""
        scale = self.state.loss_scale
        return StepInputs(
            step,
            self.lineage_id,
            self.expected_weight(step),
            scale.scale if scale else None,
            frozenset(self.state.bad_row_groups),
            self.gradients.parameters,
        )

    def end(self, *, aborted: bool) -> None:
        """Ends a step. Keeps what is finished of one that was aborted."""
        if not aborted:
            self._finished = None
        elif self._keeps_finished and self._finished is not None:
            self._keep(self._finished)
        self.results = {}

    def _keep(self, work: FinishedWork) -> None:
        assert work.inputs is not None
        for node, gradients in self.gradients.finished().items():
            results = {v: r for v, r in self.results.items() if node[0] <= v < node[1]}
            if not any(self.data.bad_row_groups(work.inputs.step, v) for v in results):
                buffers = self.buffers.finished(range(*node))
                work.add(node, FinishedNode(gradients, results, buffers))

    def finished_nodes(self, step: int) -> tuple[Node, ...]:
        """Returns the finished subtrees of an aborted attempt at `step`, as ranges of the blocks
        of virtual workers that a membership distributes."""
        work = self._finished
        if work is None or work.inputs is None or work.inputs.step != step:
            return ()
        return whole_blocks(work.nodes, self.shares.least, self.shares.virtual_workers(step))

    def forget_finished(self) -> None:
        """Forgets what is finished of an aborted step: the state is about to change."""
        self._finished = None
