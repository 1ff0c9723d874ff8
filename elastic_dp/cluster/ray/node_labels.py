"""On which nodes a worker may run: the labels that Ray is asked for, the best first; {} is any
node.

Pure, from what the job says and what the run's other workers were asked for. Ray takes the first of
them that a node fulfils, and its autoscaler adds a node for the first that some group of nodes has.

So "spot-first" is one selector for either market, and not a list of two: the autoscaler would go on
asking for the first of a list however often that failed. Between the markets of one selector it
goes by its groups' priorities and by what it got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_dp.config import ScalingConfig, label_values

MARKET = "ray.io/market-type"  # of a node; Ray's own names
ZONE = "ray.io/availability-zone"
EITHER = "in(spot,on-demand)"
Labels = dict[str, str]


def preferences(scaling: ScalingConfig, others: Iterable[Labels]) -> list[Labels]:
    """What a new worker asks for, in this order; `others`: what the run's present workers asked for
    first."""
    others = list(others)
    firm = sum(labels.get(MARKET) == "on-demand" for labels in others)
    markets = _markets(scaling, firm)
    zone, always = _zone(scaling, others), dict(scaling.label_selector)
    asked = [always | labels | zone for labels in markets if zone]
    asked += [always | labels for labels in markets]
    return [] if asked == [{}] else asked


def _markets(scaling: ScalingConfig, firm: int) -> list[Labels]:
    if scaling.market == "on-demand" or firm < scaling.min_on_demand:
        return [{MARKET: "on-demand"}]
    if scaling.market == "any":
        return [{}]
    return [{MARKET: EITHER if scaling.market == "spot-first" else "spot"}]


def _zone(scaling: ScalingConfig, others: list[Labels]) -> Labels:
    """Where the fewest are; {} where the job names no zones."""
    taken = Counter(labels.get(ZONE) for labels in others)
    fewest = min(scaling.zones, key=lambda zone: taken[zone], default=None)
    return {} if fewest is None else {ZONE: fewest}


def selectable(labels: Mapping[str, str]) -> Labels:
    """Of the node where a worker is, what it may have asked for."""
    return {name: labels[name] for name in (MARKET, ZONE) if name in labels}


def actor_options(asked: list[Labels]) -> dict[str, Any]:
    """For `Actor.options`."""
    if not asked:
        return {}
    fallback = [{"label_selector": labels} for labels in asked[1:]]
    return {"label_selector": asked[0], "fallback_strategy": fallback or None}


def why_none_matches(asked: list[Labels], nodes: Iterable[Mapping[str, str]]) -> str:
    """Why no node has what is asked for, by the labels of each; empty when one has."""
    nodes = list(nodes)
    if not asked or any(
        all(_is(has.get(name), wanted) for name, wanted in labels.items())
        for labels in asked
        for has in nodes
    ):
        return ""
    words = [", ".join(f"{name}={value}" for name, value in labels.items()) for labels in asked]
    return f"no node of this cluster is labelled {' or '.join(words)}"


def _is(value: str | None, wanted: str) -> bool:
    """By Ray's rules: what must not be so is not so where the label is missing, too."""
    return (value in label_values(wanted)) != wanted.startswith("!")
