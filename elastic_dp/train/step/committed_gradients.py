"""The gradients of the last committed step, and their norm.

The norm of unclipped gradients is computed when it is first read, unless the optimizer may write to
them before. Gradients are views into buffers that the next step needs, so they are dropped then.
"""

from __future__ import annotations

import torch

from elastic_dp.distributed.gradient_norm import gradient_square
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.train.exactness.torch_optimizers import may_write_to_gradients
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.master_weights import class_of
from elastic_dp.train.state.step_record import StepRecord
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.step.gang_step import clip_gang
from elastic_dp.train.step.gradient_clipping import clip, norm_of


class CommittedGradients:
    """`clip_norm`: the largest norm of a step's gradient. `clip_value`: the largest absolute value
    of an element. None: no limit."""

    def __init__(
        self,
        state: TrainState,
        clip_norm: float | None,
        gang: Gang | None,
        *,
        clip_value: float | None = None,
    ) -> None:
        self._state, self._clip_norm, self._gang = state, clip_norm, gang
        self._clip_value = clip_value
        self._units = UnitLayout.of(state.parameters.values())
        self._gradients: list[torch.Tensor | None] | None = None  # by parameter
        self._norm: torch.Tensor | None = None  # before clipping and before the optimizer's step

    def drop(self) -> None:
        self._gradients = self._norm = None

    def take(self) -> None:
        """Takes the gradients that the parameters have now."""
        gradients = [p.grad for p in self._state.parameters.values()]
        self._gradients = list(map(local_of, gradients)) if self._state.in_parts else gradients

    def square(self) -> float:
        """Returns the square of the norm."""
        assert self._gradients is not None
        return gradient_square(self._units, self._gradients)

    def clip(self, *, reads_later: bool) -> float | None:
        """Clips the gradients, if the job does. Returns their norm before, if it is known now.

        `reads_later`: the host waits for the device when the norm is read.
        """
        norm = self._clip_to_norm(reads_later=reads_later)
        present = [g for g in self._gradients or () if g is not None]
        if self._clip_value is not None and present:  # as torch.nn.utils.clip_grad_value_
            torch._foreach_clamp_min_(present, -self._clip_value)
            torch._foreach_clamp_max_(present, self._clip_value)
        return norm

    def _clip_to_norm(self, *, reads_later: bool) -> float | None:
        assert self._gradients is not None
        if self._gang is not None:  # now, since all processes of this worker are here
            return clip_gang(self._gang, self._units, self._gradients, self._clip_norm)
        if self._clip_norm is not None:
            norm = clip(self._state, self._units, self._clip_norm)
            if not reads_later:
                return float(norm)
            self._norm = norm
        elif self._clip_value is not None or self._may_be_written_to:
            self._norm = norm_of(self._state, self._units, self._gradients)
        return None

    @property
    def _may_be_written_to(self) -> bool:
        optimizer = self._state.optimizer
        return may_write_to_gradients(class_of(optimizer), optimizer.param_groups)

    def complete(self, record: StepRecord) -> None:
        """Adds the norm to the step's record, unless it is there or the gradients are gone."""
        if record.grad_norm is not None or self._gradients is None:
            return
        norm = self._norm
        if norm is None:
            norm = norm_of(self._state, self._units, self._gradients)
        record.add_grad_norm(float(norm))
