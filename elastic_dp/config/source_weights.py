"""The weights of several sources, which may change with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_dp.config.field_checks import at_least
from elastic_dp.config.schedules import check_schedule
from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url

Weights = Mapping[str, float]
_EXAMPLE = 'as in {0: {"a": 0.9, "b": 0.1}, 2000: {"a": 0.5, "b": 0.5}}'


def weights_by_step(url: Any) -> dict[int, Weights]:
    """The weights of the sources, by the number of steps after which they hold, in order.
    Raises SpecError if `url`, a dict, is neither weights by URL nor such dicts by steps."""
    if not url:
        return {}
    if all(isinstance(key, str) for key in url):
        _check("DataConfig.url", url)
        return {0: url}
    return check_schedule("DataConfig.url", url, _EXAMPLE, _check)


def sources_of(stages: Mapping[int, Weights]) -> list[str]:
    """The URLs in the order in which they are first named."""
    return list(dict.fromkeys(url for weights in stages.values() for url in weights))


def _check(stage: str, weights: Any) -> None:
    if not isinstance(weights, Mapping) or not weights:
        raise SpecError(f"{stage} must be a dict of URLs with weights")
    for url, weight in weights.items():
        name = f"{stage}[{redact_url(repr(url))}]"
        if not isinstance(url, str) or not url:
            raise SpecError(f"{name}: a source must be a URL")
        at_least(name, weight, 0)
        if not weight:
            raise SpecError(f"{name} has weight 0; leave it out")
