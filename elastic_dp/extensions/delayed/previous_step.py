"""What the gradient of the last committed step was computed with, for `staleness=1`.

That gradient is applied in the step after it. Until its sum is finished, a worker that is lost
takes its part of it along, and whoever computes that part again needs the weights as they were: one
more copy of the parameters and buffers. It is part of the state, so a worker that joins gets it,
and a checkpoint has it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elastic_dp.errors import LossError
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.train_state import set_modes
from elastic_dp.train.step.precision import LossScale


class PreviousStep:
    """`step` is 0 where there is no such gradient, as before the first commit. `factor`: what the
    finished sum of its gradient is multiplied by, once for the weights and the loss scale that it
    had."""

    def __init__(self, model: nn.Module, loss_scale: LossScale | None) -> None:
        self._model, self._loss_scale = model, loss_scale
        self._parameters = list(model.parameters())
        self.step, self.factor = 0, 1.0
        self._scale = 1.0
        self._losses: dict[int, tuple[float, float]] = {}  # see `record`
        self._values: list[torch.Tensor] = []  # of the parameters
        self._buffers: list[torch.Tensor] = []
        self._requires_grad: list[bool] = []
        self._training: list[bool] = []

    @torch.no_grad()
    def record(
        self,
        step: int,
        factor: float,
        losses: Mapping[int, tuple[float, float]],
        buffers: ModuleBuffers,
    ) -> None:
        """Takes what `step` was computed with, before its commit changes that. `losses`: each with
        its weight, by virtual worker, without those whose weight is 0."""
        self.step, self.factor, self._losses = step, factor, dict(losses)
        if not self._values:
            self._values = [torch.empty_like(p, requires_grad=False) for p in self._parameters]
        for value, p in zip(self._values, self._parameters, strict=True):
            value.copy_(p)
        self._buffers = buffers.committed()
        self._scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        self._requires_grad = [p.requires_grad for p in self._parameters]
        self._training = [module.training for module in self._model.modules()]

    def forget(self) -> None:
        """Forgets that gradient, which is not to be applied, and what it was computed with."""
        self.step, self.factor, self._scale, self._losses = 0, 1.0, 1.0, {}
        self._values, self._buffers = [], []
        self._requires_grad, self._training = [], []

    # ------------------------------------------------------------------------- computing again

    @contextlib.contextmanager
    def layout(self) -> Iterator[None]:
        """A context in which those parameters require a gradient that did in this step."""
        now = [p.requires_grad for p in self._parameters]
        self._require(self._requires_grad)
        try:
            yield
        finally:
            self._require(now)

    @contextlib.contextmanager
    def weights(self, buffers: ModuleBuffers) -> Iterator[None]:
        """A context in which the model is as it was in this step."""
        training = [module.training for module in self._model.modules()]
        with buffers.replaced(self._buffers):
            self._swap()
            set_modes(self._model, self._training)
            try:
                yield
            finally:
                self._swap()
                set_modes(self._model, training)

    def check(self, losses: Mapping[int, tuple[float, float]]) -> None:
        """Raises LossError if a micro-batch of this step gave another loss when it was run again.
        `losses`: each with its weight, by virtual worker."""
        for v, (loss, weight) in losses.items():
            before, weight_before = self._losses.get(v, (loss, 0.0))
            same = loss == before or (math.isnan(loss) and math.isnan(before))
            if weight != weight_before or (weight and not same):
                raise LossError(
                    f"the loss of step {self.step} on virtual worker {v} was {before!r} (weight "
                    f"{weight_before!r}), and is {loss!r} (weight {weight!r}) when it is computed "
                    "again, as after the loss of a worker. With staleness=1 that happens after the "
                    "loop's body, so a loss function must not depend on what the body changes: "
                    "leave that out of the loss function, or leave out staleness"
                )

    # ------------------------------------------------------------------------- as part of the state

    def tree(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "factor": self.factor,
            "scale": self._scale,
            "losses": [[v, *pair] for v, pair in self._losses.items()],
            "parameters": list(self._values),
            "buffers": list(self._buffers),
            "requires_grad": list(self._requires_grad),
            "training": list(self._training),
        }

    def adopt(self, tree: Mapping[str, Any]) -> None:
        """Takes over a complete `tree`, whose tensors are the caller's no longer."""
        self.step, self.factor, self._scale = tree["step"], tree["factor"], tree["scale"]
        self._losses = {v: (loss, weight) for v, loss, weight in tree["losses"]}
        self._values, self._buffers = list(tree["parameters"]), list(tree["buffers"])
        self._requires_grad, self._training = list(tree["requires_grad"]), list(tree["training"])

    # ------------------------------------------------------------------------------------- private

    @torch.no_grad()
    def _swap(self) -> None:
        if self._loss_scale is not None:
            self._loss_scale.scale, self._scale = self._scale, self._loss_scale.scale
        for p, value in zip(self._parameters, self._values, strict=True):
            now = p.detach().clone()
            p.copy_(value)
            value.copy_(now)

    def _require(self, flags: list[bool]) -> None:
        for p, flag in zip(self._parameters, flags, strict=True):
            if p.requires_grad != flag:
                p.requires_grad_(flag)
