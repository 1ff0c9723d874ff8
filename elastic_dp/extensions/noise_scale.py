"""The gradient noise scale: the batch beyond which a larger one hardly makes a better step.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A: the expected square of the norm of the mean
gradient of B rows is |G|² + tr(Σ)/B, with G the gradient over all data and Σ the covariance of one
row's. A step has this for two sizes, a virtual worker's and its own, so both |G|² and tr(Σ) can be
told, without bias. Their ratio is the noise scale, in rows (or what the weights count).

Virtual workers are the same for any number of workers, and so is the estimate, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_dp.distributed.gradient_norm import fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.errors import SpecError
from elastic_dp.train.step.micro_batch import MicroBatchResult
from elastic_dp.train.step.participants import LeafGradients, Results, StepParticipant
from elastic_dp.train.step.step_gradient import StepGradient
from elastic_dp.train.step_builder import StepBuilder

if TYPE_CHECKING:
    from elastic_dp.train.context import Step

LEAF_SQUARE = "elastic_dp.leaf_square"  # among the metrics of a virtual worker's micro-batch
# Unbiased estimates, among the metrics of a step: |G|², which may be negative, and tr(Σ).
SQUARE, TRACE = "elastic_dp.gradient_square", "elastic_dp.gradient_trace"


def extend(build: StepBuilder) -> None:
    """Measures the noise in each `noise_scale_every`-th step. Raises SpecError."""
    spec, every = build.spec, build.given.noise_scale_every
    assert every is not None
    for name, conflicts in {
        "processes_per_worker": build.gang is not None,
        f"sharding={spec.sharding!r}": spec.sharding is not None,
        f"inner_steps={spec.inner_steps}": spec.inner_steps is not None,
        f"staleness={spec.staleness}": spec.delays,
    }.items():
        if conflicts:
            raise SpecError(
                "noise_scale_every needs the whole gradient of each virtual worker, and of all of "
                f"them in the same step, on each worker: leave it out, or {name}"
            )
    build.new_participants.append(lambda: NoiseScaleEstimates(every, build.gradient, build.results))


class NoiseScaleEstimates(StepParticipant):
    """Measures the noise in each `every`-th step."""

    name = "noise_scale"

    def __init__(self, every: int, gradient: StepGradient, results: Results) -> None:
        self._every, self._gradient, self._results = every, gradient, results
        self._found: dict[str, float] = {}

    def observes_leaves(self, step: int) -> bool:
        return step % self._every == 0

    def leaf_ended(self, result: MicroBatchResult, gradients: LeafGradients) -> None:
        # Its bits depend on the leaf alone, and not on the worker that runs it.
        pieces = UnitLayout.of(gradients).pieces([*gradients.values()])
        result.measure(LEAF_SQUARE, fold_squares(squares_of_units(pieces)))

    def begin(self, step: int) -> None:
        self._found, self._step = {}, step

    def prepare(self) -> None:
        if not self.observes_leaves(self._step):
            return
        exchange, leaves = self._gradient.exchange, self._gradient.leaves
        scaled = leaves.expected_weight(self._step) / leaves.scale
        squares = [  # of the gradient of its mean loss, with the weight
            (one.metrics.pop(LEAF_SQUARE) / (one.weight / scaled) ** 2, one.weight)
            for one in self._results.of_all.values()
        ]
        if exchange.finite and exchange.norm is not None:
            self._found = estimated(squares, float(exchange.norm.square))

    def metrics(self) -> Mapping[str, float]:
        return self._found

    def undo(self) -> None:
        self._found = {}


def estimated(leaves: Sequence[tuple[float, float]], square: float) -> dict[str, float]:
    """Returns the estimates of a step as metrics, none if it has fewer than two micro-batches.

    `leaves` has for each micro-batch the square of the norm of its mean gradient, and its weight;
    `square` is that of the whole step.
    """
    count, total = len(leaves), math.fsum(weight for _, weight in leaves)
    mean = math.fsum(of_leaf * weight for of_leaf, weight in leaves) / total if total else math.nan
    if count < 2 or not math.isfinite(mean + square):
        return {}
    return {
        SQUARE: (count * square - mean) / (count - 1),
        TRACE: (mean - square) * total / (count - 1),
    }


class NoiseScale:
    """Smooths the estimates of steps, each of which is far too noisy by itself.

    Pass it as `state={"noise": noise}`, so that joiners and checkpoints have it, and call `update`
    in the loop's body. |G|² and tr(Σ) are smoothed separately, by exponential moving averages, and
    then divided, as in the paper. `decay`: the fraction of an average that an update keeps.
    """

    def __init__(self, *, decay: float = 0.99) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise SpecError(f"decay is {decay!r}, must be a number of at least 0 and less than 1")
        self._decay = float(decay)
        self._square = self._trace = 0.0  # their ratio needs no correction for the zeros

    def update(self, step: Step) -> None:
        """Takes the estimates of a step, if it was measured."""
        if SQUARE in step.metrics:
            self._square += (1.0 - self._decay) * (step.metrics[SQUARE] - self._square)
            self._trace += (1.0 - self._decay) * (step.metrics[TRACE] - self._trace)

    @property
    def value(self) -> float:
        """The noise scale in the unit of the weights (rows by default); nan before the first
        update, inf where |G|² cannot be told from 0."""
        if self._square == self._trace == 0.0:
            return math.nan
        return max(self._trace, 0.0) / self._square if self._square > 0.0 else math.inf

    def proposes(self, virtual_workers: int, micro_batch_size: int) -> int:
        """Returns the number of virtual workers to go on with: twice as many if the noise scale is
        at least the batch of twice as many, else `virtual_workers`.

        A batch as large as the noise scale takes about twice the steps of a huge one and twice the
        rows of a small one. `micro_batch_size`: in the unit of the weights. Write the proposal into
        `ScalingConfig.virtual_workers` for a later step; nothing grows by itself.
        """
        grows = self.value >= 2 * virtual_workers * micro_batch_size
        return 2 * virtual_workers if grows and self.value < math.inf else virtual_workers

    def state_dict(self) -> dict[str, Any]:
        return {"square": self._square, "trace": self._trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._square, self._trace = float(state["square"]), float(state["trace"])
