"""Moments of an inner optimizer that go on from step to step, as parameters and buffers of the
model.

State that an inner optimizer kept would be lost with its worker. What is in the model is state of
the run, so joins, kills and restores need nothing more. Momentum is a parameter: what the inner
steps change of it is a pseudo-gradient like any other, which `wire=` rounds and `staleness=1`
hides. Second moments would become negative so, and small ones would be rounded to 0. They travel as
the means of their rows and columns, of which their product makes them again (Adafactor, Shazeer &
Stern 2018, arXiv:1804.04235): buffers, which are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from elastic_dp.errors import ModelError

_MOMENTUM, _SECOND = "exp_avg", "exp_avg_sq"  # as the optimizers name them
_LEAST = 1e-30  # of a mean that is divided by
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


class InnerMoments(nn.Module):
    """The moments of an Adam within `inner_optimizer`, to be registered in the model:

        model.moments = edp.InnerMoments(model)
        outer = torch.optim.SGD(model.moments.outer_groups(), lr=1.0)

        def inner(model, step):
            optimizer = torch.optim.AdamW(model.moments.weights, lr=4e-4)
            return model.moments.go_on(optimizer, step=ctx.inner_steps_before(step))

    Each step begins with the mean of the moments that the virtual workers had at the end of the
    last one. For torch's Adam, AdamW, NAdam and RAdam. `weights` are the parameters of the model
    that require a gradient now and have elements.
    """

    weights: Sequence[nn.Parameter]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = tuple(p for p in model.parameters() if p.requires_grad and p.numel())
        self._momentum_lr = 1.0
        self.momenta = nn.ParameterList(torch.zeros_like(p) for p in self.weights)
        for number, p in enumerate(self.weights):
            rows = _by_rows(torch.zeros_like(p))
            self.register_buffer(f"rows_{number}", rows.mean(1))
            self.register_buffer(f"columns_{number}", rows.mean(0))

    def forward(self, x: Any) -> Any:
        """Pass on what comes, since a module that is registered in `nn.Sequential` is called."""
        return x

    def outer_groups(self, *, momentum_lr: float = 1.0) -> list[dict[str, Any]]:
        """Return the parameter groups of the outer SGD: the weights, with its arguments, and the
        momenta, which become the mean of what the inner steps made of them.

        `momentum_lr`: 0.5 with `staleness=1`, where each change is applied a step late, so that
        they do not swing.
        """
        self._momentum_lr = momentum_lr
        mean = {"lr": momentum_lr, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        return [{"params": [*self.weights]}, {"params": [*self.momenta], **mean}]

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
        for number, p in enumerate(self.weights):
            rows, columns = self._factors(number)
            second = rows[:, None] * (columns / columns.mean().clamp_min(_LEAST))
            optimizer.state[p] = {name: torch.tensor(float(x)) for name, x in counts.items()} | {
                _MOMENTUM: self.momenta[number].detach(),
                _SECOND: second.view_as(p),
            }
        optimizer.register_step_post_hook(lambda made, *_: self._take(made))
        return optimizer

    def refuse_other_mean(self, outer: torch.optim.Optimizer) -> None:
        """Raises ModelError unless the outer optimizer takes the mean of the momenta, as a group of
        `outer_groups` does."""
        mine = set(self.momenta)
        groups = [group for group in outer.param_groups if not mine.isdisjoint(group["params"])]
        takes_the_mean = isinstance(outer, torch.optim.SGD) and all(
            group["lr"] == self._momentum_lr
            and not (group["momentum"] or group["weight_decay"] or group["maximize"])
            for group in groups
        )
        if not takes_the_mean or sum(len(group["params"]) for group in groups) != len(mine):
            raise ModelError(
                "the outer optimizer does not take the mean of the momenta of InnerMoments: make "
                "it as torch.optim.SGD(model.moments.outer_groups(), lr=…), and let no scheduler "
                "change the rate of its second group"
            )

    # ----------------------------------------------------------------------------------- private

    def _factors(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_buffer(f"rows_{number}"), self.get_buffer(f"columns_{number}")

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        for number, p in enumerate(self.weights):
            second = _by_rows(optimizer.state[p][_SECOND])
            rows, columns = self._factors(number)
            rows.copy_(second.mean(1))
            columns.copy_(second.mean(0))


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix, which is one column for a vector."""
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
