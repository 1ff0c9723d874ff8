"""Runs a worker's share of the virtual workers of a step. Each is a leaf of the reduction tree: a
forward and a backward pass, or several inner steps, whose gradients are added to those before it.

What the worker has finished of the step before it was aborted is used in place of its leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.reduction_tree import Leaf, Share, fold
from elastic_dp.errors import GroupError
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.noise_scale import LEAF_SQUARE
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.finished_work import FinishedWork
from elastic_dp.train.step.gang_step import refuse_none
from elastic_dp.train.step.inner_steps import InnerSteps, PseudoGradients
from elastic_dp.train.step.micro_batch import MicroBatchResult, MicroBatchRunner


@dataclass
class LeafRunner:
    data: RowSource
    micro_batches: MicroBatchRunner
    gradients: GradientReducer
    buffers: ModuleBuffers
    control: WorkerControl
    speed: ComputeSpeed
    pass_point: Callable[[str, int], None]  # see fault_injection.py
    gang: Gang | None = None
    noise_scale_every: int | None = None
    inner: InnerSteps | None = None
    # Sends what all members send before their gradients, which the last backward pass sends. Called
    # before that pass, if there is one, and behind it, where it does nothing any more.
    send_first: Callable[[], None] | None = None
    _meanwhile: Callable[[], None] | None = None  # see `run`
    results: dict[int, MicroBatchResult] = field(default_factory=dict)  # of the present step

    def run(
        self,
        step: int,
        share: Share,
        virtual_workers: int,
        expected: float,
        finished: FinishedWork | None,
        *,
        meanwhile: Callable[[], None] | None,
        stop: bool = False,
    ) -> dict[int, MicroBatchResult]:
        """Runs the leaves of `share` that are not `finished`. Returns the results of all of them.

        `virtual_workers`: of the step, with the weight `expected` in all. Without `meanwhile`, the
        gradients of the last leaf are sent in its backward pass. With it, it is called between two
        passes, and nothing is sent. With `stop` no leaf runs. Raises GroupAborted.
        """
        self._meanwhile = meanwhile
        last = share[-1][1] if meanwhile is None else None
        results = self.results = {}
        for first, limit in share:
            leaves = fold(first, limit, virtual_workers)
            reused_until = first
            for leaf in leaves:
                v = leaf.virtual_worker
                if v < reused_until:
                    continue
                self.control.may_continue()
                taken = finished.take(v, limit) if finished is not None else None
                if taken is None:
                    run_leaf = self._run_leaf if self.inner is None else self._run_inner_steps
                    run_leaf(leaf, v + 1 == last, step, stop, expected)
                    continue
                node, work = taken
                reused_until = node[1]
                merges = leaves[reused_until - 1 - first].merges
                merges -= fold(*node, virtual_workers)[-1].merges
                self.gradients.add_finished(node, work.gradients, merges, reused_until == last)
                results.update(work.results)
                self.buffers.reuse(work.buffers)
        if self.send_first is not None:
            self.send_first()
        return results

    def end(self) -> None:
        """Drops the results of a step."""
        self.results = {}

    def measures_noise(self, step: int) -> bool:
        return self.noise_scale_every is not None and step % self.noise_scale_every == 0

    def _run_leaf(self, leaf: Leaf, is_last: bool, step: int, stop: bool, expected: float) -> None:
        v = leaf.virtual_worker
        self.gradients.before_leaf(leaf, is_last)
        loss = None
        if not stop and self.data.rows(step, v) > 0:
            self.pass_point("before_forward", step)
            batch = self.micro_batches.batch(step, v)
            loss, self.results[v] = self.micro_batches.forward(batch, step, v, expected)
            self.pass_point("forward", step)
            self.gradients.before_backward()
        if self._meanwhile is not None:
            self._meanwhile()
        if loss is None and not stop:
            refuse_none(self.gang, step, v)
        if loss is not None:
            if is_last and self.send_first is not None:
                self.send_first()
            self.pass_point("backward", step)
            loss.backward()
        self.buffers.after_leaf(v, contributes=loss is not None)
        self.gradients.after_leaf(leaf, is_last)
        if loss is not None and self.measures_noise(step):
            self.results[v].measure(LEAF_SQUARE, self.gradients.leaf_square())
        self.speed.end_micro_batch()
        if self._meanwhile is not None:
            self._meanwhile()

    def _run_inner_steps(
        self, leaf: Leaf, is_last: bool, step: int, stop: bool, expected: float
    ) -> None:
        """Runs a leaf of several inner steps to its end, also where the group is lost meanwhile:
        the next generation needs it."""
        v, inner = leaf.virtual_worker, self.inner
        assert inner is not None
        lost: list[GroupError] = []

        def passes(point: str) -> None:
            if point == "backward" and self._meanwhile is not None and not lost:
                try:
                    self._meanwhile()
                except GroupError as error:
                    lost.append(error)
            self.pass_point(point, step)

        found: PseudoGradients = {}
        if not stop and self.data.rows(step, v) > 0:
            given = inner.batches(step, v), expected, self.gradients, passes
            found, self.results[v] = inner.run(step, v, *given)
        contributes = v in self.results and self.results[v].weight > 0
        self.buffers.after_leaf(v, contributes=contributes)
        self.gradients.add_leaf(leaf, found, is_last)
        if lost:
            raise lost.pop()
        if self._meanwhile is not None:
            self._meanwhile()
