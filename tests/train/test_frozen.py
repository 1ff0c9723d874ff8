"""Frozen and slow are told apart: a stopped process is left behind, a slow one is waited for."""

import ctypes
import os
import signal
import time

from elastic_dp.spec import FailureConfig
from elastic_dp.train.faults import Fault
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, plain

TIMEOUT_S = 1.5


def spec(**options):
    made = spec_of(**options)
    object.__setattr__(
        made, "failure", FailureConfig(heartbeat_timeout_s=TIMEOUT_S, release_timeout_s=3.0)
    )
    return made


def times(run, name, key="event"):
    return [line["time"] for _, line in run.journal._kept if line.get(key) == name]


def test_a_frozen_worker_is_left_behind_and_changes_nothing_when_it_thaws(tmp_path):
    once = str(tmp_path / "frozen")
    faults = (Fault("exchange", rank=1, world_size=3, settled=True, action="freeze", once=once),)
    thawed = []

    def thaw(run):
        lines = [line for _, line in run.journal._kept]
        victim = next(x["worker"] for x in lines if x.get("command") == "EvictWorker")
        process = run.fleet.processes[victim]
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(10)
        thawed.append(process.exitcode)

    options = {"steps": 150, "config": {"hold": {3: 3}, "body_s": 0.02}, "min_workers": 1}
    made = spec(**options)
    outcome, run = group(made, plain, faults=faults, script=[(120, thaw)])
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(made, plain).digest
    assert thawed[0] not in (None, 0)  # it is gone, and did not finish anything
    evicted = times(run, "EvictWorker", "command")[0]
    reformed = [t for t in times(run, "FormGeneration", "command") if t > evicted]
    frozen = os.stat(once).st_mtime
    assert evicted - frozen < TIMEOUT_S + 1.0
    assert reformed[0] - evicted < 1.0


def slow(ctx):
    """One rank holds the GIL, then takes long in forward, then in the body: each far beyond the timeout."""
    long_s = ctx.config["long_s"]
    model = classifier()

    def loss_fn(m, batch):
        step = ctx._session.place.step
        if ctx.rank == 1 and step == 5:
            ctypes.PyDLL(None).usleep(int(long_s * 1e6))  # PyDLL keeps the GIL
        if ctx.rank == 1 and step == 7:
            time.sleep(long_s)
        return cross_entropy(m, batch)

    for step in ctx.steps(model, adamw(model), loss_fn):
        if ctx.rank == 1 and step.number == 9:
            time.sleep(long_s)


def test_nobody_is_evicted_for_being_slow():
    made = spec(steps=14, virtual=3, workers=3, min_workers=3, config={"long_s": 2.5 * TIMEOUT_S})
    outcome, run = group(made, slow)
    assert outcome.error is None, outcome.traceback
    assert (outcome.generations, outcome.workers_lost) == (1, 0)
    assert not times(run, "EvictWorker", "command")
