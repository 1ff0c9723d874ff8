"""A run in one line: its health, and the few numbers that an operator looks at first.

An overview is made of the report of a run's folder, or of the status that its controller returns.
Ages are seconds, so that it does not matter how far the clocks of two machines differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from elastic_dp.report.report_model import Report, RunPhase
from elastic_dp.report.verdict import concerns, workers_train
from elastic_dp.telemetry.data_rates import CacheBytes


class Health(StrEnum):
    """What an operator has to know first."""

    HEALTHY = "healthy"
    STARTING = "starting"  # no worker has trained yet
    CONCERN = "needs a look"
    SILENT = "silent"  # not ended, but nothing was written for a while
    FINISHED = "finished"
    FAILED = "failed"
    UNKNOWN = "unknown"  # its controller or its folder does not answer


@dataclass(frozen=True, slots=True)
class RunOverview:
    """One line of `elastic-dp status`. None: not known.

    `world_size` and `size` are the workers in the generation and those wanted. `total_steps` is
    where the run ends, if a number of steps was set.
    """

    name: str
    health: Health
    health_reason: str
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    world_size: int = 0
    size: int = 0
    generation: int = 0
    goodput: float | None = None
    rows_per_s: float | None = None
    cache: CacheBytes = field(default_factory=CacheBytes)
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    last_event: str = ""
    last_event_age_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self.health in (Health.FINISHED, Health.FAILED)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. What is no finite number becomes None."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, float) and not math.isfinite(value):
                found[name] = None
        return found | {"health": self.health.value}


def overview_of_report(report: Report, now: float, total_steps: int | None = None) -> RunOverview:
    """Return the overview of what a run's folder holds, at `now` (of `time.time`)."""
    losses = [point for point in report.curves.get("loss", ()) if point.counts]
    loss = None if not losses else math.nan if losses[-1].value is None else losses[-1].value
    newest = max(report.checkpoints, key=lambda row: row.step, default=None)
    text, at = _newest_text(report)
    health, reason = _health_of_report(report, loss)
    return RunOverview(
        name=report.name,
        health=health,
        health_reason=reason,
        step=report.step,
        total_steps=total_steps,
        loss=loss,
        world_size=report.present,
        size=report.wanted,
        generation=report.generation,
        goodput=report.goodput.fraction if report.goodput.total else None,
        rows_per_s=report.rows_per_s,
        cache=report.cache,
        checkpoint_step=None if newest is None else newest.step,
        checkpoint_age_s=_age(now, None if newest is None else newest.time),
        last_event=text,
        last_event_age_s=_age(now, at),
    )


def overview_of_status(name: str, status: Mapping[str, Any]) -> RunOverview:
    """Return the overview of a live run, of the status that `Run.status` returns."""
    logged = status.get("metrics", {}).get("loss")
    is_number = isinstance(logged, int | float) and not isinstance(logged, bool)
    loss = float(logged) if is_number else None
    checkpoint, event = status.get("newest_checkpoint") or {}, status.get("newest_event") or {}
    health, reason = _health_of_status(status, loss)
    return RunOverview(
        name=name,
        health=health,
        health_reason=reason,
        step=int(status.get("step", 0)),
        total_steps=status.get("max_steps"),
        loss=loss,
        world_size=int(status.get("world_size", 0)),
        size=int(status.get("size", 0)),
        generation=int(status.get("generation", 0)),
        goodput=status.get("goodput"),
        rows_per_s=status.get("rows_per_s"),
        cache=CacheBytes(**status.get("cache", {})),
        checkpoint_step=checkpoint.get("step"),
        checkpoint_age_s=checkpoint.get("age_s"),
        last_event=str(event.get("text") or status.get("reason", "")),
        last_event_age_s=event.get("age_s"),
    )


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else max(0.0, now - at)


def _newest_text(report: Report) -> tuple[str, float | None]:
    """The newest decision or, of an ended run, its end."""
    if report.is_over:
        return f"{report.phase} after step {report.step}: {report.reason}", report.last_line
    for newest in (report.decisions[-1:], report.events[-1:]):
        if newest:
            return newest[0].text, newest[0].time
    return "", None


def _health_of_report(report: Report, loss: float | None) -> tuple[Health, str]:
    if report.is_over:
        return Health(report.phase.value), report.reason
    if report.phase is RunPhase.SILENT:
        return Health.SILENT, "its cluster may be gone, or it waits for nodes"
    if not report.starts and report.step:  # in one process, which has no group
        return Health.HEALTHY, "it trains in one process"
    if not report.starts or not report.generation:
        return Health.STARTING, report.reason
    return _health(report.present, report.wanted, loss, report.led_s, report.goodput.fraction)


def _health_of_status(status: Mapping[str, Any], loss: float | None) -> tuple[Health, str]:
    reason, waits_for = str(status.get("reason", "")), status.get("waits_for")
    if status.get("phase") == "unknown":
        return Health.UNKNOWN, reason
    if status.get("phase") == "over":
        return (Health.FAILED if status.get("failed") else Health.FINISHED), reason
    if not status.get("generation"):
        return Health.STARTING, waits_for or reason
    goodput, limit = status.get("goodput"), status.get("size_limit")
    health, why = _health(
        int(status["world_size"]),
        int(status["size"] if limit is None else limit),
        loss,
        float(status.get("led_s", 0.0)),
        1.0 if goodput is None else goodput,
    )
    if limit is not None:
        why = f"{why}, {status['size']} wanted: runs of higher priority come first"
    return health, f"{why}; it waits for a node: {waits_for}" if waits_for else why


def _health(
    present: int, wanted: int, loss: float | None, led_s: float, goodput: float
) -> tuple[Health, str]:
    is_finite = loss is None or math.isfinite(loss)
    found = concerns(present, wanted, is_finite, led_s, goodput)
    if found:
        return Health.CONCERN, ", ".join(found)
    return Health.HEALTHY, workers_train(present, wanted)
