"""What telemetry costs a step: the same GPT in the same two workers, with all of it and without, in
turn.

    python -m benchmarks.telemetry_overhead [--pairs 60] [--times 10] [--quick]

All of it: `ctx.log` of three metrics in each step, the journal in the run's folder, TensorBoard,
the times of each worker by phase in the memory that it shares with its heartbeat sidecar, goodput,
and the metrics of the run every two seconds. Without: none of these; heartbeats go on, since a loss
is noticed by them. The handover to Ray's own agent is not part of it, nor is a page that somebody
has open.

What telemetry costs is less than what two blocks of the same steps differ by. So all of it is done
`--times` as often: ten times as many calls of `ctx.log`, ten clocks of phases, reports heard ten
times, metrics every 0.2 s. What that costs is more than what telemetry costs, and it is not divided
by ten, since a message with ten records costs less than ten messages.

A pair is one block of steps with it and one without, in random order. Quoted: the median of the
paired ratios of a block's mean time for a step, on rank 0. The controller and the logger
share the cores of the workers. Beside it stands what telemetry adds to the processor time of a step
in each process: the median of the paired differences, which a busy machine changes less. Ends with
1, and says why, if the target was missed.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.report import conclude, median_interval, of_pairs
from elastic_dp.cluster.controller import run_times
from elastic_dp.cluster.controller.prometheus_metrics import MetricKind, PrometheusMetrics
from elastic_dp.cluster.heartbeat import heartbeat_sidecar
from elastic_dp.cluster.logger_threads import LoggerThreads
from elastic_dp.cluster.metrics_exporter import INTERVAL_S
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.integrations.tensorboard import TensorBoardLogger
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.phase_clock import PhaseClock
from elastic_dp.testing.process_worker_group import ProcessRun

TARGET = 1.005
WORKERS, ROWS = 2, 8
WALL = "wall"
WARM_UP, SETTLE = 10, 3  # steps: at the start, and at the start of each block


class Switch:
    """A byte that all processes share: whether telemetry is on."""

    def __init__(self, folder: str) -> None:
        path = Path(folder, "switch")
        if not path.exists():
            path.write_bytes(b"\1")
        with open(path, "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    def turn(self, on: bool) -> None:
        self._byte[0] = on

    @property
    def on(self) -> bool:
        return bool(self._byte[0])


class CpuClocks:
    """The processor time of processes, by the name of what each is, read by any process (Linux)."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._clocks: dict[str, int] = {}

    def add(self, what: str) -> None:
        """Name this process."""
        path = self._folder / f"{what}.pid"
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)

    def read(self) -> dict[str, float]:
        """Return the seconds of each process that has a name."""
        if not self._clocks:
            pids = {path.stem: int(path.read_text()) for path in self._folder.glob("*.pid")}
            # As clock_getcpuclockid(3) does.
            self._clocks = {what: ~pid << 3 | 2 for what, pid in pids.items()}
        return {what: time.clock_gettime(clock) for what, clock in self._clocks.items()}


class NoClock:
    """Replaces the clock of a worker's phases and measures nothing."""

    def enter(self, phase: str, now: float) -> bool:
        return False


class ManyClocks:
    """Replaces the clock of a worker's phases by `times` clocks, each of which is shown on the
    page."""

    def __init__(self, page: Any, times: int) -> None:
        self._page, self._shown = page._page, page._clock
        self._others = [PhaseClock() for _ in range(times - 1)]

    def enter(self, phase: str, now: float) -> bool:
        for clock in self._others:
            if clock.enter(phase, now):
                heartbeat_sidecar.write_times(self._page, clock.state)
        return self._shown.enter(phase, now)

    @property
    def state(self) -> tuple[float, ...]:
        return self._shown.state


def order(pairs: int) -> list[bool]:
    """Return whether telemetry is on in each block."""
    rng = random.Random(0)
    return [on for _ in range(pairs) for on in rng.sample((True, False), 2)]


