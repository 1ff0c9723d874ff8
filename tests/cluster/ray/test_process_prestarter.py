"""Which nodes get a process ahead of time, and when, without a cluster."""

import functools
import threading

import pytest

from elastic_dp.cluster.ray.prestart import process_prestarter
from elastic_dp.cluster.ray.prestart.process_prestarter import ProcessPrestarter


class Group:
    """Workers that have a process, by node, and the stages of all."""

    def __init__(self, count=1):
        self.nodes = {"w1": "a", "w2": "a", "w3": "b"}
        self.stages = dict.fromkeys(self.nodes, "member")
        self.said = []
        self.prestarter = ProcessPrestarter(
            "run", count, lambda: self.nodes, lambda: self.stages, self.said.append
        )

    def missing(self, now):
        """What is missing, and now requested."""
        found = self.prestarter.missing(now)
        for node, number in found.items():
            self.prestarter._idle[node] = self.prestarter._idle.get(node, 0) + number
        return found


def test_each_node_with_a_worker_gets_one_process_and_another_when_a_worker_took_it():
    group = Group()
    assert group.missing(0.0) == {"a": 1, "b": 1}
    assert group.missing(1.0) == {}
    del group.nodes["w3"], group.stages["w3"]  # it dies, and its replacement finds one on node b
    group.nodes["w4"], group.stages["w4"] = "b", "member"
    assert group.missing(2.0) == {"b": 1}
    del group.nodes["w4"]  # a node that no worker is on gets none
    group.prestarter._idle.pop("b")
    assert group.missing(3.0) == {}


def test_no_process_starts_while_a_worker_does_or_just_after():
    group = Group()
    group.stages["w4"] = "starting"
    assert group.missing(0.0) == {}
    group.nodes["w4"], group.stages["w4"] = "a", "building"
    assert group.missing(10.0) == {}
    group.stages["w4"] = "member"
    assert group.missing(11.0) == {}
    assert group.missing(10.0 + process_prestarter._CALM_S) == {"a": 1, "b": 1}


def test_a_worker_that_waits_for_room_delays_no_process():
    group = Group()
    group.stages["w4"] = "starting"
    assert group.missing(0.0) == {}
    assert group.missing(process_prestarter._STARTING_S + 1) == {"a": 1, "b": 1}


def keep(prestarter, rounds, runtime_env, monkeypatch):
    """Run the thread's loop for so many rounds."""
    ended, left = threading.Event(), iter([False] * rounds + [True])
    monkeypatch.setattr(ended, "wait", lambda timeout: next(left))
    prestarter._keep(ended, runtime_env)


def test_failed_request_is_told_and_not_repeated_at_once(monkeypatch):
    def refuses(node, number, runtime_env):
        raise ImportError("no module named grpc")

    group = Group()
    monkeypatch.setattr(process_prestarter, "request", refuses)
    keep(group.prestarter, 5, lambda: "{}", monkeypatch)
    assert len(group.said) == 2  # of each node
    assert "no module named grpc" in group.said[0]


def test_processes_have_the_runtime_environment_of_a_worker_that_this_controller_started(
    monkeypatch,
):
    """One that took over has not started any worker yet, and starts no process that fits none."""
    asked = []
    monkeypatch.setattr(process_prestarter, "request", lambda *words: asked.append(words))
    group = Group()
    keep(group.prestarter, 3, lambda: None, monkeypatch)
    assert asked == []
    keep(group.prestarter, 3, lambda: "theirs", monkeypatch)
    assert sorted(asked) == [("a", 1, "theirs"), ("b", 1, "theirs")]


@pytest.fixture
def exported(monkeypatch):
    calls = []
    module = process_prestarter.prestarted_process
    monkeypatch.setattr(module, "export_hook", lambda run, token: {"HOOK": token})
    monkeypatch.setattr(
        process_prestarter.ray_kv_state,
        "set_prestarted_token",
        lambda run, token: calls.append((run, token)),
    )
    return calls


def test_close_lets_the_processes_of_this_controller_end(exported):
    prestarter = Group().prestarter
    prestarter.open()
    token = prestarter.environment["HOOK"]
    prestarter.close()
    assert exported == [("run", token), ("run", None)]


@pytest.mark.parametrize("count", [0, 1])
def test_no_hook_for_none_and_none_where_the_user_has_a_hook(exported, monkeypatch, count):
    name = process_prestarter.prestarted_process.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    if count:
        monkeypatch.setenv(name, "theirs.setup")
    prestarter = Group(count).prestarter
    prestarter.open()
    assert (prestarter.environment, exported) == ({}, [])


def test_hook_leaves_a_process_alone_that_cannot_import_this_package(monkeypatch):
    """Ray ends a process whose hook fails: then no worker could start."""
    stored = []

    class Functions:
        def export_setup_func(self, hook, timeout):
            stored.append(hook)
            return b"key"

    module = process_prestarter.prestarted_process
    worker = type("Worker", (), {"function_actor_manager": Functions()})
    monkeypatch.setattr(module.ray._private.worker, "global_worker", worker)
    assert module.export_hook("run", "token")
    (hook,) = stored
    assert isinstance(hook, functools.partial)
    monkeypatch.setattr(module, "prepare", lambda run, token: stored.append((run, token)))
    hook()
    assert stored[1] == ("run", "token")
    monkeypatch.delattr(module, "prepare")
    hook()
