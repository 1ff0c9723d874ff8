"""Where Ray places a worker: on nodes with the labels of a selector of Ray's; {} is any node.

"spot-first" is one selector for either market, and not a list of two: the autoscaler would keep
asking for the first of a list however often that failed. Between the markets of one selector it
follows the priorities of its groups and what it got.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ray.util import remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_dp.cluster.ray import private
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


def resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources as options of `Actor.options`."""
    others = dict(resources)
    return {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", 0),
        "memory": others.pop("memory", None),
        "resources": others or None,
    }


class WorkerNodes:
    """The nodes of the workers of a run, where each has one. Raises what Ray raises."""

    def __init__(self, run: str, scaling: ScalingConfig) -> None:
        self._run, self._scaling = run, scaling

    def options(self, worker: str, selector: Labels) -> dict[str, Any]:
        """Return options of `Actor.options` for a new worker."""
        placed = {"label_selector": selector or None}
        return resource_options(self._scaling.resources_per_worker) | placed

    def all_of(self, first: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return each worker of `first` with each of its nodes. `first` has the first ones."""
        return [*first.items()]

    def keep(self, workers: Collection[str]) -> None:
        """Free the nodes of all other workers."""


class NodeGroups(WorkerNodes):
    """Where each worker has several nodes: a placement group of Ray's, which is placed whole or
    waits. It outlives the controller, as its worker does. Whoever is left of controller and host
    actors removes it when its worker has ended."""

    def options(self, worker: str, selector: Labels) -> dict[str, Any]:
        needs, nodes = self._scaling.resources_per_node, self._scaling.nodes_per_worker
        found = private.placement_groups(self._run).get(worker)  # by an attempt that seemed to fail
        group = found or placement_group(
            [{name: amount for name, amount in needs.items() if amount}] * nodes,
            strategy="STRICT_SPREAD",
            name=f"{self._run}/{worker}",
            lifetime="detached",
            bundle_label_selector=[selector] * nodes if selector else None,
        )
        return resource_options(needs) | {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)
        }

    def all_of(self, first: Mapping[str, str]) -> list[tuple[str, str]]:
        groups = private.placement_groups(self._run)
        return [
            (worker, node)
            for worker in first.keys() & groups
            for node in private.nodes_of(groups[worker])
        ]

    def keep(self, workers: Collection[str]) -> None:
        for worker, group in private.placement_groups(self._run).items():
            if worker not in workers:
                remove_placement_group(group)
