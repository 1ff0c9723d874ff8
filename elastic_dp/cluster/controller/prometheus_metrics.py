"""The metrics of a run for Prometheus: the one table of their names, and their values.

`PrometheusMetrics.sample` computes them every few seconds from what the controller knows anyway, so
neither a step nor an event waits for it. Every metric has the label `run`; another label has only
the values that the table lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_dp.coordinator.workers.worker_state import Stage
from elastic_dp.telemetry.goodput import Goodput
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.phase_clock import PhaseTimes


@dataclass(frozen=True, slots=True)
class MetricKind:
    """One metric. Ray puts `ray_` before its name. `values` are those of its label, if it has one;
    `bounds` makes it a histogram.
    """

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


PARTS = ("data", "compute", "collective", "other", "checkpoint")
CAUSES = ("loss", "planned")
PROCESSES = ("controller", "workers")
_CATEGORIES = tuple(asdict(Goodput()))
_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

METRICS = (
    MetricKind("elastic_dp_running", "1 while the run goes on, 0 after its end"),
    MetricKind("elastic_dp_step", "last committed step"),
    MetricKind("elastic_dp_loss", "newest `loss` that `ctx.log` recorded"),
    MetricKind("elastic_dp_rows_per_second", "rows of committed steps"),
    MetricKind(
        "elastic_dp_step_part_seconds", "mean time of a worker for a step, by part", "part", PARTS
    ),
    MetricKind("elastic_dp_world_size", "workers in the generation"),
    MetricKind("elastic_dp_wanted_workers", "workers that the run wants"),
    MetricKind("elastic_dp_generation", "number of the generation"),
    MetricKind("elastic_dp_workers", "workers by stage", "stage", tuple(Stage)),
    MetricKind(
        "elastic_dp_pause_seconds",
        "mean pause of a worker at a change of the group, by cause",
        "cause",
        CAUSES,
        _BOUNDS,
    ),
    MetricKind(
        "elastic_dp_goodput_seconds",
        "worker-seconds since the start of the run, by category",
        "category",
        _CATEGORIES,
    ),
    MetricKind("elastic_dp_checkpoint_age_seconds", "time since the last checkpoint was committed"),
    MetricKind(
        "elastic_dp_checkpoint_duration_seconds",
        "time from the snapshot of the last checkpoint to its commit",
    ),
    MetricKind(
        "elastic_dp_store_retries",
        "requests to stores that were retried, by who did",
        "process",
        PROCESSES,
    ),
)

_KIND = {kind.name: kind for kind in METRICS}


class PrometheusMetrics:
    """The metrics of one run."""

    def __init__(self, journal: Journal, stored: bool) -> None:
        self._stored = stored  # only a run with a folder has checkpoints
        self._was_lost = False  # since the last generation
        self._generation = 0
        self._paused_s = 0.0  # of all workers, when that generation was sampled for the first time
        self._before: tuple[float, int, PhaseTimes] | None = None  # time, step, times
        journal.listen(self._line)

    def sample(
        self,
        now: float,
        status: Mapping[str, Any],
        goodput: Goodput,
        times: PhaseTimes,
        retries: Mapping[str, int],
        sink: Callable[[MetricKind, float, str], None],
    ) -> None:
        """Pass the values at `now` (of `time.time`) to `sink`, with their label. `status` is the
        controller's."""

        def put(name: str, value: float, label: str = "") -> None:
            if math.isfinite(value):
                sink(_KIND[name], value, label)

        step, size = int(status["step"]), int(status["world_size"])
        put("elastic_dp_running", float(status["phase"] != "over"))
        put("elastic_dp_step", step)
        put("elastic_dp_world_size", size)
        put("elastic_dp_wanted_workers", status["size"])
        put("elastic_dp_generation", status["generation"])
        if status["rows_per_s"] is not None:
            put("elastic_dp_rows_per_second", status["rows_per_s"])
        for process, number in retries.items():
            put("elastic_dp_store_retries", number, process)
        loss = status["metrics"].get("loss")
        if isinstance(loss, int | float):
            put("elastic_dp_loss", loss)
        stages = list(status["workers"].values())
        for stage in Stage:
            put("elastic_dp_workers", stages.count(stage.value), stage.value)
        for category, seconds in asdict(goodput).items():
            put("elastic_dp_goodput_seconds", seconds, category)
        if self._stored:
            newest = status["newest_checkpoint"] or {}
            age_s = newest.get("age_s")
            put("elastic_dp_checkpoint_age_seconds", status["led_s"] if age_s is None else age_s)
            put("elastic_dp_checkpoint_duration_seconds", newest.get("duration_s") or math.nan)
        if status["phase"] == "running" and status["generation"] > self._generation:
            self._changed(int(status["generation"]), size, times, put)
        if self._before is not None:
            self._steps(now, step, times, put)
        self._before = now, step, times

    # ------------------------------------------------------------------------------ private

    def _steps(self, now: float, step: int, times: PhaseTimes, put: Any) -> None:
        """What has been done since the last sample."""
        assert self._before is not None
        then, before, spent = self._before
        delta = times.plus(spent, -1)
        done = sum((delta.data, delta.compute, delta.collective, delta.other))
        if step > before and done > 0:
            # The wall time of a step, divided by what members did meanwhile.
            workers = max(1.0, (done + delta.checkpoint + delta.pause) / max(now - then, 1e-3))
            for part in PARTS:
                seconds = getattr(delta, part) / workers / (step - before)
                put("elastic_dp_step_part_seconds", seconds, part)

    def _changed(self, generation: int, size: int, times: PhaseTimes, put: Any) -> None:
        """Another generation runs. The first one is the start, and no pause."""
        if self._generation and size:
            paused = max(0.0, times.pause - self._paused_s) / size
            put("elastic_dp_pause_seconds", paused, "loss" if self._was_lost else "planned")
        self._generation, self._paused_s = generation, times.pause
        self._was_lost = False

    def _line(self, line: Mapping[str, Any]) -> None:
        """Take a line of the journal; called by the thread that wrote it."""
        self._was_lost |= line.get("command") == "AbortGeneration"
