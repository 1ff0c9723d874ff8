"""The loss scale, which keeps small fp16 gradients from becoming zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, by the rule of `torch.amp.GradScaler`."""

    scale: float = 65536.0
    growth_interval: int = 2000
    steps_since_overflow: int = 0

    @contextmanager
    def replaced(self, scale: float) -> Iterator[None]:
        """A context in which the scale is another one."""
        now, self.scale = self.scale, scale
        try:
            yield
        finally:
            self.scale = now

    def step_ended(self, overflow: bool) -> None:
        """Adjusts the scale after a step. `overflow`: a gradient was infinite or NaN."""
        if overflow:
            self.scale, self.steps_since_overflow = self.scale * 0.5, 0
            return
        self.steps_since_overflow += 1
        if self.steps_since_overflow == self.growth_interval:
            self.scale, self.steps_since_overflow = self.scale * 2.0, 0
