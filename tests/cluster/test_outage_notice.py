"""Errors of repeated calls of Ray are said when they last, and end nothing."""

from elastic_dp.cluster.outage_notice import OutageNotice


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
