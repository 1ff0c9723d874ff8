"""Calls of ctx.log are sent together, in order, and within a moment."""

import threading
import time

import pytest

from elastic_dp.train import log_sender
from elastic_dp.train.log_sender import MessageLink
from tests.patience import PATIENCE_S, eventually


class Link(MessageLink):
    def __init__(self, send):
        super().__init__()
        self.send = send

    def _call(self, method, calls, sent_at):
        assert method == "log_all" and calls[-1].logged_at <= sent_at <= time.monotonic()
        self.send(calls)


@pytest.fixture
def sent():
    return []


def test_calls_that_come_soon_after_each_other_are_one_message(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", PATIENCE_S)
    link = Link(sent.append)
    for step in (1, 2, 3):
        link.log((step, 1), None, {"loss": step})
    assert sent == []
    link.flush()
    link.flush()
    [calls] = sent
    assert [(each.call, each.metrics) for each in calls] == [
        ((step, 1), {"loss": step}) for step in (1, 2, 3)
    ]
    assert calls[0].logged_at <= calls[1].logged_at <= time.monotonic()


def test_calls_are_sent_without_another_message(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", 0.0)
    link = Link(sent.append)
    for count in (1, 2):
        link.log((count, 1), None, {})
        eventually(lambda count=count: len(sent) == count)


def test_a_flush_returns_only_when_what_another_thread_sends_is_sent(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", 0.0)
    sending, goes_on = threading.Event(), threading.Event()

    def send(calls):
        sending.set()
        goes_on.wait(PATIENCE_S)
        sent.append(calls)

    link = Link(send)
    link.log((1, 1), None, {})
    assert sending.wait(PATIENCE_S)  # by the sender's own thread
    threading.Timer(0.05, goes_on.set).start()
    link.flush()
    assert len(sent) == 1
