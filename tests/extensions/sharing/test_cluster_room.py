"""What is free or held by runs, where others use the cluster, too."""

from __future__ import annotations

import types

import pytest

from elastic_dp.extensions.sharing import cluster_sharing
from elastic_dp.extensions.sharing.cluster_shares import RunDemand
from elastic_dp.extensions.sharing.cluster_sharing import ClusterRoom


@pytest.fixture
def nodes(monkeypatch):
    """Two nodes of four CPUs, of which the test says how many are free."""
    state = types.SimpleNamespace(free={"n1": 4.0, "n2": 4.0}, draining={})
    fake = types.SimpleNamespace(
        total_resources=lambda: {"n1": {"CPU": 4.0}, "n2": {"CPU": 4.0}},
        free_resources=lambda: {n: {"CPU": f} for n, f in state.free.items()},
        draining_nodes=lambda: state.draining,
    )
    monkeypatch.setattr(cluster_sharing, "private", fake)
    return state


def held(*on: str) -> list[RunDemand]:
    return [RunDemand("run", 0, 0.0, 1, 8, {"CPU": 1.0}, on)]


def cpus(room: dict[str, dict[str, float]]) -> dict[str, float]:
    return {node: resources["CPU"] for node, resources in room.items()}


def test_room_is_what_is_free_and_what_runs_hold(nodes):
    nodes.free = {"n1": 1.0, "n2": 4.0}
    assert cpus(ClusterRoom().of(held("n1"), 0.0)) == {"n1": 2.0, "n2": 4.0}


def test_worker_that_has_just_got_its_place_takes_no_room(nodes):
    """Ray has given it the place, and its run has not published it."""
    room = ClusterRoom()
    room.of(held(), 0.0)
    nodes.free["n1"] = 3.0
    assert cpus(room.of(held(), 1.0)) == {"n1": 4.0, "n2": 4.0}
    assert cpus(room.of(held(), 12.0)) == {"n1": 3.0, "n2": 4.0}, "somebody else has it"


def test_node_that_drains_is_no_room(nodes):
    nodes.draining = {"n1": 0}
    assert cpus(ClusterRoom().of(held("n1"), 0.0)) == {"n2": 4.0}
