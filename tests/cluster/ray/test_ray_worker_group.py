"""The worker group of Ray's actors, without a cluster."""

import pickle
import threading
import time
import types

import pytest
import ray

from elastic_dp.cluster import outage_notice
from elastic_dp.cluster.ray import node_avoidance, private, ray_worker_group
from elastic_dp.coordinator.messages import Cause, ReleaseWorker, WorkerLost
from elastic_dp.errors import ClusterError
from tests.patience import PATIENCE_S, eventually
from tests.runs import spec_of


def raises(*_):
    raise ConnectionError("the GCS is away")


@pytest.fixture
def worker_group(monkeypatch):
    monkeypatch.setattr(ray_worker_group.ray, "put", lambda job: job)
    monkeypatch.setattr(ray_worker_group.ray, "kill", lambda actor, no_restart: None)
    state = types.SimpleNamespace(term=1)
    posted = []
    controller = types.SimpleNamespace(
        state_store=types.SimpleNamespace(state=state),
        say=print,
        fail=print,
        post=posted.append,
        posted=posted,
    )
    made = ray_worker_group.RayWorkerGroup(
        types.SimpleNamespace(run="run"), spec_of(), controller, None
    )
    yield made
    made.close()


def rest(worker_group):
    """Wait until the thread of actors has done what it was given."""
    done = threading.Event()
    worker_group._tasks.put(done.set)
    assert done.wait(PATIENCE_S)


def died(worker_group, worker, error=None):
    actor = types.SimpleNamespace(_actor_id=b"\x01")
    worker_group._actors[worker] = actor
    future = types.SimpleNamespace(exception=lambda: error or ValueError("died"))
    return lambda: worker_group._ended(worker, actor, future)


def test_a_loss_is_told_where_its_node_cannot_be_asked_for(worker_group, monkeypatch):
    monkeypatch.setattr(worker_group.node_avoidance, "failed", raises)
    died(worker_group, "w1")()
    assert worker_group._controller.posted == [WorkerLost("w1", "died", Cause.UNKNOWN)]


def test_an_actor_that_raised_is_lost_for_that_reason_and_holds_its_gpu_no_longer(
    worker_group, monkeypatch
):
    """In the thread that Ray calls back in, ray.kill never returns."""
    threads = []
    monkeypatch.setattr(worker_group.node_avoidance, "failed", lambda *_: None)
    monkeypatch.setattr(
        ray_worker_group.ray, "kill", lambda *_, **__: threads.append(threading.get_ident())
    )
    raised = ray.exceptions.RayTaskError("run", "frames\nof Ray", ClusterError("no CUDA device"))
    died(worker_group, "w1", raised.as_instanceof_cause())()
    rest(worker_group)
    assert len(threads) == 1 and threads != [threading.get_ident()]
    lost = WorkerLost("w1", "ClusterError: no CUDA device", Cause.UNKNOWN)
    assert worker_group._controller.posted == [lost]


def test_an_eviction_counts_against_the_node_and_the_end_of_the_run_does_not(
    worker_group, monkeypatch
):
    failed = []
    count = worker_group.node_avoidance
    monkeypatch.setattr(count, "failed", lambda actor, times: failed.append(actor))
    dies = died(worker_group, "w1")
    worker_group.kill("w1")
    dies()
    rest(worker_group)
    assert [actor._actor_id for actor in failed] == [b"\x01"]
    dies = died(worker_group, "w2")
    worker_group.close()
    dies()
    assert len(failed) == 1 and worker_group._tasks.empty()


def test_node_of_a_slow_worker_is_avoided_at_once(worker_group, monkeypatch):
    entry = types.SimpleNamespace(node="slow")
    monkeypatch.setattr(node_avoidance.private, "actor", lambda actor: entry)
    known = {"Alive": True, "Resources": {"CPU": 9}, "Labels": {}}
    nodes = [{"NodeID": name} | known for name in ("slow", "other")]
    monkeypatch.setattr(node_avoidance.ray, "nodes", lambda: nodes)
    worker_group._actors["w1"] = object()
    worker_group.avoid_node_of("w1")
    worker_group.avoid_node_of("w9")  # gone meanwhile
    rest(worker_group)
    assert worker_group.node_avoidance.selector_of("w2") == {"ray.io/node-id": "!in(slow)"}
    worker_group._actors.clear()


class CountsItsPickles:
    def __init__(self, nbytes):
        self.times, self._state = 0, b"x" * nbytes

    def __reduce__(self):
        self.times += 1
        return bytes, (self._state,)


@pytest.mark.parametrize(("nbytes", "objects"), [(10, 0), (200_000, 1)])
def test_command_to_all_workers_is_serialized_once(worker_group, monkeypatch, nbytes, objects):
    """A long one is one object of Ray's, and not one for each worker."""
    delivered, put = [], []

    def puts(message):
        put.append(message)
        return message

    monkeypatch.setattr(ray_worker_group.ray, "put", puts)
    for worker in ("w1", "w2", "w3"):
        deliver = types.SimpleNamespace(remote=lambda *given: delivered.append(pickle.dumps(given)))
        worker_group._actors[worker] = types.SimpleNamespace(deliver=deliver)
    command = CountsItsPickles(nbytes)
    worker_group.send(["w1", "w2", "gone", "w3"], command)
    assert command.times == 1 and len(put) == objects
    (message,) = {pickle.loads(given)[0] for given in delivered}
    assert len(delivered) == 3 and pickle.loads(message) == b"x" * nbytes


