"""A queued run begins when its minimum fits, which an operator may lower meanwhile."""

from elastic_dp.config import ScalingConfig
from elastic_dp.extensions.sharing.cluster_shares import RunDemand
from elastic_dp.extensions.sharing.cluster_sharing import ClusterSharing


class Operator:
    """Asks for fewer workers after the run has said that it waits."""

    min_workers = 4

    def __init__(self):
        self.said = []

    def sizes(self):
        return self.min_workers, 8

    def hear(self, text):
        self.said.append(text)
        self.min_workers = 2


def test_queued_run_begins_when_its_minimum_is_lowered_to_what_fits(monkeypatch):
    operator = Operator()
    scaling = ScalingConfig(min_workers=4, max_workers=8)
    sharing = ClusterSharing(
        "small",
        scaling,
        began_at=0.0,
        sizes=operator.sizes,
        held=list,
        post=lambda event: None,
        say=operator.hear,
    )
    other = RunDemand("big", 1, 0.0, min_workers=2, size=2, needs={"CPU": 1.0})
    monkeypatch.setattr(sharing, "_look", lambda now, *, is_queued: (2, [other]))
    monkeypatch.setattr("elastic_dp.extensions.sharing.cluster_sharing._EVERY_S", 0.01)
    asked = iter(range(100))  # ends a run that waits for ever

    sharing.admit(lambda: next(asked, None) is None)

    assert next(asked) < 10
    assert operator.said == [
        "queued: its 4 workers (min_workers) do not fit beside the other runs of the cluster (big)"
    ]
    assert sharing.queued_because == ""


def test_each_node_of_a_worker_counts_in_the_division(monkeypatch):
    scaling = ScalingConfig(
        max_workers=3,
        processes_per_worker=2,
        nodes_per_worker=2,
        resources_per_worker={"CPU": 4},
    )
    sharing = ClusterSharing(
        "large",
        scaling,
        began_at=0.0,
        sizes=lambda: (1, 3),
        held=lambda: ["a", "b"],
        post=print,
        say=print,
    )
    own = sharing._demand(is_queued=False, with_nodes=True)
    assert (own.min_workers, own.size, own.needs) == (2, 6, {"CPU": 2})
    first = RunDemand("first", 1, 0.0, min_workers=1, size=1, needs={"CPU": 2.0})
    monkeypatch.setattr(sharing._demands, "others", lambda now: [first])
    monkeypatch.setattr(sharing._demands, "publish", lambda own: None)
    monkeypatch.setattr(sharing._room, "may_grow", lambda now: False)
    room = {node: {"CPU": 2.0} for node in "abcd"}
    monkeypatch.setattr(sharing._room, "of", lambda demands, now: room)
    assert sharing._look(0.0, is_queued=False)[0] == 1  # of three nodes
