"""Errors of repeated calls of Ray are said when they last, and end nothing."""

from types import SimpleNamespace

import pytest

from elastic_dp.cluster import outage_notice
from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray.capacity_monitor import CapacityMonitor
from elastic_dp.cluster.ray.drain_watcher import DrainWatcher
from elastic_dp.config import ScalingConfig
from elastic_dp.extensions.sharing import cluster_sharing


class Calls:
    def __init__(self):
        self.now, self.said, self.fails = 0.0, [], True
        self.notice = OutageNotice("the watch", self.said.append, lambda: self.now)

    def at(self, now):
        self.now = now
        return self.notice.attempt(self.call)

    def call(self):
        if self.fails:
            raise AttributeError("no such method in this Ray")
        return "answer"


def test_error_that_lasts_is_said_after_ten_seconds_again_after_minutes_and_when_it_is_over():
    calls = Calls()
    assert calls.at(0.0) is None and calls.at(9.0) is None
    assert calls.said == [], "a head node that restarts is back by then"
    calls.at(10.0)
    assert len(calls.said) == 1 and "AttributeError: no such method in this Ray" in calls.said[0]
    assert calls.said[0].startswith("the watch fails since 10 s: ")
    calls.at(500.0)
    assert len(calls.said) == 1
    calls.at(610.0)
    assert len(calls.said) == 2
    calls.fails = False
    assert calls.at(611.0) == "answer" and calls.said[2:] == ["the watch works again"]
    assert calls.at(700.0) == "answer" and len(calls.said) == 3


def test_error_that_passes_is_not_said():
    calls = Calls()
    calls.at(0.0)
    calls.fails = False
    calls.at(5.0)
    calls.fails = True
    calls.at(11.0)
    assert calls.said == []


class Rounds:
    """Ends a loop after three rounds, by any of the names that a loop asks by."""

    def __init__(self):
        self.left = 3

    def __call__(self, *_):
        self.left -= 1
        return self.left < 0

    wait = __call__


def fails(*_, **__):
    raise AttributeError("no such method in this Ray")


def watches_drains(rounds, say):
    DrainWatcher(fails, dict, str, print, say).start(rounds).join()


def watches_capacity(rounds, say):
    group = SimpleNamespace(withdraw_waiting_needlessly=fails)
    CapacityMonitor(ScalingConfig(), group, fails, say).start(rounds).join()


def sharing(say):
    made = cluster_sharing.ClusterSharing(
        "run", ScalingConfig(), began_at=0.0, sizes=fails, held=list, post=print, say=say
    )
    made._look = fails
    return made


@pytest.mark.parametrize(
    "loop",
    [
        watches_drains,
        watches_capacity,
        lambda rounds, say: sharing(say).admit(rounds),
        lambda rounds, say: sharing(say)._watch(rounds),
    ],
    ids=["drains", "capacity", "admission", "sharing"],
)
def test_loop_that_fails_for_ever_says_it_again_and_goes_on(loop, monkeypatch):
    monkeypatch.setattr(outage_notice, "_SAY_AFTER_S", 0.0)
    monkeypatch.setattr(outage_notice, "_SAY_AGAIN_S", 0.0)
    monkeypatch.setattr(cluster_sharing, "_EVERY_S", 0.0)
    rounds, said = Rounds(), []
    loop(rounds, said.append)
    assert rounds.left < 0 and len([text for text in said if "no such method" in text]) >= 3