def test_replacement_is_asked_for_when_survivors_have_been_told(worker_group, monkeypatch):
    started, told = threading.Event(), time.monotonic()
    monkeypatch.setattr(worker_group, "_start", lambda worker: started.set())
    worker_group.start("w2")
    assert started.wait(PATIENCE_S) and time.monotonic() >= told + ray_worker_group._STARTS_AFTER_S


def test_worker_that_is_told_to_go_before_it_is_asked_for_is_not_started(worker_group):
    worker_group.start("w2")
    worker_group.send(["w2"], ReleaseWorker("w2", "too many"))
    eventually(lambda: worker_group._controller.posted)
    assert worker_group._controller.posted == [WorkerLost("w2", "was not started")]


def test_withdrawn_worker_counts_as_no_failure(worker_group, monkeypatch):
    monkeypatch.setattr(worker_group.node_avoidance, "failed", raises)
    monkeypatch.setattr(
        worker_group.node_avoidance, "waiting_needlessly", lambda placed, there: [*there]
    )
    monkeypatch.setattr(worker_group, "nodes", dict)
    withdrawn = []
    worker_group._controller.withdrawn = withdrawn.append
    dies = died(worker_group, "w1")
    worker_group.withdraw_waiting_needlessly()
    dies()
    assert withdrawn == ["w1"]
    assert [event.cause for event in worker_group._controller.posted] == [Cause.PREEMPTED]


def test_workers_without_a_process_leave_out_those_that_ray_has_started(worker_group, monkeypatch):
    def actor(name):
        return types.SimpleNamespace(_actor_id=types.SimpleNamespace(hex=lambda: name))

    worker_group._actors = {"w1": actor("a"), "w2": actor("b"), "w3": actor("c")}
    tables = {"a": {"State": "", "Pid": 7}, "b": {"State": "", "Pid": 0}, "c": None}
    state = types.SimpleNamespace(actor_table=tables.get)
    monkeypatch.setattr(private, "_state", lambda: state)
    assert worker_group.without_process(["w1", "w2", "w3", "gone"]) == ["w2", "w3"]


def test_death_names_why_an_actor_ended():
    _death = ray_worker_group._death
    assert _death(None) == ("left", Cause.UNKNOWN)
    killed = ray.exceptions.OutOfMemoryError("the node was running low on memory")
    assert _death(killed)[1] is Cause.OUT_OF_MEMORY
    died = ray.exceptions.ActorDiedError()
    assert _death(died)[1] is Cause.UNKNOWN
    died._preempted = True
    reason, cause = _death(died)
    assert cause is Cause.PREEMPTED and "preempted" in reason


class Actors:
    """Ray's actors, of a cluster whose GCS does not answer until it is told to."""

    def __init__(self):
        self.answers, self.asked, self.started, self.errors = threading.Event(), 0, [], []

    def options(self, name, **_):
        def remote(*_):
            self.asked += 1
            assert self.answers.wait(PATIENCE_S)
            if self.errors:
                raise self.errors.pop()
            self.started.append(name)
            future = types.SimpleNamespace(add_done_callback=lambda call: None)
            run = types.SimpleNamespace(remote=lambda: types.SimpleNamespace(future=lambda: future))
            return types.SimpleNamespace(run=run, _actor_id=b"\x02")

        return types.SimpleNamespace(remote=remote)


def test_gcs_that_does_not_answer_or_raises_holds_up_no_command_to_others(
    worker_group, monkeypatch
):
    """The thread that calls these also decides and renews leases."""
    actors, delivered = Actors(), []
    monkeypatch.setattr(ray_worker_group, "WorkerActor", actors)
    monkeypatch.setattr(ray_worker_group.ray, "nodes", lambda: [])
    deliver = types.SimpleNamespace(remote=delivered.append)
    worker_group._actors["w1"] = types.SimpleNamespace(deliver=deliver, _actor_id=b"\x01")
    actors.errors += [ConnectionError("the GCS is away"), AttributeError("another Ray")]
    worker_group.start("w2")
    worker_group.kill("w1")
    worker_group.send(["w1"], "continue")
    assert len(delivered) == 1 and actors.started == []
    actors.answers.set()
    eventually(lambda: "w2" in worker_group.actors())
    assert actors.started == ["run/w2"] and actors.asked == 3
    assert set(worker_group.actors()) == {"w1", "w2"}
    del worker_group._actors["w1"]


def test_command_that_ray_refuses_is_said_and_nobody_waits(worker_group, monkeypatch):
    errors, said, delivered = [ConnectionError("full")], [], []

    def puts(message):  # a second call is a retry, for which the thread that decides would wait
        raise errors.pop()

    def refuses(message):
        raise AttributeError("another Ray")

    monkeypatch.setattr(ray_worker_group.ray, "put", puts)
    monkeypatch.setattr(outage_notice, "_RETRY_S", 0.0)
    monkeypatch.setattr(outage_notice, "_SAY_AFTER_S", 0.0)
    monkeypatch.setattr(worker_group._sends, "_say", said.append)
    for worker, remote in (("w1", refuses), ("w2", delivered.append)):
        worker_group._actors[worker] = types.SimpleNamespace(
            deliver=types.SimpleNamespace(remote=remote)
        )
    worker_group.send(["w2", "w1"], b"x" * 200_000)
    assert len(delivered) == 1 and errors == []
    assert len([text for text in said if text.startswith("sending commands to workers fails")]) == 2
    worker_group._actors.clear()
