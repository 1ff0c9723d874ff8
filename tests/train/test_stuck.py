"""A worker that lives and does not go on is found by where its heartbeats say it is, and replaced;
its peers wait. One whose own code fails before it joins harms no run in which others train."""

import ctypes
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_dp.cluster.controller import controller
from elastic_dp.cluster.heartbeat import heartbeat_sidecar
from elastic_dp.config import MapStyleData
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.fault_injection import WorkerFault
from tests.cluster.test_budgets import is_first
from tests.patience import PATIENCE_S, eventually
from tests.runs import PATIENT, Points, formed_of, group, lines_of, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy, hold, plain

HANGS_S = 600.0
HANG_TIMEOUT_S = 8.0  # who computes has six times that, so a busy machine makes nobody stuck
FAILURE = dataclasses.replace(PATIENT, hang_timeout_s=HANG_TIMEOUT_S)


@pytest.fixture(autouse=True)
def _sidecars_have_time(monkeypatch):
    """Give sidecars time to take stacks: nobody kills the worker before."""
    monkeypatch.setattr(controller, "STACKS_S", PATIENCE_S)


def lines(run, key, name):
    return [line for line in lines_of(run) if line.get(key) == name]


def until_it_is_gone(gate):
    """A script: no run ends before its stuck worker's stacks and its loss are known. The body of
    step 8 waits."""

    def gone(run):
        known = [lines(run, "event", "StackTracesCaptured"), lines(run, "event", "WorkerLost")]
        return all(known) or run.controller.ended.is_set()

    def act(run):
        eventually(lambda: gone(run))
        gate.touch()

    return [(0, act)]


def judged(outcome, run, spec, train=plain):
    """One was evicted, as stuck, with its stacks; the result is the same."""
    assert outcome.digest == local(spec, train).digest
    evicted = lines(run, "command", "EvictWorker")[0]
    assert evicted["stuck"] and evicted["reason"].startswith("stuck: ")
    taken = lines(run, "event", "StackTracesCaptured")[0]
    assert {line["worker"] for line in lines(run, "command", "EvictWorker")} == {evicted["worker"]}
    (lost,) = lines(run, "event", "WorkerLost")[:1]
    assert evicted["worker"] == taken["worker"] == lost["worker"]
    assert taken["time"] <= lost["time"]
    assert len(taken["stacks"]) <= 16384
    return evicted, taken["stacks"]


def test_the_one_that_stands_still_is_replaced_and_not_those_who_wait_for_it(tmp_path):
    once = str(tmp_path / "hangs")
    fault = WorkerFault("exchange", 6, 1, action="sleep", seconds=HANGS_S, once=once, settled=True)
    gate = tmp_path / "gate"
    spec = spec_of(min_workers=3, config={"gates": {8: str(gate)}}, failure=FAILURE)
    outcome, run = group(spec, plain, faults=(fault,), script=until_it_is_gone(gate))
    evicted, stacks = judged(outcome, run, spec)
    assert "in phase 'collective'" in evicted["reason"]
    assert "in _act" in stacks and "in attempt" in stacks


def holds_the_lock(ctx):
    """Once, in step 6 of rank 1 of the group."""

    def loss_fn(m, batch):
        sixth = ctx.rank == 1 and ctx.generation and ctx._session.position.step == 5
        if sixth and is_first(ctx.config["once"]):
            ctypes.PyDLL(None).usleep(int(HANGS_S * 1e6))  # PyDLL keeps the interpreter's lock
        return cross_entropy(m, batch)

    classify(ctx, loss_fn)


def test_worker_that_holds_the_interpreter_lock_is_replaced_with_its_stacks(tmp_path):
    """Such a worker hears no abort and runs no Python; its stacks are written all the same."""
    gate = tmp_path / "gate"
    config = {"gates": {8: str(gate)}, "once": str(tmp_path / "once")}
    spec = spec_of(min_workers=3, config=config, failure=FAILURE)
    outcome, run = group(spec, holds_the_lock, script=until_it_is_gone(gate))
    evicted, stacks = judged(outcome, run, spec, holds_the_lock)
    assert "in phase 'compute'" in evicted["reason"]
    assert "in loss_fn" in stacks


def test_stacks_are_whole_also_where_they_are_written_with_pauses(tmp_path, monkeypatch):
    """A busy machine writes them with pauses."""
    now, late = [0.0], {0.1: b"of one thread\n", 0.25: b"of another\n"}
    with open(tmp_path / "stacks", "w+b", buffering=0) as file:

        def sleep(seconds):
            now[0] += seconds
            for at in [at for at in late if at <= now[0]]:
                file.write(late.pop(at))

        system = SimpleNamespace(kill=lambda *_: None, fstat=os.fstat, pread=os.pread)
        monkeypatch.setattr(heartbeat_sidecar, "os", system)
        clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
        monkeypatch.setattr(heartbeat_sidecar, "time", clock)
        assert heartbeat_sidecar._take_stacks(1, file.fileno()) == "of one thread\nof another\n"
    assert now[0] < controller.STACKS_S


class Late(Points):
    """One row does not come before `path` is there."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def __getitem__(self, i):
        if i == 7:
            eventually(self.path.exists)
        return super().__getitem__(i)


def test_waiting_for_data_is_said_and_is_no_hang(tmp_path):
    data = MapStyleData(Late(comes := tmp_path / "comes"), micro_batch_size=4)
    spec = spec_of(min_workers=3, data=data, failure=FAILURE)

    def said(run):
        return any("waits for data" in line["text"] for line in lines(run, "command", "Explain"))

    script = [(0, lambda run: eventually(lambda: said(run))), (0, lambda run: comes.touch())]
    outcome, run = group(spec, plain, script=script)
    assert (outcome.error, len(formed_of(run)), outcome.workers_lost) == (None, 1, 0)


def train(ctx):
    """The loss raises in each process that begins while its file is missing."""
    model = classifier()
    mounted = os.path.exists(ctx.config["mount"])

    def loss_fn(model, batch):
        if not mounted:
            raise OSError("the mount of this node is missing")
        return cross_entropy(model, batch)

    for step in ctx.steps(model, adamw(model), loss_fn):
        ctx.log({"loss": step.loss})
        hold(ctx, step)


def test_joiner_that_fails_in_its_warm_up_is_replaced_and_its_traceback_said(tmp_path):
    mount = Path(tmp_path / "mount")
    mount.touch()
    config = {"mount": str(mount), "body_s": 0.05}
    spec = spec_of(virtual=4, workers=2, min_workers=1, steps=400, config=config)
    calm = local(spec, train).digest
    with ProcessRun(spec, train) as run:
        status = run.controller.status
        eventually(lambda: status()["world_size"] == 2 and status()["step"] > 3, status)
        mount.unlink()
        run.worker_group.processes["w2"].kill()

        def told():
            _, lines = run.journal.since(None, 0.0)
            return [
                line["text"] for line in lines if "fails before it joins" in line.get("text", "")
            ]

        eventually(told, status)
        mount.touch()
        eventually(lambda: status()["world_size"] == 2, status)
        outcome = run.wait()
    assert "OSError: the mount of this node is missing" in told()[0]
    assert "in loss_fn" in told()[0], "the traceback"
    assert (outcome.error, outcome.digest) == (None, calm)
