"""Moments of an inner optimizer that go on from step to step, as parameters and buffers of the
model.

State that an inner optimizer kept would be lost with its worker. What is in the model is state of
the run, so joins, kills and restores need nothing more. Momentum is a parameter: what the inner
steps change of it is a pseudo-gradient like any other, which `wire=` rounds and `staleness=1`
hides. Second moments would become negative so. They travel in one of two ways:

    factored   the means of their rows and columns, of which their product makes them again
               (Adafactor, Shazeer & Stern 2018, arXiv:1804.04235): buffers, which are small
    whole      their square roots, which are parameters like the momentum

A root that is rounded below zero has a square above it. What is left is a root that is too small
for its momentum, of which Adam would make a long step. By the inequality of Cauchy and Schwarz,
Adam itself never has a momentum above some multiple of the root (Kingma & Ba 2015,
arXiv:1412.6980, bound its steps so), and neither do means of both over virtual workers. So a root
is raised to what its momentum asks for. Without rounding this changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from elastic_dp.errors import ModelError, SpecError

SecondMoments = Literal["factored", "whole"]

_MOMENTUM, _SECOND = "exp_avg", "exp_avg_sq"  # as the optimizers name them
_LEAST = 1e-30  # of a mean that is divided by
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


class InnerMoments(nn.Module):
    """The moments of an Adam in `inner_optimizer`. Register them in the model:

        model.moments = edp.InnerMoments(model)
        outer = torch.optim.SGD(model.moments.outer_groups(), lr=1.0)

        def inner(model, step):
            optimizer = torch.optim.AdamW(model.moments.weights, lr=4e-4)
            return model.moments.go_on(optimizer, step=ctx.inner_steps_before(step))

    Each step starts with the mean of the moments that the virtual workers had at the end of the
    last step. They are for torch's Adam, AdamW, NAdam and RAdam. `weights` are the parameters of
    the model that have elements and require a gradient when this is made.

    `second_moments`: "factored" keeps the means of rows and columns only, so that a step sends
    about twice the bytes of the weights; "whole" keeps all, as square roots, and sends three times
    the bytes. Raises SpecError for other values.
    """

    weights: Sequence[nn.Parameter]

    def __init__(self, model: nn.Module, *, second_moments: SecondMoments = "factored") -> None:
        super().__init__()
        if second_moments not in get_args(SecondMoments):
            raise SpecError(
                f'second_moments is {second_moments!r}, must be "factored" or "whole": see '
                "InnerMoments"
            )
        self.weights = tuple(p for p in model.parameters() if p.requires_grad and p.numel())
        self._momentum_lr = 1.0
        self.momenta = nn.ParameterList(torch.zeros_like(p) for p in self.weights)
        if second_moments == "whole":
            self.roots = nn.ParameterList(torch.zeros_like(p) for p in self.weights)
            return
        self.roots = nn.ParameterList()
        for number, p in enumerate(self.weights):
            rows = _by_rows(torch.zeros_like(p))
            self.register_buffer(f"rows_{number}", rows.mean(1))
            self.register_buffer(f"columns_{number}", rows.mean(0))

    def forward(self, x: Any) -> Any:
        """Pass on what comes, since a module that is registered in `nn.Sequential` is called."""
        return x

    def outer_groups(self, *, momentum_lr: float = 1.0) -> list[dict[str, Any]]:
        """Return the parameter groups of the outer SGD: the weights, with its arguments, and the
        moments, which become the mean of what the inner steps made of them.

        `momentum_lr`: 0.5 with `staleness=1`, where each change is applied a step late, so that
        they do not swing.
        """
        self._momentum_lr = momentum_lr
        mean = {"lr": momentum_lr, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        moments = [*self.momenta, *self.roots]
        return [{"params": [*self.weights]}, {"params": moments, **mean}]

    def go_on(self, optimizer: torch.optim.Optimizer, **counts: float) -> torch.optim.Optimizer:
        """Let a new optimizer of the weights go on with these moments. Return it.

        `counts`: all else that it keeps for each parameter, by its names: `step`, the number of
        inner steps before, and for NAdam `mu_product`. Raises ModelError.
        """
        if not isinstance(optimizer, _ADAMS) or optimizer.defaults.get("amsgrad"):
            raise ModelError(
                f"InnerMoments got a {type(optimizer).__name__}, which keeps other moments than "
                f"{_MOMENTUM} and {_SECOND}: use torch's Adam, AdamW, NAdam or RAdam, without "
                "amsgrad"
            )
        needed = {"step"} | ({"mu_product"} if isinstance(optimizer, torch.optim.NAdam) else set())
        if counts.keys() != needed:
            raise ModelError(
                f"InnerMoments.go_on got {sorted(counts)} for a {type(optimizer).__name__}, and "
                f"needs {sorted(needed)}: pass them by these names"
            )
        betas = dict.fromkeys(self.weights, optimizer.defaults["betas"])
        for group in optimizer.param_groups:
            betas |= dict.fromkeys(group["params"], group["betas"])
        for number, p in enumerate(self.weights):
            optimizer.state[p] = {name: torch.tensor(float(x)) for name, x in counts.items()} | {
                _MOMENTUM: self.momenta[number].detach(),
                _SECOND: self._second(number, *map(float, betas[p])),
            }
        optimizer.register_step_post_hook(lambda made, *_: self._take(made))
        return optimizer

    def refuse_other_mean(self, outer: torch.optim.Optimizer) -> None:
        """Raises ModelError unless the outer optimizer takes the mean, as by `outer_groups`."""
        mine = {*self.momenta, *self.roots}
        groups = [group for group in outer.param_groups if not mine.isdisjoint(group["params"])]
        takes_the_mean = isinstance(outer, torch.optim.SGD) and all(
            group["lr"] == self._momentum_lr
            and not (group["momentum"] or group["weight_decay"] or group["maximize"])
            for group in groups
        )
        if not takes_the_mean or mine != {p for group in groups for p in group["params"]}:
            raise ModelError(
                "the outer optimizer does not take the mean of the moments of InnerMoments: make "
                "it as torch.optim.SGD(model.moments.outer_groups(), lr=…), and let no scheduler "
                "change the rate of its second group"
            )

    # ----------------------------------------------------------------------------------- private

    def _factors(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_buffer(f"rows_{number}"), self.get_buffer(f"columns_{number}")

    @torch.no_grad()
    def _second(self, number: int, beta1: float, beta2: float) -> torch.Tensor:
        if self.roots:
            least = self.momenta[number] / _most_momentum(beta1, beta2)
            return torch.maximum(self.roots[number].abs(), least.abs()).square_()
        rows, columns = self._factors(number)
        second = rows[:, None] * (columns / columns.mean().clamp_min(_LEAST))
        return second.view_as(self.weights[number])

    @torch.no_grad()
    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        for number, p in enumerate(self.weights):
            second = optimizer.state[p][_SECOND]
            if self.roots:
                self.roots[number].copy_(second).sqrt_()
                continue
            rows, columns = self._factors(number)
            rows.copy_(_by_rows(second).mean(1))
            columns.copy_(_by_rows(second).mean(0))


def _most_momentum(beta1: float, beta2: float) -> float:
    """The largest momentum that Adam can have, as a multiple of the root of the second moment.

    With gradients g of the past, m = (1 - β₁) Σ β₁ⁱ gᵢ and v = (1 - β₂) Σ β₂ⁱ gᵢ², so m² is at most
    v (1 - β₁)² / (1 - β₂) Σ (β₁² / β₂)ⁱ.
    """
    ratio = beta1**2 / beta2 if beta2 else math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - ratio)) if ratio < 1 else math.inf


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix, which is one column for a vector."""
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
