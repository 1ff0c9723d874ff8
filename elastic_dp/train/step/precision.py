"""The precisions that `ctx.steps` takes. A new one is added to the table here.

The forward pass runs under `torch.autocast` in the dtype that the table names; parameters,
gradients and their sums keep their own dtypes. Gradients of fp16 would vanish, so its loss is
scaled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_dp.errors import SpecError

AUTOCAST_DTYPES: dict[str | None, torch.dtype | None] = {
    None: None,
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, by the rule of `torch.amp.GradScaler`."""

    scale: float = 65536.0
    growth_interval: int = 2000
    steps_since_overflow: int = 0

    def step_ended(self, overflow: bool) -> None:
        """Adjusts the scale after a step. `overflow`: a gradient was infinite or NaN."""
        if overflow:
            self.scale, self.steps_since_overflow = self.scale * 0.5, 0
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow == self.growth_interval:
            self.scale, self.steps_since_overflow = self.scale * 2.0, 0


def check_precision(precision: Any) -> None:
    """Raises SpecError."""
    if not isinstance(precision, str | None) or precision not in AUTOCAST_DTYPES:
        *names, last = map(repr, AUTOCAST_DTYPES)
        raise SpecError(f"precision is {precision!r}, must be {', '.join(names)} or {last}")


def autocast(
    precision: str | None, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns what makes the context of a forward pass."""
    dtype = AUTOCAST_DTYPES[precision]
    if dtype is None:
        return contextlib.nullcontext
    return functools.partial(torch.autocast, device.type, dtype=dtype)


def new_loss_scale(precision: str | None) -> LossScale | None:
    """At the start of training; None: the loss is not scaled."""
    return LossScale() if AUTOCAST_DTYPES[precision] is torch.float16 else None
