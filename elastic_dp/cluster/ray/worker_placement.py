"""The labels that the node of a worker must have, as a selector of Ray's; {} is any node.

"spot-first" is one selector for either market, and not a list of two: the autoscaler would keep
asking for the first of a list however often that failed. Between the markets of one selector it
follows the priorities of its groups and what it got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_dp.config import ScalingConfig, label_values

MARKET = "ray.io/market-type"  # Ray's names of a node's labels
ZONE = "ray.io/availability-zone"
Labels = dict[str, str]
_MARKETS = {
    "any": {},
    "spot": {MARKET: "spot"},
    "on-demand": {MARKET: "on-demand"},
    "spot-first": {MARKET: "in(spot,on-demand)"},
}


def node_selector(scaling: ScalingConfig) -> Labels:
    """Return the selector of each worker of a job."""
    return {**scaling.label_selector, **_MARKETS[scaling.market]}


def matches(selector: Labels, has: Mapping[str, str]) -> bool:
    """Return whether a node with these labels matches, by Ray's rules: a missing label matches a
    negation.
    """
    return all(
        (has.get(name) in label_values(wanted)) != wanted.startswith("!")
        for name, wanted in selector.items()
    )


def why_none_matches(selector: Labels, nodes: Iterable[Mapping[str, str]]) -> str:
    """Return why no node matches, by the labels of each; empty if one does."""
    if any(matches(selector, has) for has in nodes):
        return ""
    words = ", ".join(f"{name}={value}" for name, value in selector.items())
    return f"no node of this cluster is labelled {words}"


def actor_options(selector: Labels) -> dict[str, Any]:
    """Return the selector as options of `Actor.options`."""
    return {"label_selector": selector} if selector else {}
