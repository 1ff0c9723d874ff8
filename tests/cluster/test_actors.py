"""What the actors do where Ray does not, without a cluster."""

import types

import pytest
import ray

from elastic_dp.cluster import ray_actors
from elastic_dp.coordinator.messages import Cause, WorkerLost
from tests.runs import spec_of


class Ended(BaseException):
    """Of the process."""


def ends(code):
    raise Ended(code)


def raises(*_):
    raise ConnectionError("the GCS is away")


def leading(monkeypatch, **controller):
    """A controller that takes over, as far as its thread needs it."""
    monkeypatch.setattr(ray_actors.os, "_exit", ends)
    actor = object.__new__(ray_actors.ControllerActor.__ray_metadata__.modified_class)
    actor._ledger = types.SimpleNamespace(inherited=True)
    actor._controller = types.SimpleNamespace(logged_to=(0, 0), **controller)
    return actor


def test_a_controller_that_cannot_find_its_workers_is_started_again(monkeypatch, capsys):
    actor = leading(monkeypatch, lead=raises)
    actor._fleet = types.SimpleNamespace(adopt=raises)
    with pytest.raises(Ended):
        actor._lead()
    assert "the GCS is away" in capsys.readouterr().err


def test_a_controller_that_is_superseded_only_ends(monkeypatch):
    actor = leading(monkeypatch, lead=lambda found: None, superseded=True)
    actor._fleet = types.SimpleNamespace(adopt=lambda logged_to: [])
    with pytest.raises(Ended):
        actor._lead()


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(ray_actors.ray, "put", lambda job: job)
    monkeypatch.setattr(ray_actors.ray, "kill", lambda actor, no_restart: None)
    facts = types.SimpleNamespace(term=1)
    posted = []
    controller = types.SimpleNamespace(
        ledger=types.SimpleNamespace(facts=facts), say=print, post=posted.append, posted=posted
    )
    return ray_actors.RayFleet(types.SimpleNamespace(run="run"), spec_of(), controller, None)


def died(fleet, worker):
    actor = types.SimpleNamespace(_actor_id=b"\x01")
    fleet._actors[worker] = actor
    return lambda: fleet._ended(
        worker, actor, types.SimpleNamespace(exception=lambda: ValueError("died"))
    )


def test_a_loss_is_told_where_its_node_cannot_be_asked_for(fleet, monkeypatch):
    monkeypatch.setattr(fleet.placement, "failed", raises)
    with pytest.raises(ConnectionError):
        died(fleet, "w1")()
    assert fleet._controller.posted == [WorkerLost("w1", "died", Cause.UNKNOWN)]


def test_an_eviction_counts_against_the_node_and_the_end_of_the_run_does_not(fleet, monkeypatch):
    failed = []
    monkeypatch.setattr(fleet.placement, "failed", failed.append)
    dies = died(fleet, "w1")
    fleet.kill("w1")
    dies()
    assert failed == ["01"]
    dies = died(fleet, "w2")
    fleet.close()
    dies()
    assert failed == ["01"]


def test_withdrawn_worker_counts_as_no_failure_of_its_node(fleet, monkeypatch):
    monkeypatch.setattr(fleet.placement, "failed", raises)
    monkeypatch.setattr(fleet.placement, "in_vain", lambda placed, there: [*there])
    monkeypatch.setattr(fleet, "nodes", dict)
    withdrawn = []
    fleet._controller.withdrawn = withdrawn.append
    dies = died(fleet, "w1")
    fleet.withdraw_in_vain()
    dies()
    assert withdrawn == ["w1"]
    assert [event.cause for event in fleet._controller.posted] == [Cause.PREEMPTED]


def test_a_worker_can_be_drained_before_the_new_controller_has_met_it(monkeypatch):
    actor = leading(monkeypatch, status=lambda: {"workers": {"w2": "starting"}})
    asked = []
    actor._request, actor._ledger.facts = asked.append, types.SimpleNamespace(here={"w1": None})
    assert actor.drain("w1", None) == ["w2", "w1"]
    assert [event.worker for event in asked] == ["w1"]


