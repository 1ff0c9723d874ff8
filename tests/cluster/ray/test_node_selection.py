"""Who waits for a node because another one is avoided, without a cluster."""

import pytest

from elastic_dp.cluster.ray import node_avoidance, private


@pytest.fixture
def nodes(monkeypatch):
    there = []
    monkeypatch.setattr(node_avoidance.ray, "nodes", lambda: there)
    dead = private.ActorEntry("w1", "DEAD", "bad", pid=0, address="")
    monkeypatch.setattr(node_avoidance.private, "actor", lambda actor: dead)
    return there


def node(name):
    return {"NodeID": name, "Alive": True, "Resources": {"CPU": 2}, "Labels": {}}


def test_worker_that_waits_only_to_avoid_a_node_is_requested_again_without_the_avoidance(nodes):
    made = node_avoidance.NodeAvoidance({"CPU": 1}, print)
    nodes += [node("bad"), node("good")]
    for _ in range(3):
        made.failed("01")
    for worker in ("waits", "placed", "gone"):
        assert made.without_avoided(worker, []) == [{"ray.io/node-id": "!in(bad)"}]
    there = {"waits", "placed"}
    assert made.waiting_needlessly({"placed"}, there) == []
    del nodes[1]  # now it must do
    assert made.without_avoided("another", []) == []
    assert made.waiting_needlessly({"placed"}, there) == ["waits"]
    assert made.waiting_needlessly({"placed"}, there) == []
