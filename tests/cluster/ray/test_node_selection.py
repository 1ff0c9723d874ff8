"""A node where workers fail again and again is left alone, as long as there is another."""

from types import SimpleNamespace

import pytest

from elastic_dp.cluster.ray import node_avoidance, private
from elastic_dp.cluster.ray.node_avoidance import WITHIN_S, NodeAvoidance


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
    made = NodeAvoidance({"CPU": 1}, {}, print)
    nodes += [node("bad"), node("good")]
    for _ in range(3):
        made.failed("01")
    for worker in ("waits", "placed", "gone"):
        assert made.selector_of(worker) == {"ray.io/node-id": "!in(bad)"}
    there = {"waits", "placed"}
    assert made.waiting_needlessly({"placed"}, there) == []
    del nodes[1]  # now it must do
    assert made.selector_of("another") == {}
    assert made.waiting_needlessly({"placed"}, there) == ["waits"]
    assert made.waiting_needlessly({"placed"}, there) == []


def test_node_with_three_failures_is_avoided_until_they_are_old(nodes, monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(node_avoidance, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nodes += [node("bad"), node("good")]
    made = NodeAvoidance({"CPU": 1}, {}, said.append)
    for now[0], times_said in ((0.0, 0), (10.0, 0), (20.0, 1), (30.0, 1)):
        made.failed("01")
        assert len(said) == times_said
    assert made.selector_of("w") and made.avoided == {"bad": 4}
    now[0] = 10.0 + WITHIN_S
    assert made.selector_of("w") == {} and made.avoided == {}
    now[0] += 1.0
    made.failed("01")
    assert len(said) == 2, "again, and said again"


def test_failures_that_lie_far_apart_are_none(nodes, monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(node_avoidance, "time", SimpleNamespace(monotonic=lambda: now[0]))
    nodes += [node("bad"), node("good")]
    made = NodeAvoidance({"CPU": 1}, {}, said.append)
    for now[0] in (0.0, 1000.0, 1801.0, 2801.0):
        made.failed("01")
    assert not said and not made.selector_of("w")
