"""The weights of several sources, which may change with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_dp.config.field_checks import at_least
from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url

Weights = Mapping[str, float]


def weights_by_step(url: Any) -> dict[int, Weights]:
    """The weights of the sources, by the number of steps after which they hold, in order.
    Raises SpecError if `url`, a dict, is neither weights by URL nor such dicts by steps."""
    if not url:
        return {}
    stages: Mapping[Any, Any] = {0: url} if all(isinstance(key, str) for key in url) else url
    for steps, weights in stages.items():
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise SpecError(
                f"DataConfig.url: {steps!r} must be a number of steps, as in "
                '{0: {"a": 0.9, "b": 0.1}, 2000: {"a": 0.5, "b": 0.5}}'
            )
        if not isinstance(weights, Mapping) or not weights:
            raise SpecError(f"DataConfig.url[{steps}] must be a dict of URLs with weights")
        _check(weights, "" if stages is not url else f"[{steps}]")
    if 0 not in stages:
        raise SpecError("DataConfig.url: the weights of the first step are missing; add those of 0")
    return {steps: stages[steps] for steps in sorted(stages)}


def sources_of(stages: Mapping[int, Weights]) -> list[str]:
    """The URLs in the order in which they are first named."""
    return list(dict.fromkeys(url for weights in stages.values() for url in weights))


def _check(weights: Mapping[Any, Any], stage: str) -> None:
    for url, weight in weights.items():
        name = f"DataConfig.url{stage}[{redact_url(repr(url))}]"
        if not isinstance(url, str) or not url:
            raise SpecError(f"{name}: a source must be a URL")
        at_least(name, weight, 0)
        if not weight:
            raise SpecError(f"{name} has weight 0; leave it out")
