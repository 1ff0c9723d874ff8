"""A node where workers fail again and again is left alone, as long as there is another."""

from elastic_dp.cluster.ray.node_avoidance import WITHIN_S, NodeFailureHistory


def test_three_failures_and_it_is_avoided_until_they_are_old():
    avoidance = NodeFailureHistory()
    assert [avoidance.failed("a", now) for now in (0.0, 10.0, 20.0, 30.0)] == [0, 0, 1, 0]
    assert avoidance.avoided({"a", "b"}, 30.0) == ["a"]
    assert avoidance.failures("a", 30.0) == 4
    assert avoidance.avoided({"a", "b"}, 10.0 + WITHIN_S) == []
    assert avoidance.failed("a", 11.0 + WITHIN_S), "again, and said again"


def test_failures_that_lie_far_apart_are_none():
    avoidance = NodeFailureHistory()
    assert not any(avoidance.failed("a", now) for now in (0.0, 1000.0, 1801.0, 2801.0))


def test_avoided_node_is_used_if_there_is_no_other():
    avoidance = NodeFailureHistory()
    for node in ("a", "b") * 3:
        avoidance.failed(node, 0.0)
    assert avoidance.avoided({"a", "b"}, 1.0) == []
    assert avoidance.avoided({"a", "b", "c"}, 1.0) == ["a", "b"]
    assert avoidance.avoided({"a"}, 1.0) == []
    assert avoidance.avoided(set(), 1.0) == []
