"""The controller's actor where Ray is not: what it does when it takes over, without a cluster."""

import threading
import types

import pytest

from elastic_dp.cluster.ray import controller_actor
from elastic_dp.cluster.runs.controller_state import ControllerState


class Ended(BaseException):
    """The end of the process."""


def ends(code):
    raise Ended(code)


def raises(*_):
    raise ConnectionError("the GCS is away")


def leading(monkeypatch, **controller):
    """A controller that takes over, as far as its thread needs it."""
    monkeypatch.setattr(controller_actor.os, "_exit", ends)
    actor = object.__new__(controller_actor.ControllerActor.__ray_metadata__.modified_class)
    state = ControllerState(term=2, stepped=True)
    actor._state_store = types.SimpleNamespace(inherited=True, state=state)
    actor._controller = types.SimpleNamespace(
        say=print,
        metrics=types.SimpleNamespace(logged_to=(0, 0)),
        ended=threading.Event(),
        **controller,
    )
    actor._sharing = types.SimpleNamespace(start=lambda ended: None)
    return actor


def test_controller_that_is_restarted_while_its_run_is_queued_waits_on_in_the_queue(monkeypatch):
    actor = leading(monkeypatch, lead=lambda found: None, superseded=True)
    actor._worker_group = types.SimpleNamespace(adopt=lambda logged_to: [])
    actor._state_store.state.stepped = False
    waited, begun = [], []
    actor._sharing.admit = lambda is_over: waited.append(is_over())
    actor._state_store.change = lambda **facts: begun.append(facts)
    actor._state_store.save = lambda: begun.append("stored")
    with pytest.raises(Ended):
        actor._lead()
    assert waited == [False] and [{*begun[0]}, *begun[1:]] == [{"started_at"}, "stored"]


def test_a_controller_that_cannot_find_its_workers_is_started_again(monkeypatch, capsys):
    actor = leading(monkeypatch, lead=raises)
    actor._worker_group = types.SimpleNamespace(adopt=raises)
    with pytest.raises(Ended):
        actor._lead()
    assert "the GCS is away" in capsys.readouterr().err


def test_a_controller_that_is_superseded_only_ends(monkeypatch):
    actor = leading(monkeypatch, lead=lambda found: None, superseded=True)
    actor._worker_group = types.SimpleNamespace(adopt=lambda logged_to: [])
    with pytest.raises(Ended):
        actor._lead()


def test_a_worker_can_be_drained_before_the_new_controller_has_met_it(monkeypatch):
    actor = leading(monkeypatch, status=lambda: {"workers": {"w2": "starting"}})
    asked = []
    actor._request = asked.append
    actor._state_store.state.here = {"w1": True}
    assert actor.drain("w1", None) == ["w2", "w1"]
    assert [event.worker for event in asked] == ["w1"]
