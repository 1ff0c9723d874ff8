"""What a loss function may return: loss, (loss, weight) or (loss, weight, metrics)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.device.graph_replay import outside_graphs
from elastic_dp.distributed.local_shards import gathered
from elastic_dp.errors import LossError

# Weights multiply gradients, mostly in float32. Only their ratios matter, so they need not come
# near its limits.
LARGEST_WEIGHT = 1e30
LEAST_WEIGHT = 1e-30  # of a whole global batch


def parse_loss(
    returned: Any, rows: int, unread: dict[str | None, torch.Tensor] | None = None
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Returns the loss as a scalar tensor, its weight (default: `rows`), and the metrics. Metrics
    that are on an asynchronous device are added to `unread`, if it is given, and are NaN meanwhile.
    Raises LossError."""
    metrics: Any = {}
    loss, weight = returned, rows
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise LossError(
                f"the loss function returned a tuple of {len(returned)}; it may return loss, "
                "(loss, weight) or (loss, weight, metrics)"
            )
        loss, weight = returned[:2]
        metrics = returned[2] if len(returned) == 3 else {}
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        raise LossError(
            f"the loss is {_described(loss)}, must be a real scalar tensor: the mean over the "
            "micro-batch, e.g. loss.mean()"
        )
    number = float(rows) if weight is rows else _number(gathered(weight))
    if number is None or not 0 <= number <= LARGEST_WEIGHT:
        what = _described(weight) if number is None else number
        raise LossError(
            f"the weight of a micro-batch is {what}, must be a number, finite and not negative, at "
            f"most {LARGEST_WEIGHT:g}; the loss function may return loss, (loss, weight) or "
            "(loss, weight, metrics)"
        )
    if not isinstance(metrics, Mapping):
        raise LossError(
            f"the metrics are {_described(metrics)}, must be a mapping of names to numbers"
        )
    return gathered(loss).reshape(()), number, _numbers(metrics, unread) if metrics else {}


def total_weight(step: int, results: Iterable[Any]) -> float:
    """Returns the sum of the weights of a step's micro-batches. Raises LossError."""
    weight = math.fsum([result.weight for result in results])
    if 0 < weight < LEAST_WEIGHT:
        raise LossError(
            f"the weights of step {step} add up to {weight:g}, too little to divide "
            "gradients by: only their ratios matter, so multiply all of them"
        )
    return weight


def mean(values: Sequence[tuple[float, float]]) -> float:
    """Returns the exact mean of (value, weight) pairs, in any order; nan if the total weight is 0.
    Values near the limits of a float are added directly and may give inf or nan."""
    parts, weight = [x * w for x, w in values], math.fsum([w for _, w in values])
    try:
        total = math.fsum(parts)
    except (OverflowError, ValueError):  # beyond the largest float; inf - inf
        total = sum(parts)
    return total / weight if weight else math.nan


def not_finite(step: int, results: Iterable[int], describe: Callable[[int, int], str]) -> LossError:
    """Returns the error for a gradient that is not finite, of `step` and these virtual workers.
    `describe` names the rows of one."""
    return LossError(
        f"the gradient of step {step} is not finite although every loss is; the rows were: "
        + "; ".join(describe(step, v) for v in sorted(results)[:4])
    )


def _numbers(
    metrics: Mapping[Any, Any], unread: dict[str | None, torch.Tensor] | None
) -> dict[str, float]:
    numbers = {}
    for key, given in metrics.items():
        value = gathered(given)  # `float` of a DTensor may be that of a part
        if unread is not None and _is_on_device(value):
            numbers[str(key)], unread[str(key)] = math.nan, outside_graphs(value.detach())
            continue
        number = _number(value)
        if number is None:
            raise LossError(
                f"the metric {key!r} is {_described(value)}, must be a number: the mean over "
                "the micro-batch"
            )
        numbers[str(key)] = number
    return numbers


def _is_on_device(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.numel() == 1
        and not value.is_complex()
        and accelerator_of(value.device).asynchronous
    )


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return f"a {type(value).__name__}"


def mean_metrics(results: Any) -> dict[str, float]:
    """Returns the mean of each metric over the micro-batches that reported it."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for name, value in result.metrics.items():
            by_name.setdefault(name, []).append((value, result.weight))
    return {name: mean(values) for name, values in by_name.items()}
