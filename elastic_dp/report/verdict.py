"""Three sentences about a run: did it train, what did failures cost, is it healthy now."""

from __future__ import annotations

from elastic_dp.report.report_model import CheckpointRow, Report, RunPhase
from elastic_dp.report.run_status import Health, health_of, status_of_report
from elastic_dp.wording import counted, duration, first_few, share


def verdict(report: Report) -> tuple[str, str, str]:
    """Return the sentences about a report."""
    return _progress(report), _cost(report), _health(report)


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
    newest = report.newest_checkpoint
    if report.phase is RunPhase.FAILED:
        return f"Started again, it {_goes_on(newest)}."
    if report.phase is RunPhase.FINISHED:
        return _finished(report, newest)
    health, why = health_of(status_of_report(report, report.until))
    states = {Health.HEALTHY: "is healthy", Health.STARTING: "is starting"}
    because = f": {why}" if why else ""
    return f"It {states.get(health, 'needs a look')}{because}; {_saved(report, newest)}."


def _finished(report: Report, newest: CheckpointRow | None) -> str:
    inexact = report.inexact_because
    exact = f", and they are not exact ({first_few(inexact)})" if inexact else ""
    if newest is not None and newest.step == report.step:
        return f"Its final weights are in the checkpoint of step {newest.step}{exact}."
    return f"It has no checkpoint of its last step{exact}."


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
