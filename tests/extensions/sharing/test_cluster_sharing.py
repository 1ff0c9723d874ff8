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
