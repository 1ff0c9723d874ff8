"""When processes are started that wait for replacements, and where."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from elastic_dp.cluster.ray import private, warm_processes
from elastic_dp.cluster.ray.warm_processes import WarmProcesses

NODES, SMALL, FULL = ("a", "b"), "small", "full"


@pytest.fixture
def warm(monkeypatch):
    sizes = {**dict.fromkeys((*NODES, FULL), 8 << 30), SMALL: 1 << 30}
    nodes = [{"NodeID": name, "Resources": {"memory": size}} for name, size in sizes.items()]
    monkeypatch.setattr(warm_processes.ray, "nodes", lambda: nodes)
    free = {**{name: {"CPU": 1.0} for name in sizes}, FULL: {"memory": 1.0}}
    monkeypatch.setattr(warm_processes.private, "free_resources", lambda: free)
    made = WarmProcesses({"X": "1"})
    made.started = []
    monkeypatch.setattr(made, "_start", made.started.extend)
    return made


def test_each_node_of_a_worker_gets_one_process_once_no_worker_starts(warm):
    workers = {"w0": "a", "w1": "b", "w2": "a"}
    for stages in ({"w0": "building"}, {"w1": "starting"}, {"w2": "training"}):
        warm.refill(workers, stages)
        assert not warm.started
    for _ in range(5):
        warm.refill(workers, {"w9": "starting"})  # waits for room
    assert sorted(warm.started) == ["a", "b"]


def test_a_worker_that_starts_on_a_node_has_taken_its_process(warm):
    for workers in ({"w0": "a", "w1": "b"}, {"w0": "a"}, {"w0": "a", "w2": "b"}):
        for _ in range(3):
            warm.refill(workers, {})
    assert sorted(warm.started) == ["a", "b", "b"]


def test_a_node_with_little_memory_or_no_free_cpu_gets_none(warm):
    for _ in range(5):
        warm.refill({"w0": SMALL, "w1": FULL}, {})
    assert not warm.started


def test_processes_of_many_nodes_start_at_the_same_time(monkeypatch):
    slept, cancelled = [], []
    monkeypatch.setattr(warm_processes.time, "sleep", slept.append)
    monkeypatch.setattr(warm_processes.ray, "cancel", cancelled.append)
    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: len(slept)))
    monkeypatch.setattr(warm_processes, "_nothing", task)
    WarmProcesses({})._start([f"{i:056x}" for i in range(1000)])
    assert (len(slept), cancelled) == (1, [0] * 1000)


def test_what_the_user_has_a_process_do_first_stays(monkeypatch):
    assert private.SETUP_HOOK in WarmProcesses({}).environment
    monkeypatch.setenv(private.SETUP_HOOK, "theirs")
    assert WarmProcesses({"X": "1"}).environment == {"X": "1"}


def test_what_a_process_imports_first_asks_cuda_for_nothing():
    code = f"""
import importlib, torch

def asked(*_):
    raise AssertionError("an import asks for GPUs")

for name in ("is_available", "device_count", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, asked)
module, _, function = {WarmProcesses({}).environment[private.SETUP_HOOK]!r}.rpartition(".")
getattr(importlib.import_module(module), function)()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
