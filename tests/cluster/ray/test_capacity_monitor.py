"""Why workers wait for a node, without a cluster."""

import types

from elastic_dp.cluster.ray import capacity_monitor
from elastic_dp.cluster.ray.capacity_monitor import CapacityMonitor
from tests.runs import spec_of


def monitor(stages, autoscaler_says="", **worker_group):
    made = CapacityMonitor(
        spec_of().scaling, types.SimpleNamespace(**worker_group), lambda: stages, print
    )
    made._autoscaler = lambda has_large_nodes: autoscaler_says
    return made


def why(made):
    made.look()
    return made.waits_for


def test_capacity_monitor_says_that_no_node_can_hold_a_worker_and_what_the_autoscaler_says(
    monkeypatch,
):
    placed = {"w1": "node"}
    stages = {"w1": "member", "w2": "starting"}
    made = monitor(
        stages,
        "Ray's autoscaler: 403",
        nodes=lambda: placed,
        without_process=lambda workers: [*workers],
    )
    monkeypatch.setattr(capacity_monitor.ray, "nodes", lambda: [])
    assert why(made).startswith("no node of this cluster can hold a worker")
    assert made.waits_for.endswith(". Ray's autoscaler: 403")
    placed["w2"] = "node"  # it starts there
    assert why(made) == ""


def test_capacity_monitor_says_no_room_of_a_worker_that_waits_long_and_not_of_one_that_starts(
    monkeypatch,
):
    waits = ["w1", "w2"]
    stages = {"w1": "starting", "w2": "starting"}
    made = monitor(stages, nodes=dict, without_process=lambda workers: [*waits])
    node = {"Alive": True, "Resources": {"CPU": 2}, "Labels": {}}
    monkeypatch.setattr(capacity_monitor.ray, "nodes", lambda: [node])
    monkeypatch.setattr(capacity_monitor, "has_room", lambda needs: False)  # their own places
    clock = types.SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 0.0)
    monkeypatch.setattr(capacity_monitor, "time", clock)
    assert why(made) == ""
    clock.monotonic = lambda: 110.0
    assert why(made) == "", "processes start"
    waits.remove("w1")
    clock.monotonic = lambda: 131.0
    assert "no node has room for another worker now" in why(made)
    waits.clear()  # it imports torch
    assert why(made) == ""
