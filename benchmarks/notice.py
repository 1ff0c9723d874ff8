"""What a notice of 30 seconds costs, beside a planned leave: how long the group stands still, and
when a replacement is asked for.

    python -m benchmarks.notice [--times 15] [--workers 3]

On plain processes, in turn: an operator asks for one worker less ("leave"), and for it again; the
node of a member will go in 30 s ("notice"), and another takes its place. A pause lasts from the
last body of the generation that ends to the first body of the next one, less one median step; it is
the longest of all members that saw both. A notice also lets the replacement in, so its pause holds
a copy of the (small) state, too; "join" is what that costs alone. No step may be made twice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks.recovery import Points, Record, summary, train
from benchmarks.report import write
from benchmarks.silence import wait_full
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested, StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun

NOTICE_S = 30.0
ASKED_S = 1.0  # a replacement is asked for this long after the notice at the latest
STEADY_S = 0.5
STEP_S = 0.01


def measure(times: int, workers: int, folder: str) -> dict[str, Any]:
    spec = JobSpec(
        name="notice",
        data=MapStyleData(Points(), micro_batch_size=8),
        config={"folder": folder, "body_s": STEP_S},
        scaling=ScalingConfig(
            min_workers=1, max_workers=workers, virtual_workers=8, threads_per_worker=1
        ),
        max_steps=10_000_000,
    )
    changes: list[tuple[str, int]] = []  # why, and the generation that it ended
    rng = random.Random(0)
    with ProcessRun(spec, train) as run:
        for _ in range(times):
            for kind, size in (("leave", workers - 1), ("join", workers), ("notice", workers)):
                wait_full(run, workers if kind != "join" else workers - 1)
                time.sleep(STEADY_S)
                membership = run.controller.coordinator.membership
                assert membership is not None
                changes.append((kind, membership.generation))
                victim = rng.choice(membership.members).worker
                if kind == "notice":
                    run.controller.post(DrainNoticed(victim, time.monotonic() + NOTICE_S))
                else:
                    run.controller.post(SizeRequested(size))
                while run.controller.status()["generation"] == membership.generation:
                    time.sleep(0.01)
        wait_full(run, workers)
        run.controller.post(StopRequested("measured"))
        outcome = run.wait()
        lines = [line for *_, line in run.journal._kept]
    return judge(Record.read(folder), changes, lines) | {"workers_lost": outcome.workers_lost}


def judge(
    record: Record, changes: list[tuple[str, int]], lines: list[dict[str, Any]]
) -> dict[str, Any]:
    step_s = statistics.median(record.step_times())
    pauses: dict[str, list[float]] = {}
    for kind, generation in changes:
        pauses.setdefault(kind, []).append(1000 * max(0.0, pause(record, generation) - step_s))
    stops = [line for line in lines if line.get("event") == "WorkerStopped"]
    places: dict[int, set[Any]] = {}
    for line in stops:
        places.setdefault(line["generation"], set()).add(line["place"])
    redone = sum(len(places.get(generation, ())) > 1 for _, generation in changes)
    asked = asked_after(lines)
    found: dict[str, Any] = {kind: summary(values) for kind, values in pauses.items()}
    return found | {
        "step_ms": round(1000 * step_s, 2),
        "notice / leave": round(
            statistics.median(pauses["notice"]) / max(1.0, statistics.median(pauses["leave"])), 2
        ),
        "steps_redone": redone,
        "asked_after_s": {"most": round(max(asked), 3), "target": ASKED_S},
        "missed": redone > 0 or max(asked) > ASKED_S,
    }


def pause(record: Record, generation: int) -> float:
    """Return the pause of the members that were there before and after."""
    last: dict[str, float] = {}
    longest = 0.0
    for body in record.bodies:  # by time
        if body.generation <= generation:
            last[body.worker] = body.time
        elif body.worker in last:
            longest = max(longest, body.time - last.pop(body.worker))
        if body.generation > generation + 1:
            break
    return longest


def asked_after(lines: list[dict[str, Any]]) -> list[float]:
    """From each notice to the next start of a worker."""
    noticed = [line["time"] for line in lines if line.get("event") == "DrainNoticed"]
    started = [line["time"] for line in lines if line.get("command") == "StartWorker"]
    return [min(at for at in started if at >= notice) - notice for notice in noticed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.times, options.workers, folder)
    print(json.dumps(results, indent=2))
    if not options.no_write:
        print(write("notice", results))
    if results["missed"]:
        sys.exit("missed")


if __name__ == "__main__":
    main()
