"""Frozen and slow are told apart: a stopped process is left behind, a slow one is waited for.

At the real lengths: 20 s frozen, 20 s with the interpreter's lock, 60 s in forward (as a compiler takes), 60 s in
the loop's body, under the default timeouts. The groups only wait, so they run side by side.
"""

import ctypes
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from elastic_dp.spec import FailureConfig
from elastic_dp.train.faults import Fault
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, plain

FROZEN_S = 20.0
SLOW_S = {"lock": 20.0, "forward": 60.0, "body": 60.0}


def spec(**options):
    made = spec_of(**options)
    object.__setattr__(made, "failure", FailureConfig())
    return made


def times(run, name, key="event"):
    return [line["time"] for _, line in run.journal._kept if line.get(key) == name]


def slow(ctx):
    """Rank 1 is slow once: it holds the GIL, or takes long in forward, or in the body."""
    where = ctx.config["where"]
    model = classifier()

    def loss_fn(m, batch):
        if ctx.rank == 1 and ctx._session.place.step == 5 and ctx.generation:
            if where == "lock":
                ctypes.PyDLL(None).usleep(int(SLOW_S[where] * 1e6))  # PyDLL keeps the GIL
            elif where == "forward":
                time.sleep(SLOW_S[where])
        return cross_entropy(m, batch)

    for step in ctx.steps(model, adamw(model), loss_fn):
        if where == "body" and ctx.rank == 1 and step.number == 5:
            time.sleep(SLOW_S[where])


def one_is_slow(where):
    made = spec(steps=8, virtual=3, workers=3, min_workers=3, config={"where": where})
    began = time.monotonic()
    outcome, run = group(made, slow, timeout_s=150.0)
    return outcome, run, time.monotonic() - began


def one_is_frozen(path):
    """Rank 1 is stopped within a step, and goes on 20 s later, when the others are far ahead."""
    faults = (Fault("exchange", rank=1, world_size=3, settled=True, action="freeze", once=path),)

    def thaw(run):
        lines = [line for _, line in run.journal._kept]
        victim = next(x["worker"] for x in lines if x.get("command") == "EvictWorker")
        process = run.fleet.processes[victim]
        time.sleep(max(0.0, os.stat(path).st_mtime + FROZEN_S - time.time()))
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
        process.join(10)
        return process.exitcode

    codes = []
    made = spec(steps=150, config={"hold": {3: 3}, "body_s": 0.2}, min_workers=1)
    script = [(40, lambda run: codes.append(thaw(run)))]
    outcome, run = group(made, plain, faults=faults, script=script, timeout_s=150.0)
    return outcome, run, made, codes


def test_frozen_and_slow_are_told_apart(tmp_path):
    path = str(tmp_path / "frozen")
    with ThreadPoolExecutor() as pool:
        frozen = pool.submit(one_is_frozen, path)
        slow_ones = {where: pool.submit(one_is_slow, where) for where in SLOW_S}

    for where, future in slow_ones.items():  # nobody was evicted
        outcome, run, took = future.result()
        assert outcome.error is None, outcome.traceback
        assert took > SLOW_S[where]
        assert (outcome.generations, outcome.workers_lost) == (1, 0), where
        assert not times(run, "EvictWorker", "command")

    outcome, run, made, codes = frozen.result()
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(made, plain).digest  # what thawed changed nothing
    assert codes[0] not in (None, 0)  # it is gone, and did not finish anything
    evicted = times(run, "EvictWorker", "command")[0]
    reformed = [t for t in times(run, "FormGeneration", "command") if t > evicted]
    assert evicted - os.stat(path).st_mtime < FailureConfig().heartbeat_timeout_s + 1.0
    assert reformed[0] - evicted < 1.0
