"""The status of a run, as its folder tells it, and the health of a run by its status.

The status of a live run is its controller's (`Run.status`). Both have the same fields. Ages are
seconds, so that it does not matter how far the clocks of two machines differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from elastic_dp.report.report_model import GONE, Report, RunPhase
from elastic_dp.telemetry.slow_workers import SlowWorker
from elastic_dp.wording import counted, share

_LOW_GOODPUT = 0.5
_FAILURES = 3  # so many may have one cause, as a node that goes away
_EARLY_S = 600.0  # the start of a run says little about its goodput


class Health(StrEnum):
    """What an operator has to know first."""

    HEALTHY = "healthy"
    STARTING = "starting"  # no worker has trained yet
    CONCERN = "needs a look"
    SILENT = "silent"  # not ended, but nothing was written for a while
    FINISHED = "finished"
    FAILED = "failed"
    UNKNOWN = "unknown"  # its controller or its folder does not answer


def status_of_report(report: Report, now: float) -> dict[str, Any]:
    """Return what a run's folder holds, at `now` (of `time.time`), by the names of `Run.status`.

    What only a controller knows is None, 0 or empty.
    """
    saved = report.newest_checkpoint
    curves = {name: [p for p in points if p.counts] for name, points in report.curves.items()}
    newest = [(one.text, one.time) for one in (report.decisions[-1:] or report.events[-1:])]
    here = [row for row in report.workers if row.condition not in GONE]
    reason = report.reason
    if report.is_over:
        reason = f"{report.phase} after step {report.step}: {reason}"
        newest = [(reason, report.last_line)]
    event = {"text": newest[0][0], "age_s": _age(now, newest[0][1])} if newest else None
    return {
        "phase": "over" if report.is_over else "unfinished",
        "reason": reason,
        "report": {"phase": report.phase.value, "reason": report.reason, "starts": report.starts},
        "step": report.step,
        "generation": report.generation,
        "world_size": report.present,
        "size": report.wanted,
        "size_limit": None,
        "min_workers": 0,
        "exact": report.exact,
        "inexact_because": report.inexact_because,
        "sharding": None,
        "workers": {row.name: row.condition.value for row in here},
        "processes": {row.name: {"pid": "-", "node": row.node or "-"} for row in here},
        "lost": report.lost,
        "rollbacks": report.rollbacks,
        "rows_per_s": None,
        "metrics": {n: points[-1].value for n, points in curves.items() if points},
        "failed": report.phase is RunPhase.FAILED,
        "max_steps": None,
        "led_s": report.led_s,
        "started_age_s": _age(now, report.began) if report.began else None,
        "newest_event": event,
        "newest_checkpoint": saved and {"step": saved.step, "age_s": _age(now, saved.time)},
        "waits_for": "",
        "avoided_nodes": {},
        "goodput": report.goodput.fraction if report.goodput.total else None,
        "slow": [asdict(one) for one in report.slow],
        "failures": report.failures,
    }


def loss_of(status: Mapping[str, Any]) -> float | None:
    """Return the newest loss: NaN if it was not finite, None if none was logged."""
    logged = status.get("metrics", {}).get("loss", "")
    if logged is None:
        return math.nan
    is_number = isinstance(logged, int | float) and not isinstance(logged, bool)
    return float(logged) if is_number else None


def health_of(status: Mapping[str, Any]) -> tuple[Health, str]:
    """Return the health of a run and the reason for it."""
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
            where = "its cluster may be gone, or it waits for nodes"
            return Health.SILENT, where if report["starts"] else "its process may be gone"
    if report and not report["starts"] and status["step"]:  # it has no group
        return Health.HEALTHY, "it trains in one process"
    reason = report.get("reason", reason)
    if not status.get("generation"):
        return Health.STARTING, waits_for or reason
    goodput, limit = status.get("goodput"), status.get("size_limit")
    present, wanted = int(status["world_size"]), int(status["size"] if limit is None else limit)
    loss, failures, found = loss_of(status), int(status.get("failures", 0)), list[str]()
    train = f"{present} of {counted(wanted, 'worker')} {'trains' if present == 1 else 'train'}"
    if failures > _FAILURES:
        found.append(f"{failures} failures without a step in between")
    if present < wanted:
        found.append(train)
    if loss is not None and not math.isfinite(loss):
        found.append("its loss is not finite")
    if goodput is not None and goodput < _LOW_GOODPUT and status.get("led_s", 0.0) > _EARLY_S:
        found.append(f"its goodput is {share(goodput, 1.0)}")
    found += [str(SlowWorker(**one)) for one in status.get("slow", ())]
    health, why = Health.CONCERN if found else Health.HEALTHY, ", ".join(found) or train
    if limit is not None:
        why = f"{why}, {status['size']} wanted: runs of higher priority come first"
    return health, f"{why}; it waits for a node: {waits_for}" if waits_for else why


def _age(now: float, at: float | None) -> float | None:
    return None if at is None else max(0.0, now - at)
