"""Calls of ctx.log are sent together, in order, and within a moment."""

import threading
import time

import pytest

from elastic_dp.train import log_sender
from elastic_dp.train.log_sender import LogSender
from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def sent():
    return []


def test_calls_that_come_soon_after_each_other_are_one_message(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", PATIENCE_S)
    sender = LogSender(sent.append)
    for step in (1, 2, 3):
        sender.log((step, 1), None, {"loss": step})
    assert sent == []
    sender.flush()
    sender.flush()
    [calls] = sent
    assert [(each.call, each.metrics) for each in calls] == [
        ((step, 1), {"loss": step}) for step in (1, 2, 3)
    ]
    assert calls[0].logged_at <= calls[1].logged_at <= time.monotonic()


def test_calls_are_sent_without_another_message(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", 0.0)
    sender = LogSender(sent.append)
    for count in (1, 2):
        sender.log((count, 1), None, {})
        eventually(lambda count=count: len(sent) == count)


def test_a_flush_returns_only_when_what_another_thread_sends_is_sent(sent, monkeypatch):
    monkeypatch.setattr(log_sender, "GATHER_S", 0.0)
    sending, goes_on = threading.Event(), threading.Event()

    def send(calls):
        sending.set()
        goes_on.wait(PATIENCE_S)
        sent.append(calls)

    sender = LogSender(send)
    sender.log((1, 1), None, {})
    assert sending.wait(PATIENCE_S)  # by the sender's own thread
    threading.Timer(0.05, goes_on.set).start()
    sender.flush()
    assert len(sent) == 1
