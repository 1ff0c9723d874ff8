"""Three sentences about a run: did it train, what did failures cost, is it healthy now."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_dp.report.report_model import CheckpointRow, Report, RunPhase
from elastic_dp.telemetry.slow_workers import SlowWorker
from elastic_dp.wording import counted, first_few

_LOW_GOODPUT = 0.5
_FAILURES = 3  # so many may have one cause, as a node that goes away
_EARLY_S = 600.0  # the start of a run says little about its goodput


def verdict(report: Report) -> tuple[str, str, str]:
    """Return the sentences about a report."""
    return _progress(report), _cost(report), _health(report)


def duration(seconds: float) -> str:
    """Return a time in words: "0.4 s", "42 s", "5 min", "3 h 20 min", "2 d 4 h"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def share(part: float, whole: float) -> str:
    """Return a part in per cent: "0.2 %", "12 %"."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def concerns(
    present: int,
    wanted: int,
    loss_is_finite: bool,
    led_s: float,
    goodput: float,
    slow: Sequence[SlowWorker],
    failures: int,
) -> list[str]:
    """Return what somebody should look at in a run that goes on. `failures`: since its last
    step."""
    found = []
    if failures > _FAILURES:
        found.append(f"{failures} failures without a step in between")
    if present < wanted:
        found.append(workers_train(present, wanted))
    if not loss_is_finite:
        found.append("its loss is not finite")
    if led_s > _EARLY_S and goodput < _LOW_GOODPUT:
        found.append(f"its goodput is {share(goodput, 1.0)}")
    return [*found, *map(str, slow)]


def workers_train(present: int, wanted: int) -> str:
    """Return how many workers train: "3 of 4 workers train"."""
    return f"{present} of {counted(wanted, 'worker')} {'trains' if present == 1 else 'train'}"


def _progress(report: Report) -> str:
    took = f" in {duration(report.led_s)}" if report.led_s else ""
    steps = f"{counted(report.step, 'step')}{took}{_loss(report)}"
    reason = report.reason.rstrip(".")
    match report.phase:
        case RunPhase.FAILED:
            return f"The run failed after {steps}. The reason: {reason}."
        case RunPhase.FINISHED:
            return f"The run finished ({reason}) after {steps}."
        case RunPhase.SILENT:
            quiet = duration(report.until - report.last_line)
            return f"The run made {steps}, and nothing has been written for {quiet}."
    if report.step:
        return f"The run has made {steps}."
    return f"The run has made no step yet: {reason or 'nothing has happened'}."


def _loss(report: Report) -> str:
    points = [p for p in report.curves.get("loss", ()) if p.counts and p.value is not None]
    if len(points) < 2:
        return ""
    return f", with a loss that went from {points[0].value:.4g} to {points[-1].value:.4g}"


def _cost(report: Report) -> str:
    goodput = report.goodput
    if not goodput.total:
        return "Its journal does not tell how the time of workers was spent."
    useful = f"{share(goodput.useful, goodput.total)} of the workers' time made steps that count"
    if not report.lost and not report.rollbacks:
        return f"No worker was lost, and {useful}."
    lost = f"It lost {counted(report.lost, 'worker')}"
    back = ""
    if report.rollbacks:
        back = f" and the run went back to a checkpoint {counted(report.rollbacks, 'time')}"
    costs = (
        f"{share(goodput.redone, goodput.total)} went into redone steps, "
        f"{share(goodput.pause, goodput.total)} into pauses, "
        f"{share(goodput.waiting_for_workers, goodput.total)} into waiting for workers"
    )
    return f"{lost}{back}: {costs}; {useful}."


def _health(report: Report) -> str:
    newest = max(report.checkpoints, key=lambda row: row.step, default=None)
    if report.phase is RunPhase.FAILED:
        return f"Started again, it {_goes_on(newest)}."
    if report.phase is RunPhase.FINISHED:
        return _finished(report, newest)
    found = _concerns(report)
    saved = _saved(report, newest)
    if found:
        return f"It needs a look: {', '.join(found)}; {saved}."
    return f"It is healthy: {workers_train(report.present, report.wanted)}, and {saved}."


def _finished(report: Report, newest: CheckpointRow | None) -> str:
    inexact = report.inexact_because
    exact = f", and they are not exact ({first_few(inexact)})" if inexact else ""
    if newest is not None and newest.step == report.step and newest.stored is not False:
        return f"Its final weights are in the checkpoint of step {newest.step}{exact}."
    return f"It has no checkpoint of its last step{exact}."


def _concerns(report: Report) -> list[str]:
    silent = report.phase is RunPhase.SILENT
    loss = [point for point in report.curves.get("loss", ()) if point.counts]
    is_finite = not loss or loss[-1].value is not None
    goodput = report.goodput.fraction
    present, wanted, failures = report.present, report.wanted, report.failures
    found = concerns(present, wanted, is_finite, report.led_s, goodput, report.slow, failures)
    return ["its cluster may be gone, or it waits for nodes"] * silent + found


def _saved(report: Report, newest: CheckpointRow | None) -> str:
    if newest is None:
        return "there is no checkpoint yet"
    if newest.time is None:
        return f"the newest checkpoint is of step {newest.step}"
    ago = duration(report.until - newest.time)
    return f"the newest checkpoint is of step {newest.step}, {ago} ago"


def _goes_on(newest: CheckpointRow | None) -> str:
    if newest is None:
        return "begins at its first step, because there is no checkpoint"
    return f"goes on from the checkpoint of step {newest.step}"