def test_adopted_worker_counts_for_the_on_demand_floor_and_the_zones(fleet, monkeypatch):
    labels = {"ray.io/market-type": "on-demand", "ray.io/availability-zone": "a", "ray.io/x": "y"}
    monkeypatch.setattr(ray_actors.ray, "nodes", lambda: [{"NodeID": "n1", "Labels": labels}])
    serve = types.SimpleNamespace(remote=lambda *_: None)
    actor = types.SimpleNamespace(serve=serve)
    alive = [("w1", actor, "n1"), ("w2", actor, "gone")]
    monkeypatch.setattr(fleet, "_named", lambda *states: alive if "ALIVE" in states else [])
    monkeypatch.setattr(fleet, "_watch", lambda *_: None)
    fleet._job = types.SimpleNamespace(controller=None)
    assert fleet.adopt((0, 0)) == ["w1", "w2"]
    first = {"ray.io/market-type": "on-demand", "ray.io/availability-zone": "a"}
    assert fleet._asked == {"w1": first, "w2": {}}


def test_status_says_what_workers_wait_for(monkeypatch):
    actor = object.__new__(ray_actors.ControllerActor.__ray_metadata__.modified_class)
    status = {"workers": {"w1": "member", "w2": "starting"}}
    actor._controller = types.SimpleNamespace(status=lambda: status)
    placed = {"w1": "node"}
    place = types.SimpleNamespace(avoided={})
    actor._fleet = types.SimpleNamespace(
        nodes=lambda: placed, placement=place, without_process=lambda workers: [*workers]
    )
    actor._spec, actor._waiting = spec_of(), {}
    monkeypatch.setattr(ray_actors.ray, "nodes", lambda: [])
    autoscaler = types.SimpleNamespace(why=lambda now: "Ray's autoscaler: 403")
    actor._waits_for = actor._why_waiting(autoscaler)
    assert actor.status()["waits_for"].startswith("no node of this cluster can hold a worker")
    assert actor.status()["waits_for"].endswith(". Ray's autoscaler: 403")
    placed["w2"] = "node"  # it starts there
    assert actor._why_waiting(autoscaler) == ""


def test_no_room_is_said_of_a_worker_that_waits_long_and_not_of_one_that_starts(monkeypatch):
    actor = object.__new__(ray_actors.ControllerActor.__ray_metadata__.modified_class)
    status = {"workers": {"w1": "starting", "w2": "starting"}}
    actor._controller = types.SimpleNamespace(status=lambda: status)
    waits = ["w1", "w2"]
    actor._fleet = types.SimpleNamespace(nodes=dict, without_process=lambda workers: [*waits])
    actor._spec, actor._waiting = spec_of(), {}
    node = {"Alive": True, "Resources": {"CPU": 2}, "Labels": {}}
    monkeypatch.setattr(ray_actors.ray, "nodes", lambda: [node])
    monkeypatch.setattr(ray_actors, "has_room", lambda needs: False)  # their own places
    clock = types.SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 0.0)
    monkeypatch.setattr(ray_actors, "time", clock)
    autoscaler = types.SimpleNamespace(why=lambda now: "")
    assert actor._why_waiting(autoscaler) == ""
    clock.monotonic = lambda: 110.0
    assert actor._why_waiting(autoscaler) == "", "processes start"
    waits.remove("w1")
    clock.monotonic = lambda: 131.0
    assert "no node has room for another worker now" in actor._why_waiting(autoscaler)
    waits.clear()  # it imports torch
    assert actor._why_waiting(autoscaler) == ""


def test_worker_with_a_process_does_not_count_as_waiting_for_a_node(fleet, monkeypatch):
    def actor(name):
        return types.SimpleNamespace(_actor_id=types.SimpleNamespace(hex=lambda: name))

    fleet._actors = {"w1": actor("a"), "w2": actor("b"), "w3": actor("c")}
    tables = {"a": {"Pid": 7}, "b": {"Pid": 0}, "c": None}
    state = types.SimpleNamespace(actor_table=tables.get)
    monkeypatch.setattr(ray_actors.ray._private.state, "state", state)
    assert fleet.without_process(["w1", "w2", "w3", "gone"]) == ["w2", "w3"]


def test_why_an_actor_died():
    _death = ray_actors._death
    assert _death(None) == ("left", Cause.UNKNOWN)
    killed = ray.exceptions.OutOfMemoryError("the node was running low on memory")
    assert _death(killed)[1] is Cause.OUT_OF_MEMORY
    died = ray.exceptions.ActorDiedError()
    assert _death(died)[1] is Cause.UNKNOWN
    died._preempted = True
    reason, cause = _death(died)
    assert cause is Cause.PREEMPTED and "preempted" in reason
