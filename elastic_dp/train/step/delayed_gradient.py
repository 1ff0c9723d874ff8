"""Delayed gradients (`staleness=1`): a gradient is applied one step after the one that computes it,
θ(t+1) = f(θ(t), g(t-1)). So its sum travels while the next one is computed.

    launch   this worker's sums of g(t-1), which it has held since step t-1
    leaves   of g(t), at θ(t); between two passes, what has arrived of g(t-1) is added and sent on
    header   losses and buffers of step t, as in any step
    commit   g(t-1) is applied to θ(t), and this worker holds its sums of g(t)

No collective is in flight between two steps, so a step is the same transaction as any other. What
is new is that after the commit each worker holds sums that no other one has. Where they are lost,
their leaves run again in the next step, with the weights and buffers that they had: `PreviousStep`,
which is part of the state. A worker that joins or restores a checkpoint begins so, too: it holds
nothing. If a loss is not what it was, the loss function depends on something else.

The first step has no g(0) and changes no weight. The gradient of a run's last step is not applied,
so that a run of more steps passes through the same weights. Where only some steps are delayed, each
row of them is like a run: its first step changes no weight, and the gradient of its last one is
dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from elastic_dp.distributed.gradient_buckets import Gradients
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.reduction_tree import Node, Share, cover_share
from elastic_dp.errors import GroupError
from elastic_dp.sampling import StepSchedule
from elastic_dp.sampling.seeds import rounding_seed
from elastic_dp.train.state.previous_step import PreviousStep
from elastic_dp.train.step.finished_work import FinishedNode, FinishedWork
from elastic_dp.train.step.leaf_runner import LeafRunner
from elastic_dp.train.step.micro_batch import MicroBatchResult, take_read

_TRIED = 3  # the first step behind one that changed weights: it runs leaves again that are not lost


class DelayedGradient:
    """The gradient of the last committed step, until it is applied.

    `sums` adds it up across workers, and sends only. `leaves` runs the leaves of all steps, on a
    reducer that sends nothing in delayed ones. `staleness`: of each step. `expected(step)` is the
    weight of a step.
    """

    def __init__(
        self,
        previous: PreviousStep,
        sums: GradientReducer,
        leaves: LeafRunner,
        staleness: StepSchedule,
        seed: int,
        expected: Callable[[int], float],
    ) -> None:
        self.previous, self.sums = previous, sums
        self._leaves, self._staleness = leaves, staleness
        self._seed, self._expected = seed, expected
        self._share: Share = ()
        self.virtual_workers = 0
        self._sent = False  # in the present step: `sums` has what this worker held
        self._held = FinishedWork()

    @property
    def exists(self) -> bool:
        """Whether there is such a gradient. In the first of delayed steps there is none."""
        return self.previous.step > 0

    def delays(self, step: int) -> bool:
        """Whether the gradient of `step` waits for the step after it."""
        return self._staleness.at(step) > 0

    def distribute(self, share: Share, virtual_workers: int) -> None:
        """Sets this worker's share of the last committed step."""
        self._share, self.virtual_workers = share, virtual_workers

    def launch(self, group: ProcessGroup) -> None:
        """Sends this worker's sums. Runs the leaves of those that it does not hold. Raises
        GroupError and LossError."""
        self._sent = False
        if not self.exists:
            self.sums.begin()  # follows changes of `requires_grad`
            nothing: Gradients = [None] * len(self.sums.parameters)
            nodes = cover_share(self._share, self.virtual_workers)
            self._send(0, {node: [*nothing] for node in nodes})
            return
        with self.previous.layout():
            self._send(self.previous.step, self._own_sums(group))

    def commit(self, step: int, factor: float, results: Mapping[int, MicroBatchResult]) -> bool:
        """Records what the gradient of `step` was computed with, before the commit changes it.
        Returns whether there is a gradient before it, to apply now.

        `factor`: what the sum is to be multiplied by. `results`: of all members, by virtual worker.
        """
        applies = self.exists
        if not self.delays(step + 1):  # nobody applies it
            self.previous.forget()
            return applies
        losses = {v: (one.loss, one.weight) for v, one in results.items()}
        self.previous.record(step, factor, losses, self._leaves.buffers)
        return applies

    def hold(self) -> None:
        """Takes this worker's sums of the step that is committed, if they are to be applied.
        Gradients are dropped."""
        self._held = FinishedWork()
        sums = self._leaves.gradients.take_sums()
        self._add(sums if self.exists else {})
        self.sums.drop()
        self._sent = False

    def hold_again(self) -> None:
        """Takes back, as far as possible, what was sent in an attempt that was not committed."""
        if self._sent and self.exists:
            self._add(self.sums.finished())
        self._sent = False

    def forget(self) -> None:
        """Forgets what this worker holds: the state is about to change."""
        self._held = FinishedWork()

    @property
    def held(self) -> tuple[Node, ...]:
        return tuple(self._held.nodes)

    # ----------------------------------------------------------------------------------- private

    def _own_sums(self, group: ProcessGroup) -> dict[Node, Gradients]:
        """Returns this worker's sums of its share of the last committed step."""
        leaves, gradients, step = self._leaves, self._leaves.gradients, self.previous.step
        held = self._held
        if step + 1 == self._staleness.begin_of(step) + _TRIED:
            held.take(*self._share[0])
        whole = held.covers(self._share)
        gradients.begin(rounding_seed(self._seed, step))
        with contextlib.nullcontext() if whole else self.previous.weights(leaves.buffers):
            try:
                given = step, self._share, self.virtual_workers, self._expected(step), held
                results = leaves.run(*given, meanwhile=self.sums.advance)
            except GroupError:
                self._add(gradients.take_sums())
                raise
        unread = [value for one in results.values() for value in one.unread.values()]
        if unread:
            assert group.on_device is not None
            take_read(results, group.on_device.read(unread))
        self.previous.check({v: (one.loss, one.weight) for v, one in results.items()})
        return gradients.take_sums()

    def _send(self, step: int, nodes: Mapping[Node, Gradients]) -> None:
        self.sums.begin(rounding_seed(self._seed, step))
        self._sent = True
        last = max(nodes)
        for node, gradients in nodes.items():
            self.sums.add_finished(node, gradients, 0, node == last)
        self.sums.send()

    def _add(self, sums: Mapping[Node, Gradients]) -> None:
        for node, gradients in sums.items():
            self._held.add(node, FinishedNode(gradients, {}, {}))
