"""The outcome of a committed step. Checkpoints store its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NOISE_SQUARE, NOISE_TRACE = "elastic_dp.gradient_square", "elastic_dp.gradient_trace"  # metrics


class GradientNoise(NamedTuple):
    """Unbiased estimates of one step: `square` is |G|², and may be negative; `trace` is tr(Σ)."""

    square: float
    trace: float


@dataclass
class StepRecord:
    """The outcome of one committed step; equal on every worker."""

    number: int
    epoch: int
    epoch_end: bool
    loss: float
    weight: float
    metrics: dict[str, float]
    lr: float
    grad_norm: float | None = None  # None: not computed yet
    kept: bool = False  # the members agreed on a checkpoint of it
    late: bool = False  # the members skip checkpoints: an upload of one of them is late

    @property
    def noise(self) -> GradientNoise | None:
        """The estimates of the noise of the gradient, which are among the metrics."""
        if NOISE_SQUARE not in self.metrics:
            return None
        return GradientNoise(self.metrics[NOISE_SQUARE], self.metrics[NOISE_TRACE])

    @property
    def own_metrics(self) -> dict[str, float]:
        """The metrics of the loss function and of participants."""
        noise = NOISE_SQUARE, NOISE_TRACE
        return {name: value for name, value in self.metrics.items() if name not in noise}
