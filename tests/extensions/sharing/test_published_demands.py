"""What runs publish to each other, in a store that is a dict here."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_dp.extensions.sharing import cluster_sharing
from elastic_dp.extensions.sharing.cluster_shares import RunDemand
from elastic_dp.extensions.sharing.cluster_sharing import PublishedDemands

LOW = RunDemand("low", 0, 1.5, 1, 4, {"CPU": 1.0}, ("n1", "n1"), ("n1", "n2"))


@pytest.fixture(autouse=True)
def entries(monkeypatch):
    found: dict[bytes, bytes] = {}
    private = cluster_sharing.private
    monkeypatch.setattr(private, "kv_put", found.__setitem__)
    monkeypatch.setattr(private, "kv_get", found.get)
    monkeypatch.setattr(private, "kv_delete", found.pop)
    monkeypatch.setattr(private, "kv_list", lambda prefix: list(found))
    return found


def test_demand_is_read_by_others_as_it_was_published():
    low, high = PublishedDemands("low"), PublishedDemands("high")
    low.publish(LOW)
    high.publish(dataclasses.replace(LOW, name="high", usable=None))
    assert high.others(0.0) == [LOW]
    assert low.others(0.0) == [dataclasses.replace(LOW, name="high", usable=None)]


def test_demand_of_a_controller_that_is_gone_counts_for_ten_seconds():
    low, high = PublishedDemands("low"), PublishedDemands("high")
    low.publish(LOW)
    assert high.others(100.0) and high.others(109.0) and not high.others(110.5)
    low.publish(LOW)  # it has been away, and is back
    assert high.others(111.0) == [LOW]


def test_demand_that_is_withdrawn_counts_no_more():
    low, high = PublishedDemands("low"), PublishedDemands("high")
    low.publish(LOW)
    low.withdraw()
    assert high.others(0.0) == []
