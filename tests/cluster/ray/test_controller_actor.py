"""The controller's actor where Ray is not: what it does when it takes over, without a cluster."""

import types

import pytest

from elastic_dp.cluster.ray import controller_actor


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
    actor._state_store = types.SimpleNamespace(inherited=True)
    actor._controller = types.SimpleNamespace(
        metrics=types.SimpleNamespace(logged_to=(0, 0)), **controller
    )
    return actor


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
    actor._request, actor._state_store.state = (
        asked.append,
        types.SimpleNamespace(here={"w1": None}),
    )
    assert actor.drain("w1", None) == ["w2", "w1"]
    assert [event.worker for event in asked] == ["w1"]
