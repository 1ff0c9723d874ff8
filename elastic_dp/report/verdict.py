"""Three sentences about a run: did it train, what did failures cost, is it healthy now."""

from __future__ import annotations

from elastic_dp.report.report_model import Report, RunPhase
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
    first, last = report.first_loss, report.metrics.get("loss")
    if first is None or last is None or report.step < 2:
        return ""
    return f", with a loss that went from {first:.4g} to {last:.4g}"


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
    saved, inexact = report.checkpoint, report.inexact_because
    if report.phase is RunPhase.FAILED:
        if saved is None:
            return "Started again, it begins at its first step, because there is no checkpoint."
        return f"Started again, it goes on from the checkpoint of step {saved.step}."
    if report.phase is RunPhase.FINISHED:
        exact = f", and they are not exact ({first_few(inexact)})" if inexact else ""
        if saved is None or saved.step != report.step:
            return f"It has no checkpoint of its last step{exact}."
        return f"Its final weights are in the checkpoint of step {saved.step}{exact}."
    health, why = health_of(status_of_report(report, report.until))
    states = {Health.HEALTHY: "is healthy", Health.STARTING: "is starting"}
    newest = "there is no checkpoint yet"
    if saved is not None:
        ago = "" if saved.time is None else f", {duration(report.until - saved.time)} ago"
        newest = f"the newest checkpoint is of step {saved.step}{ago}"
    return f"It {states.get(health, 'needs a look')}: {why}; {newest}."
