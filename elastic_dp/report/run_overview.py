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

from elastic_dp.report.report_model import Report
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


def status_of_report(report: Report, now: float) -> dict[str, Any]:
    """Return what a run's folder holds, at `now` (of `time.time`), by the names of `Run.status`."""
    saved = max(report.checkpoints, key=lambda row: row.step, default=None)
    curves = {name: [p for p in points if p.counts] for name, points in report.curves.items()}
    newest = [(one.text, one.time) for one in (report.decisions[-1:] or report.events[-1:])]
    if report.is_over:
        ended = f"{report.phase} after step {report.step}: {report.reason}"
        newest = [(ended, report.last_line)]
    return {
        "report": {"phase": report.phase.value, "reason": report.reason, "starts": report.starts},
        "step": report.step,
        "world_size": report.present,
        "size": report.wanted,
        "generation": report.generation,
        "metrics": {n: points[-1].value for n, points in curves.items() if points},
        "led_s": report.led_s,
        "goodput": report.goodput.fraction if report.goodput.total else None,
        "rows_per_s": report.rows_per_s,
        "cache": asdict(report.cache),
        "newest_checkpoint": saved and {"step": saved.step, "age_s": _age(now, saved.time)},
        "newest_event": {"text": newest[0][0], "age_s": _age(now, newest[0][1])}
        if newest
        else None,
    }


def overview_of_status(name: str, status: Mapping[str, Any]) -> RunOverview:
    """Return the overview of what `Run.status` or `status_of_report` returns."""
    logged = status.get("metrics", {}).get("loss", "")
    is_number = isinstance(logged, int | float) and not isinstance(logged, bool)
    loss = math.nan if logged is None else float(logged) if is_number else None
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


def _health_of_status(status: Mapping[str, Any], loss: float | None) -> tuple[Health, str]:
    reason, waits_for = str(status.get("reason", "")), status.get("waits_for")
    report = status.get("report", {})
    match report.get("phase", status.get("phase")):
        case "unknown":
            return Health.UNKNOWN, reason
        case "over":
            return (Health.FAILED if status.get("failed") else Health.FINISHED), reason
        case "finished" | "failed" as ended:
            return Health(ended), report["reason"]
        case "silent":
            return Health.SILENT, "its cluster may be gone, or it waits for nodes"
    if report and not report["starts"] and status["step"]:  # it has no group
        return Health.HEALTHY, "it trains in one process"
    reason = report.get("reason", reason)
    if not status.get("generation"):
        return Health.STARTING, waits_for or reason
    goodput, limit = status.get("goodput"), status.get("size_limit")
    present, wanted = int(status["world_size"]), int(status["size"] if limit is None else limit)
    is_finite = loss is None or math.isfinite(loss)
    led_s, goodput = float(status.get("led_s", 0.0)), 1.0 if goodput is None else goodput
    found = concerns(present, wanted, is_finite, led_s, goodput)
    health = Health.CONCERN if found else Health.HEALTHY
    why = ", ".join(found) or workers_train(present, wanted)
    if limit is not None:
        why = f"{why}, {status['size']} wanted: runs of higher priority come first"
    return health, f"{why}; it waits for a node: {waits_for}" if waits_for else why