def train(ctx: Any) -> None:
    torch.manual_seed(1)
    model = models.GPT(*models.SIZES[ctx.config["size"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    switch, blocks = Switch(ctx.config["folder"]), order(ctx.config["pairs"])
    page, steps = ctx._session.status, ctx.config["steps"] + SETTLE
    times = ctx.config["times"]
    clock = ManyClocks(page, times)
    clocks = CpuClocks(ctx.config["folder"])
    found: list[dict[str, float]] = []
    began: dict[str, float] = {}
    for step in ctx.steps(model, optimizer, models.loss_fn):
        if step.number == 1:
            clocks.add(f"worker {ctx.rank}")
        block, at = divmod(step.number - WARM_UP, steps)
        if block >= 0 and at == 0:
            if block:
                found.append(
                    {what: (now - began[what]) / ctx.config["steps"] for what, now in spent(clocks)}
                )
            if block == len(blocks):
                ctx.stop("measured")
                continue
            page._clock = clock if blocks[block] else NoClock()
            if ctx.rank == 0:
                switch.turn(blocks[block])
        if at == SETTLE:
            began = dict(spent(clocks))
        loss = step.loss
        if block < 0 or blocks[min(block, len(blocks) - 1)]:
            for _ in range(times):
                ctx.log({"loss": loss, "rows": float(step.number), "world": float(ctx.world_size)})
    if ctx.rank == 0:
        Path(ctx.config["folder"], "blocks.json").write_text(json.dumps(found))


def spent(clocks: CpuClocks) -> Iterable[tuple[str, float]]:
    """Return the time on the wall and the processor time of each process, in seconds."""
    yield WALL, time.perf_counter()
    yield from clocks.read().items()


class Kept:
    """Keeps the newest value of each metric. A `prometheus_metrics.Sink`."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def put(self, kind: MetricKind, value: float, label: str) -> None:
        self.values[kind.name, label] = value


def sample_metrics(
    run: ProcessRun, spec: JobSpec, switch: Switch, times: int
) -> Callable[[], None]:
    """Sample the metrics of the run as its exporter does, but `times` as often, until the function
    that is returned is called."""
    controller, sink, over = run.controller, Kept(), threading.Event()
    metrics = PrometheusMetrics(spec, run.journal, time.time(), stored=True)

    def work() -> None:
        while not over.wait(INTERVAL_S / times):
            if switch.on:
                goodput, phases = controller.times.goodput(), controller.times.times()
                retries = controller.store_retries
                status, cache = controller.status(), controller.times.cache()
                metrics.sample(time.time(), status, goodput, phases, retries, cache, sink)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()
        assert sink.values or not switch.on, "nothing was sampled"

    return end


def hear_reports(run: ProcessRun, switch: Switch, times: int) -> None:
    """Let the controller take each report of a worker `times` times, or not at all."""
    taken, run_times.INTERVAL_S = run.controller.times, run_times.INTERVAL_S / times
    heard = taken.heard

    def hear(event: Any) -> None:
        for _ in range(times if switch.on else 0):
            heard(event)

    taken.heard = hear  # type: ignore[method-assign]


def blocks_of(size: str, pairs: int, steps: int, times: int) -> tuple[list[dict[str, float]], int]:
    """Return what a step took in each block, on average, and how many calls of `ctx.log` were
    recorded."""
    with tempfile.TemporaryDirectory() as folder:
        CpuClocks(folder).add("controller")
        url, switch = f"{folder}/run", Switch(folder)
        spec = JobSpec(
            name="telemetry",
            data=MapStyleData(models.Text(100_000), micro_batch_size=ROWS),
            config={
                "folder": folder,
                "size": size,
                "pairs": pairs,
                "steps": steps,
                "times": times,
            },
            scaling=ScalingConfig(
                min_workers=WORKERS,
                max_workers=WORKERS,
                virtual_workers=WORKERS,
                threads_per_worker=1,
            ),
            max_steps=1_000_000,
        )
        journal = Journal(url)
        loggers = LoggerThreads([TensorBoardLogger(f"{folder}/board")], "telemetry", url)
        with ProcessRun(spec, train, journal=journal, url=url) as run:
            journal.listen(loggers.put)
            hear_reports(run, switch, times)
            end = sample_metrics(run, spec, switch, times)
            outcome = run.wait(3600.0)
            end()
        loggers.close()
        journal.close()
        assert outcome.error is None, outcome.error
        lines = len(Path(url, "metrics.jsonl").read_text().splitlines())
        return json.loads(Path(folder, "blocks.json").read_text()), lines


def measure(size: str, pairs: int, steps: int, times: int) -> dict[str, Any]:
    blocks, lines = blocks_of(size, pairs, steps, times)
    assert lines == times * (WARM_UP - 1 + pairs * (steps + SETTLE)), lines  # none without
    both = [*zip(blocks, order(pairs), strict=True)]
    on = [block for block, is_on in both if is_on]
    off = [block for block, is_on in both if not is_on]
    ratio, low, high = median_interval([a[WALL] / b[WALL] for a, b in zip(on, off, strict=True)])
    return {
        "parameters": size,
        "workers": WORKERS,
        "with_ms": round(1e3 * statistics.median(block[WALL] for block in on), 2),
        "without_ms": round(1e3 * statistics.median(block[WALL] for block in off), 2),
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "added_cpu_us": added_cpu_us(on, off),
        "pairs": pairs,
        "steps_a_block": steps,
        "times": times,
    }


def added_cpu_us(on: list[dict[str, float]], off: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the processor time that telemetry adds to a step, in microseconds: the median of the
    paired differences with its interval, for each process and for all of them.
    """
    processes = sorted({*on[0]} - {WALL})
    pairs = [[a[one] - b[one] for one in processes] for a, b in zip(on, off, strict=True)]
    each = {one: [pair[i] for pair in pairs] for i, one in enumerate(processes)}
    each["all"] = [sum(pair) for pair in pairs]
    return {one: [round(1e6 * x, 1) for x in median_interval(us)] for one, us in each.items()}


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Met is what is below beyond doubt: with all of its interval."""
    return {
        f"{one['parameters']}: {TARGET} of a step without telemetry": one["interval"][1] <= TARGET
        for one in results
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["0.9M"], arguments, steps=25, times=10)
    if options.quick:
        options.pairs, options.steps, options.times = 2, 3, 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured = (
        measure(size, options.pairs, options.steps, options.times) for size in options.sizes
    )
    return conclude("telemetry_overhead", options, measured, targets)


if __name__ == "__main__":
    sys.exit(main())
