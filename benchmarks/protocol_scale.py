"""How the coordinator scales: time per event, messages per change, memory per worker.

    python -m benchmarks.protocol_scale [--workers 10 100 1000 10000]

Times are of the processor, not the wall, so that a busy machine does not spoil them.
A scripted life, without cluster or network: all start and become ready, heartbeats, a kill, a join, a drain,
scaling down and up. Prints a table and writes benchmarks/results/protocol_scale.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time
import tracemalloc
from collections import deque

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.coordinator import Coordinator
from elastic_dp.protocol.messages import Place, Signature
from elastic_dp.protocol.rules import Rules

RESULTS = pathlib.Path(__file__).parent / "results" / "protocol_scale.json"
SIGNATURE = Signature("layout", "data", "kind")


class Life:
    """Obedient workers: whatever the coordinator asks is done at once and reported."""

    def __init__(self, workers: int) -> None:
        self.coordinator = Coordinator(
            Rules(min_workers=1, size=workers, virtual_workers=2 * workers, standby=0)
        )
        self.now, self.step = 0.0, 0
        self.times: list[float] = []
        self.sent = 0
        self.inbox: deque[m.Event] = deque()

    def tell(self, event: m.Event) -> None:
        began = time.thread_time()
        commands = self.coordinator.handle(event, self.now)
        self.times.append(time.thread_time() - began)
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
                case m.FormGeneration(worker=worker, membership=membership):
                    heard = m.WorkerHeard(worker, membership.generation, self.step, "compute")
                    self.inbox.append(heard)
                case m.AbortGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.EndGeneration(worker=worker, generation=generation):
                    self.stop(worker, generation)
                case m.ReleaseWorker(worker=worker):
                    self.inbox.append(m.WorkerLost(worker, "left"))

    def stop(self, worker: str, generation: int) -> None:
        stopped = m.WorkerStopped(worker, generation, Place(self.step), True, "asked")
        self.inbox.append(stopped)

    def settle(self) -> None:
        while self.inbox:
            self.tell(self.inbox.popleft())

    def members(self) -> list[str]:
        membership = self.coordinator.membership
        assert membership is not None
        return [seat.worker for seat in membership.seats]

    def beat(self) -> None:
        """One interval: everybody is heard once, and made a step."""
        self.now += 1.0
        self.step += 1
        for worker in self.members():
            self.tell(m.WorkerHeard(worker, self.coordinator.generation, self.step, "compute"))
        self.settle()

    def run(self) -> dict[str, dict[str, float]]:
        def change(name: str, event: m.Event | None) -> None:
            self.sent, first = 0, len(self.times)
            if event is None:
                self.obey(self.coordinator.start(self.now))
            else:
                self.tell(event)
            self.settle()
            for _ in range(3):  # joins and releases follow with the next heartbeats
                self.beat()
            spent = sorted(self.times[first:])
            report[name] = {
                "events": len(spent),
                "messages": self.sent,
                "median_ms": 1e3 * statistics.median(spent),
                "p99_ms": 1e3 * spent[int(0.99 * (len(spent) - 1))],
                "max_ms": 1e3 * spent[-1],
                "total_ms": 1e3 * sum(spent),
            }

        report: dict[str, dict[str, float]] = {}
        size = self.coordinator.size
        change("start", None)
        change("kill and join", m.WorkerLost(self.members()[size // 2], "killed"))
        change("drain", m.DrainNoticed(self.members()[-1], None))
        change("scale down", m.SizeRequested(size // 2))
        change("scale up", m.SizeRequested(size))
        assert len(self.members()) == size, (len(self.members()), size, self.coordinator.reason)
        return report


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.protocol_scale")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000, 10000])
    results = []
    for workers in parser.parse_args().workers:
        changes = Life(workers).run()
        memory = bytes_per_worker(workers)
        results.append({"workers": workers, "bytes_per_worker": round(memory), "changes": changes})
        for name, row in changes.items():
            print(
                f"{workers:6d} {name:14s} {row['events']:8.0f} events {row['messages']:8.0f} messages"
                f"   ms: median {row['median_ms']:.4f} p99 {row['p99_ms']:.4f} max {row['max_ms']:8.2f}"
                f" mean {row['total_ms'] / row['events']:.4f}"
            )
        print(f"{workers:6d} {memory:.0f} bytes per worker")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    record = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    RESULTS.write_text(json.dumps(record | hardware() | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
