"""How the coordinator scales: time per event, messages per change, memory per worker.

    python -m benchmarks.coordinator_scale [--workers 10 100 1000 10000]

A scripted life, without cluster or network: all start and become ready, heartbeats, a kill, a join,
a drain, scaling down and up. Times are of the processor, not the wall, and of each event the
shortest of three equal lives, so that a busy machine does not spoil them. As in the controller's
process, what was imported is kept from the garbage collector, which waits while an event is
handled; its longest collection is told apart, and walks through the messages that are under way
here, too. Prints a table and writes benchmarks/results/coordinator_scale.json. Ends with 1, and
says why, if an event took too long.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import tracemalloc
from collections import deque
from typing import Any

from benchmarks.report import exit_code
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Signature, TrainingPosition

RESULTS = pathlib.Path(__file__).parent / "results" / "coordinator_scale.json"
SIGNATURE = Signature("layout", "data", "kind")
LIVES = 3
TARGET_MS = 10.0


class Collections:
    """The longest of the garbage collector's."""

    def __init__(self) -> None:
        self.longest = 0.0

    def note(self, phase: str, _: object) -> None:
        if phase == "start":
            self.began = time.thread_time()
        else:
            self.longest = max(self.longest, time.thread_time() - self.began)


class Life:
    """Obedient workers: whatever the coordinator asks is done at once and reported."""

    def __init__(self, workers: int) -> None:
        self.coordinator = Coordinator(
            CoordinatorConfig(min_workers=1, size=workers, virtual_workers=2 * workers, standby=0)
        )
        self.now, self.step = 0.0, 0
        self.times: list[float] = []
        self.sent = 0
        self.changes: dict[str, tuple[int, slice]] = {}  # messages, and which events
        self.inbox: deque[m.Event] = deque()

    def tell(self, event: m.Event) -> None:
        gc.disable()
        began = time.thread_time()
        commands = self.coordinator.handle(event, self.now)
        self.times.append(time.thread_time() - began)
        gc.enable()
        self.obey(commands)

    def obey(self, commands: list[m.Command]) -> None:
        for command in commands:
            if isinstance(command, m.RenewLease | m.Explain):
                continue
            self.sent += 1
            match command:
                case m.StartWorker(worker=worker):
                    self.inbox.append(m.WorkerStarted(worker))
                case m.BeginTraining(worker=worker, is_source=is_source):
                    self.inbox.append(m.WorkerReady(worker, SIGNATURE, is_source))
                case m.ClaimGeneration(generation=generation):
                    self.inbox.append(m.GenerationClaimed(generation))
                case m.FindCheckpoint():
                    self.inbox.append(m.CheckpointFound(None))
                case m.FormGeneration(membership=membership):
                    self.sent += len(membership.members) - 1  # one for each member
                    generation = membership.generation
                    for member in membership.members:
                        heard = m.HeartbeatReceived(member.worker, generation, self.step, "compute")
                        self.inbox.append(heard)
                case m.AbortGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.EndGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.ReleaseWorker(worker=worker):
                    self.inbox.append(m.WorkerLost(worker, "left"))

    def stop(self, worker: str, generation: int) -> None:
        stopped = m.WorkerStopped(worker, generation, TrainingPosition(self.step), True, "asked")
        self.inbox.append(stopped)

    def settle(self) -> None:
        while self.inbox:
            self.tell(self.inbox.popleft())

    def members(self) -> list[str]:
        membership = self.coordinator.membership
        assert membership is not None
        return [member.worker for member in membership.members]

    def beat(self) -> None:
        """One interval: everybody is heard once, and made a step."""
        self.now += 1.0
        self.step += 1
        for worker in self.members():
            self.tell(
                m.HeartbeatReceived(worker, self.coordinator.generation, self.step, "compute")
            )
        self.settle()

    def run(self) -> None:
        def change(name: str, event: m.Event | None) -> None:
            self.sent, first = 0, len(self.times)
            if event is None:
                self.obey(self.coordinator.start(self.now))
            else:
                self.tell(event)
            self.settle()
            for _ in range(3):  # joins and releases follow with the next heartbeats
                self.beat()
            self.changes[name] = (self.sent, slice(first, len(self.times)))

        size = self.coordinator.size
        change("start", None)
        change("kill and join", m.WorkerLost(self.members()[size // 2], "killed"))
        change("drain", m.DrainNoticed(self.members()[-1], None))
        change("scale down", m.SizeRequested(size // 2))
        change("scale up", m.SizeRequested(size))
        assert len(self.members()) == size, (len(self.members()), size, self.coordinator.reason)


def measure(workers: int) -> dict[str, Any]:
    lives, collections = zip(*(live(workers) for _ in range(LIVES)), strict=True)
    shortest = [min(times) for times in zip(*(times for times, _ in lives), strict=True)]
    changes = {}
    for name, (messages, when) in lives[0][1].items():
        spent = sorted(shortest[when])
        changes[name] = {
            "events": len(spent),
            "messages": messages,
            "median_ms": 1e3 * statistics.median(spent),
            "p99_ms": 1e3 * spent[int(0.99 * (len(spent) - 1))],
            "max_ms": 1e3 * spent[-1],
            "total_ms": 1e3 * sum(spent),
        }
    return {
        "workers": workers,
        "bytes_per_worker": round(bytes_per_worker(workers)),
        "longest_collection_ms": 1e3 * min(collections),
        "changes": changes,
    }


def live(workers: int) -> tuple[tuple[list[float], dict[str, tuple[int, slice]]], float]:
    """((time of each event, what belongs to each change), the longest collection)"""
    gc.collect()
    collections, life = Collections(), Life(workers)
    gc.callbacks.append(collections.note)
    life.run()
    gc.callbacks.remove(collections.note)
    return (life.times, life.changes), collections.longest


def bytes_per_worker(workers: int) -> float:
    tracemalloc.start()
    life = Life(workers)
    life.obey(life.coordinator.start(0.0))
    life.settle()
    life.times.clear()
    life.inbox.clear()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / workers


def hardware() -> dict[str, object]:
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        f"{one['workers']} workers, {name}: {TARGET_MS:g} ms for an event": row["max_ms"]
        <= TARGET_MS
        for one in results
        for name, row in one["changes"].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator_scale")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10000])
    results = []
    gc.collect()
    gc.freeze()
    for workers in parser.parse_args().workers:
        result = measure(workers)
        results.append(result)
        for name, row in result["changes"].items():
            print(
                f"{workers:6d} {name:14s} {row['events']:8.0f} events {row['messages']:8.0f} "
                "messages"
                f"   ms: median {row['median_ms']:.4f} p99 {row['p99_ms']:.4f} max "
                f"{row['max_ms']:8.2f}"
                f" mean {row['total_ms'] / row['events']:.4f}"
            )
        print(
            f"{workers:6d} {result['bytes_per_worker']} bytes per worker,"
            f" longest collection {result['longest_collection_ms']:.2f} ms"
        )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    record = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps(record | hardware() | {"results": results}, indent=2) + "\n")
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
