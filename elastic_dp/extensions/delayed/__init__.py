"""Delayed gradients (`staleness=1`): a gradient is applied one step after the one that computes it,
θ(t+1) = f(θ(t), g(t-1)). So its sum travels while the next one is computed.

    begin    this worker's sums of g(t-1), which it has held since step t-1, are sent
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
from collections.abc import Mapping
from functools import partial

from elastic_dp.coordinator.messages import whole_blocks
from elastic_dp.distributed.gradient_buckets import Gradients
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.reduction_tree import Node, Share, cover_share
from elastic_dp.errors import GroupError
from elastic_dp.extensions.delayed.previous_step import PreviousStep
from elastic_dp.sampling.seeds import rounding_seed
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.step.leaf_runner import FinishedNode, FinishedWork
from elastic_dp.train.step.micro_batch import take_read
from elastic_dp.train.step.step_gradient import StepGradient
from elastic_dp.train.step_builder import StepBuilder

_TRIED = 3  # the first step behind one that changed weights: it runs leaves again that are not lost


def extend(build: StepBuilder) -> None:
    staleness = StepSchedule(build.spec.staleness_by_step)
    build.schedules.append(staleness)
    build.previous = previous = PreviousStep(build.given.model, build.loss_scale)
    build.new_gradient = partial(DelayedGradient, previous, staleness)


class DelayedGradient(StepGradient):
    """The gradient of the step before, in the steps that `staleness` delays."""

    def __init__(self, previous: PreviousStep, staleness: StepSchedule, build: StepBuilder) -> None:
        """`staleness`: of each step."""
        super().__init__(build)
        self.previous, self._staleness = previous, staleness
        self._sender = GradientReducer(
            build.parameters, build.wire, exchange=self.exchange, computes=False
        )
        self._share: Share = ()  # of the step before
        self._virtual_workers = 0
        self._sent = False  # in the present step: what this worker held
        self._held = FinishedWork()

    def _delays(self, step: int) -> bool:
        """Whether the gradient of `step` waits for the step after it."""
        return self._staleness.at(step) > 0

    # ----------------------------------------------------------------------- generation

    def distribute(self, step: int) -> None:
        self.late_sums = self._delays(step)
        self._sender.close()
        self._open_reducer(self.leaves.gradients, step, sends=not self.late_sums)
        self.sums = self.leaves.gradients
        self.leaves.between_leaves = None
        if self.late_sums:
            self.sums = self._sender
            self.leaves.between_leaves = self.exchange.advance
            self._distribute_previous(step)

    def _distribute_previous(self, step: int) -> None:
        """Distributes the virtual workers of the step before `step`, whose gradient it applies."""
        before = max(1, step - 1)
        self._open_reducer(self._sender, before, sends=True)
        self._share = self.shares.of_all(before)[self.shares.rank]
        self._virtual_workers = self.shares.virtual_workers(before)

    def close(self) -> None:
        self._sender.drop()
        self._sender.close()
        self.sums = self.leaves.gradients
        super().close()

    def finished_nodes(self, step: int) -> tuple[Node, ...]:
        if self._held.nodes:
            before = self.shares.virtual_workers(step - 1)
            return whole_blocks(tuple(self._held.nodes), self.shares.least, before)
        return super().finished_nodes(step)

    def forget_finished(self) -> None:
        super().forget_finished()
        self._held = FinishedWork()

    # ----------------------------------------------------------------------------- step

    def begin(self, step: int) -> None:
        if self.late_sums:
            if self.shares.virtual_workers(max(1, step - 1)) != self._virtual_workers:
                self._distribute_previous(step)
            self._launch()
        super().begin(step)

    def _launch(self) -> None:
        """Sends this worker's sums; computes those that are lost. Raises GroupError, LossError."""
        self._sent = False
        if not self._exists:
            self._sender.begin()  # follows changes of `requires_grad`
            nothing: Gradients = [None] * len(self._sender.parameters)
            nodes = cover_share(self._share, self._virtual_workers)
            self._send(0, {node: [*nothing] for node in nodes})
            return
        with self.previous.layout():
            self._send(self.previous.step, self._own_sums())

    @property
    def _exists(self) -> bool:
        """Whether there is such a gradient. In the first of delayed steps there is none."""
        return self.previous.step > 0

    def _own_sums(self) -> dict[Node, Gradients]:
        """Returns this worker's sums of its share of the last committed step."""
        leaves, gradients, step = self.leaves, self.leaves.gradients, self.previous.step
        held = self._held
        if step + 1 == self._staleness.begin_of(step) + _TRIED:
            held.take(*self._share[0])
        whole = held.covers(self._share)
        gradients.begin(rounding_seed(self._seed, step))
        with contextlib.nullcontext() if whole else self.previous.weights(leaves.buffers):
            try:
                results = leaves.run(step, self._share, held, sends=False)
            except GroupError:
                self._hold(gradients.take_sums())
                raise
        unread = [value for one in results.values() for value in one.unread.values()]
        if unread:
            assert self._group is not None and self._group.on_device is not None
            take_read(results, self._group.on_device.read(unread))
        self.previous.check({v: (one.loss, one.weight) for v, one in results.items()})
        return gradients.take_sums()

    def _send(self, step: int, nodes: Mapping[Node, Gradients]) -> None:
        self._sender.begin(rounding_seed(self._seed, step))
        self._sent = True
        last = max(nodes)
        for node, gradients in nodes.items():
            self._sender.add_finished(node, gradients, 0, node == last)
        self._sender.send()

    def sent(self) -> None:
        if self.late_sums:  # all members launch collectives in the same order
            self.exchange.reduce()
        else:
            super().sent()

    def retry(self) -> None:
        super().retry()
        self.aborted()

    @property
    def factor(self) -> float:
        return self.previous.factor if self.late_sums else super().factor

    @property
    def computed_in(self) -> int:
        return super().computed_in - self.late_sums

    def commit(self) -> None:
        """Records what the gradient of the step was computed with, before the commit changes it."""
        if self.late_sums:
            self.applies = self._exists
            if self._delays(self._step + 1):
                losses = {v: (one.loss, one.weight) for v, one in self._results.of_all.items()}
                self.previous.record(self._step, self._factor, losses, self.leaves.buffers)
            else:  # nobody applies it
                self.previous.forget()
        else:
            self.applies = True
        super().commit()

    def ended(self) -> None:
        """Takes this worker's sums of the step, if they are to be applied."""
        if self.late_sums:
            self._held = FinishedWork()
            sums = self.leaves.gradients.take_sums()
            self._hold(sums if self._exists else {})
            self._sender.drop()
            self._sent = False
        super().ended()

    def aborted(self) -> None:
        """Takes back, as far as possible, what was sent in an attempt that was not committed."""
        if self.late_sums and self._sent and self._exists:
            self._hold(self._sender.finished())
        self._sent = False

    def _hold(self, sums: Mapping[Node, Gradients]) -> None:
        for node, gradients in sums.items():
            self._held.add(node, FinishedNode(gradients, {}, {}))
