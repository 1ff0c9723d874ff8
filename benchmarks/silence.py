"""Silent nodes: how soon one is found, and whether a loaded machine is ever taken for one.

    python -m benchmarks.silence [--minutes 10] [--silences 10] [--workers 2]

On plain processes, with the default timeouts. First every core is loaded eight-fold by processes
that only count, for so many minutes, while a group makes steps: nobody may be evicted, and the
longest silence between two heartbeats of a worker is reported. Then, without the load, workers fall
silent one by one, as if their nodes were gone: the worker and the process beside it that sends its
heartbeats are stopped (SIGSTOP). Measured is the time until each is evicted. Each half is written
when it is done, whatever becomes of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from benchmarks.recovery import Points, train
from benchmarks.report import write
from elastic_dp.config import FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import HeartbeatReceived, StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun

LOAD = 8  # processes a core
SPARE_S = 1.0  # a silent node is found this long after `heartbeat_timeout_s` at the latest
STEADY_S = 3.0
STEP_S = 0.02
SAY_S = 30.0
PARTS = ["loaded", "silent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--silences", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    halves = {
        "loaded": lambda: loaded(60 * options.minutes, options.workers),
        "silent": lambda: silent(options.silences, options.workers),
    }
    results: dict[str, Any] = {}
    for name in options.part:
        try:
            results[name] = halves[name]()
        except Exception as error:  # told, written, and the other half is measured all the same
            traceback.print_exc()
            results[name] = {"missed": f"{type(error).__name__}: {error}"}
        print(json.dumps({name: results[name]}, indent=2), flush=True)
        if not options.no_write:
            print(write("silence", results))
    if any(half["missed"] for half in results.values()):
        sys.exit("missed")


def job(workers: int) -> JobSpec:
    return JobSpec(
        name="silence",
        data=MapStyleData(Points(), micro_batch_size=8),
        config={"folder": None, "body_s": STEP_S},
        scaling=ScalingConfig(max_workers=workers, threads_per_worker=1),
        max_steps=10_000_000,
    )


def loaded(seconds: float, workers: int) -> dict[str, Any]:
    """What happens to a group on a machine that has eight times as much to do as it can."""
    gaps: dict[str, float] = {}
    with ProcessRun(job(workers), train) as run:
        wait_full(run, workers)
        listen(run, gaps)
        first, lost = run.controller.status()["step"], len(evictions(run))
        with counting(LOAD * (os.cpu_count() or 1)):
            until = time.monotonic() + seconds
            while (left_s := until - time.monotonic()) > 0:
                time.sleep(min(SAY_S, left_s))
                steps, evicted = run.controller.status()["step"] - first, len(evictions(run)) - lost
                print(
                    (
                        f"{left_s:4.0f} s left, {steps} steps, {evicted} evicted, longest "
                        f"silence {max(gaps.values()):.2f} s"
                    ),
                    flush=True,
                )
        run.controller.post(StopRequested("measured"))
        run.wait(120)
    return {
        "seconds": seconds,
        "processes_beside": LOAD * (os.cpu_count() or 1),
        "steps": steps,
        "evicted": evicted,
        "missed": evicted > 0,
        "longest_silence_s": round(max(gaps.values()), 3),
        "timeout_s": FailureConfig().heartbeat_timeout_s,
    }


def silent(times: int, workers: int) -> dict[str, Any]:
    """How long a worker whose node is gone is taken for alive."""
    found, rng = [], random.Random(0)
    with ProcessRun(job(workers), train) as run:
        for _ in range(times):
            wait_full(run, workers)
            time.sleep(STEADY_S * rng.uniform(0.5, 1.0))
            found.append(silence(run, rng.choice(run.controller.coordinator.membership.members)[0]))  # type: ignore[union-attr]
        run.controller.post(StopRequested("measured"))
        run.wait(120)
    limit = FailureConfig().heartbeat_timeout_s + SPARE_S
    return {
        "found_after_s": [round(s, 3) for s in found],
        "median_s": round(statistics.median(found), 3),
        "limit_s": limit,
        "missed": max(found) > limit,
    }


# ------------------------------------------------------------------------------------------------
# parts


def silence(run: ProcessRun, worker: str, timeout_s: float = 60.0) -> float:
    """Stop it and its sidecar at once; seconds until it is evicted."""
    pid = run.worker_group.processes[worker].pid
    assert pid is not None
    sidecars = children(pid)
    for one in (*sidecars, pid):
        os.kill(one, signal.SIGSTOP)
    began, at = time.time(), list[float]()
    while time.time() < began + timeout_s and not at:
        time.sleep(0.01)
        at = [line["time"] for line in evictions(run) if line["worker"] == worker]
    for one in sidecars:
        os.kill(one, signal.SIGKILL)
    if at:
        return at[0] - began
    raise TimeoutError(f"{worker} is silent and was not evicted: {run.controller.status()}")


def children(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
        if parent == pid:
            found.append(int(name))
    return found


def evictions(run: ProcessRun) -> list[dict[str, Any]]:
    kept = list(run.journal._kept)  # a copy, made in one go
    return [line for *_, line in kept if line.get("command") == "EvictWorker"]


def wait_full(run: ProcessRun, workers: int, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while True:
        status = run.controller.status()
        if (status["world_size"], status["phase"]) == (workers, "running") and status["step"]:
            return
        assert time.monotonic() < until, status
        time.sleep(0.02)


def listen(run: ProcessRun, gaps: dict[str, float]) -> None:
    """Keep each worker's longest silence, as the controller hears it."""
    heartbeats, heard_at = run.controller.heartbeats, dict[str, float]()
    post = heartbeats._heard

    def heard(event: Any) -> None:
        if isinstance(event, HeartbeatReceived):
            now = time.monotonic()
            gap = now - heard_at.get(event.worker, now)
            gaps[event.worker] = max(gaps.get(event.worker, 0.0), gap)
            heard_at[event.worker] = now
        post(event)

    heartbeats._heard = heard


@contextlib.contextmanager
def counting(processes: int) -> Iterator[None]:
    """So many processes beside, that only count."""
    burners = [
        multiprocessing.Process(target=count, args=(os.getpid(),), daemon=True)
        for _ in range(processes)
    ]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()


def count(parent: int) -> None:
    while os.getppid() == parent:
        pass


if __name__ == "__main__":
    main()
