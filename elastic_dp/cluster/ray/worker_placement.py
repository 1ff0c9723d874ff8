"""Chooses the labels of a worker's node, as a list of selectors for Ray, the best first; {} is any
node.

The choice is a pure function of the job and of what the run's other workers requested. Ray takes
the first selector that a node fulfils, and its autoscaler adds a node for the first one that some
group of nodes has.

So "spot-first" is one selector for either market, and not a list of two: the autoscaler would keep
asking for the first of a list however often that failed. Between the markets of one selector it
follows the priorities of its groups and what it got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_dp.config import ScalingConfig, label_values

MARKET = "ray.io/market-type"  # Ray's names of a node's labels
ZONE = "ray.io/availability-zone"
EITHER = "in(spot,on-demand)"
Labels = dict[str, str]


def placement_preferences(scaling: ScalingConfig, others: Iterable[Labels]) -> list[Labels]:
    """Return the selectors of a new worker. `others` are the first selectors of the run's present
    workers.
    """
    others = list(others)
    firm = sum(labels.get(MARKET) == "on-demand" for labels in others)
    markets = _markets(scaling, firm)
    always = dict(scaling.label_selector)
    zone = _zone(always.get(ZONE, ""), others)
    asked = [always | labels | zone for labels in markets if zone]
    asked += [always | labels for labels in markets]
    return [] if asked == [{}] else asked


def _markets(scaling: ScalingConfig, firm: int) -> list[Labels]:
    if scaling.market == "on-demand" or firm < scaling.min_on_demand:
        return [{MARKET: "on-demand"}]
    if scaling.market == "any":
        return [{}]
    return [{MARKET: EITHER if scaling.market == "spot-first" else "spot"}]


def _zone(wanted: str, others: list[Labels]) -> Labels:
    """Return the zone with the fewest workers; {} if the job does not name several."""
    zones = label_values(wanted) if wanted.startswith("in(") else []
    taken = Counter(labels.get(ZONE) for labels in others)
    fewest = min(zones, key=lambda zone: taken[zone], default=None)
    return {} if fewest is None else {ZONE: fewest}


def selectable(labels: Mapping[str, str]) -> Labels:
    """Return those of a node's labels that a worker on it may have requested."""
    return {name: labels[name] for name in (MARKET, ZONE) if name in labels}


def actor_options(asked: list[Labels]) -> dict[str, Any]:
    """Return the selectors as options of `Actor.options`."""
    if not asked:
        return {}
    fallback = [{"label_selector": labels} for labels in asked[1:]]
    return {"label_selector": asked[0], "fallback_strategy": fallback or None}


def why_none_matches(asked: list[Labels], nodes: Iterable[Mapping[str, str]]) -> str:
    """Return why no node matches the selectors, by the labels of each; empty if one does."""
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
    """Return whether a label's value matches, by Ray's rules: a missing label matches a
    negation.
    """
    return (value in label_values(wanted)) != wanted.startswith("!")
