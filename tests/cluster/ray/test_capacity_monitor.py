"""Why workers wait for a node, without a cluster."""

import types

import pytest
from ray.core.generated import autoscaler_pb2

from elastic_dp.cluster.ray import capacity_monitor, kubernetes_pods
from elastic_dp.cluster.ray.capacity_monitor import CapacityMonitor, autoscaler_words
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


def pod(name, node, ready, containers, since="2026-11-28T10:00:00Z"):
    conditions = [
        {"type": "Ready", "status": ready, "lastTransitionTime": since},
        {"type": "ContainersReady", "status": containers, "lastTransitionTime": since},
    ]
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": node},
        "status": {"conditions": conditions},
    }


def test_capacity_monitor_names_the_pods_that_kubernetes_keeps_on_nodes_without_power(monkeypatch):
    pods = [
        pod("gpt-spot-b", "node-3", "False", "True", since="2026-11-28T10:00:05Z"),
        pod("gpt-spot-a", "node-3", "False", "True"),
        pod("gpt-starts", "node-2", "False", "False"),
        pod("gpt-trains", "node-2", "True", "True"),
        {"metadata": {"name": "gpt-pending"}, "spec": {}, "status": {"phase": "Pending"}},
    ]
    monkeypatch.setattr(kubernetes_pods, "pods_of_this_cluster", lambda: pods)
    monkeypatch.setattr(capacity_monitor, "no_room", lambda scaling, nodes: "")
    monkeypatch.setattr(capacity_monitor.ray, "nodes", lambda: [])
    made = monitor({"w1": "starting"}, "it asked", nodes=dict, without_process=lambda workers: [])
    assert why(made) == (
        "node node-3 has not answered since 10:00:00 UTC, and Kubernetes replaces gpt-spot-a, "
        "gpt-spot-b only when the node is deleted. If it is off, run: kubectl delete node node-3. "
        "If it will be back, run: kubectl taint node node-3 "
        "node.kubernetes.io/out-of-service=off:NoExecute. it asked"
    )
    pods.clear()
    assert why(made) == "it asked"


def test_capacity_monitor_says_a_reason_again_for_the_next_worker_that_waits(monkeypatch):
    stages, said = {"w1": "starting"}, []
    made = monitor(stages, "it asked", nodes=dict, without_process=lambda workers: [])
    made._say = said.append
    monkeypatch.setattr(capacity_monitor, "no_room", lambda scaling, nodes: "")
    monkeypatch.setattr(capacity_monitor.ray, "nodes", lambda: [])
    why(made), why(made)
    assert said == ["it asked"]
    stages["w1"] = "member"
    assert why(made) == ""
    stages["w2"] = "starting"
    why(made)
    assert said == ["it asked"] * 2


LOG = "its log has the reason (monitor.log on the head node, or its container's)"
NEEDS = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("state", "has_large_nodes", "says"),
    [
        ({}, True, ""),
        (
            {
                "pending_instances": [{"ray_node_type_name": "spot"}],
                "pending_instance_requests": [{"ray_node_type_name": "spot", "count": 2}],
            },
            True,
            "it has asked for nodes that are not up yet: 3 of group spot",
        ),
        (
            {
                "failed_instance_requests": [
                    {"ray_node_type_name": "spot", "failed_ts": 990, "reason": "403 Forbidden"},
                    {"ray_node_type_name": "on-demand", "failed_ts": 900, "reason": "long ago"},
                ]
            },
            True,
            f"it cannot add nodes of group spot: {LOG}",
        ),
        (
            {
                "failed_instance_requests": [
                    {
                        "ray_node_type_name": "spot",
                        "failed_ts": 990,
                        "reason": "launch failed with Launch capped by maxReplicas limit.",
                    }
                ]
            },
            True,
            "it cannot add nodes of group spot: it has as many as maxReplicas lets it have",
        ),
        (
            {"infeasible_resource_requests": [{"resources_bundle": NEEDS}]},
            True,
            f"no group may add a node for {NEEDS}: those with such nodes have as many as they may "
            "(maxReplicas in Kubernetes, max_workers elsewhere)",
        ),
        (
            {"infeasible_resource_requests": [{"resources_bundle": NEEDS}]},
            False,
            f"no group of nodes has one with {NEEDS} and the labels that the job asks for",
        ),
        ({"infeasible_resource_requests": [{"resources_bundle": {"CPU": 8.0}}]}, False, ""),
    ],
    ids=["all up", "pending", "refused", "capped", "at its cap", "no such node", "another job's"],
)
def test_autoscaler_report_in_words(state, has_large_nodes, says):
    state = autoscaler_pb2.AutoscalingState(**state)
    assert autoscaler_words(state, NEEDS, has_large_nodes, now=1000.0) == says
