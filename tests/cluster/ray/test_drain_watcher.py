"""Which workers are told that their node goes away, and when."""

from elastic_dp.cluster.ray.drain_watcher import DrainWatcher
from elastic_dp.coordinator.messages import DrainNoticed, HeadDrainNoticed


class Cluster:
    def __init__(self):
        self.draining, self.workers, self.posted, self.asked = {}, {}, [], 0
        self.notices = DrainWatcher(
            lambda: self.draining, self.nodes, lambda: "head", self.posted.append, print
        )

    def nodes(self):
        self.asked += 1
        return self.workers.items()

    def look(self, now, wall=1000.0):
        self.posted.clear()
        self.notices.poll(now, wall)
        return list(self.posted)


def test_each_worker_of_a_node_that_drains_is_told_of_once_for_each_deadline():
    cluster = Cluster()
    cluster.workers = {"w1": "a", "w2": "b", "w3": "b"}
    assert cluster.look(5.0) == [] and cluster.asked == 0
    cluster.draining = {"b": 1_030_000}
    assert cluster.look(5.0) == [DrainNoticed("w2", 35.0), DrainNoticed("w3", 35.0)]
    assert cluster.look(6.0, 1001.0) == []
    cluster.workers = {"w1": "a", "w3": "b", "w4": "b"}  # one that was placed there just before
    assert cluster.look(7.0, 1002.0) == [DrainNoticed("w4", 35.0)]
    cluster.draining = {"b": 1_015_000}
    assert cluster.look(8.0, 1003.0) == [DrainNoticed("w3", 20.0), DrainNoticed("w4", 20.0)]


def test_drain_notice_without_a_deadline_has_none():
    cluster = Cluster()
    cluster.workers, cluster.draining = {"w1": "a"}, {"a": 0}
    assert cluster.look(5.0) == [DrainNoticed("w1", None)]


def test_drain_of_the_head_is_told_once_for_each_deadline_beside_that_of_its_workers():
    cluster = Cluster()
    cluster.workers, cluster.draining = {"w1": "head"}, {"head": 1_030_000}
    assert cluster.look(5.0) == [HeadDrainNoticed(35.0), DrainNoticed("w1", 35.0)]
    assert cluster.look(6.0, 1001.0) == []
    cluster.draining = {"head": 0}
    assert cluster.look(7.0, 1002.0) == [HeadDrainNoticed(None), DrainNoticed("w1", None)]


def test_drain_of_any_node_of_a_worker_is_told_once():
    cluster = Cluster()
    cluster.nodes = lambda: [("w1", "a"), ("w1", "b"), ("w2", "c")]
    cluster.notices._nodes = cluster.nodes
    cluster.draining = {"b": 1_030_000}
    assert cluster.look(5.0) == [DrainNoticed("w1", 35.0)]
    cluster.draining = {"a": 0, "b": 1_030_000}
    assert cluster.look(6.0, 1001.0) == [DrainNoticed("w1", None)]
    assert cluster.look(7.0, 1002.0) == []
