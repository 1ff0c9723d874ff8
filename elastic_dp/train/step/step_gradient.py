"""The gradient of a step: from the gradients of virtual workers to the one that is applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.reduction_tree import Node
from elastic_dp.sampling.seeds import rounding_seed
from elastic_dp.train.step.loss_result import not_finite, total_weight
from elastic_dp.train.step.participants import (
    RetryStep,
    StepParticipant,
    Verdict,
    either_of,
)

if TYPE_CHECKING:
    from elastic_dp.train.step_builder import StepBuilder


class StepGradient(StepParticipant):
    """The gradient of the step itself. Members agree on which parameters have one, and whether a
    hook fired twice: then the step is done again, and sends nothing before a backward pass ends."""

    name = "gradients"
    late_sums = False  # whether what leaves add up in the present step is sent in a later one

    def __init__(self, build: StepBuilder) -> None:
        self.leaves, self.exchange, self.shares = build.leaves, build.exchange, build.leaves.shares
        self._results, self._state, self._seed = build.results, build.state, build.spec.data.seed
        self.sums = build.gradients  # what sends the gradient that is applied
        self.used = b""  # by parameter of the layout, whether any virtual worker gave it a gradient
        self._step = 0
        self._group: ProcessGroup | None = None
        self.applies = True  # whether there is a gradient to apply, from the commit on
        self.weight = 0.0  # of the step's micro-batches
        self._factor = 1.0  # of the step's own gradient

    # ----------------------------------------------------------------------- generation

    def open(self, group: ProcessGroup) -> None:
        self._group = group

    def distribute(self, step: int) -> None:
        """Gives the members the virtual workers of `step`. The gradients of the step before go."""
        self._open_reducer(self.leaves.gradients, step, sends=True)

    def _open_reducer(self, reducer: GradientReducer, step: int, *, sends: bool) -> None:
        membership, shares = self.shares.membership, self.shares.of_all(step)
        assert self._group is not None and membership is not None
        virtual_workers = self.shares.virtual_workers(step)
        reducer.close()
        given = self._group, shares, virtual_workers, self.leaves.exact, membership.topology
        reducer.open(*given, sends=sends)

    def close(self) -> None:
        """Ends the generation."""
        self.sums.drop()
        self.sums.close()
        self._group = None

    def finished_nodes(self, step: int) -> tuple[Node, ...]:
        """Returns the subtrees that this worker need not run in the next attempt at `step`."""
        return self.leaves.finished_nodes(step)

    def forget_finished(self) -> None:
        """The state is about to change: nothing that is finished can be used again."""
        self.leaves.forget_finished()

    # ----------------------------------------------------------------------------- step

    def begin(self, step: int) -> None:
        self._step = step
        self.leaves.gradients.begin(
            rounding_seed(self._seed, step), early=not self.leaves.is_observed
        )

    def sent(self) -> None:
        """The leaves have run. What is not sent yet is sent."""
        self.sums.send()

    def reduce(self) -> None:
        """Does what other members need for their part of the gradient."""
        self.exchange.reduce()

    def unread(self) -> list[torch.Tensor]:
        return self.exchange.unread()

    def take(self, read: Sequence[torch.Tensor]) -> None:
        self.exchange.take(read)

    def propose(self) -> bytes:
        return bytes([self.leaves.gradients.late]) + self.sums.used

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        either = either_of(proposals)
        self.used = either[1:]
        return RetryStep() if either[0] else None

    def retry(self) -> None:
        """The members do the step again in the same generation. Raises GroupError."""
        self.exchange.settle()
        self.leaves.gradients.sequential = True

    def prepare(self) -> None:
        weight = self.weight = total_weight(self._step, self._results.of_all.values())
        expected = self.leaves.expected_weight(self._step) * self.exchange.divided_by
        self._factor = (expected / weight if weight else 1.0) / self.leaves.scale
        self.exchange.finish(self.factor, self.used)

    def check_finite(self) -> None:
        """Raises LossError if the gradient is not finite, unless that changes the loss scale alone.
        Called when all participants are prepared."""
        if not self.exchange.finite and self._state.loss_scale is None:
            step, describe = self.computed_in, self.leaves.data.describe
            raise not_finite(step, self._results.of_all, describe)

    @property
    def factor(self) -> float:
        """What the sum is multiplied by."""
        return self._factor

    @property
    def computed_in(self) -> int:
        """The step whose micro-batches it is of."""
        return self._step

    def commit(self) -> None:
        self.exchange.assign()

    def ended(self) -> None:
        # A member that takes the step over has no gradients for its body, so no member's body has.
        self.leaves.gradients.drop()
        if self._state.loss_scale is not None and self.applies:
            self._state.loss_scale.step_ended(overflow=not self.exchange.finite)

    def undo(self) -> None:
        self.used = b""
        self.leaves.gradients.drop()

    def aborted(self) -> None:
        """The group was lost before the commit."""
