"""How a run ends: finished, failed, or stopped before it began; then everybody goes.

What was decided first counts. Whoever is still there `release_timeout_s` after that is evicted.
"""

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import Place
from elastic_dp.protocol.roster import Stage, Worker
from elastic_dp.protocol.run import Phase
from elastic_dp.protocol.staff import GONE, Staff


def finish(staff: Staff, finished: list[Worker], now: float) -> None:
    digests = {worker.finished for worker in finished}
    place = max(worker.place for worker in finished)
    if len(digests) > 1:
        staff.run.explain(f"THE RESULT IS NOT EXACT: {len(digests)} different final weights")
    reason = finished[0].finished_because or "all members finished"
    staff.run.emit(m.FinishRun(place, finished[0].finished or "", reason, len(digests) > 1))
    _close(staff, f"finished after step {place.step}: {reason}", now)


def stop_before_first_step(staff: Staff, sealed: int | None, reason: str, now: float) -> None:
    """Nobody holds a state; what the run has come to is its newest checkpoint."""
    staff.run.emit(m.FinishRun(Place(sealed or 0), "", reason))
    _close(staff, f"stopped before the first step: {reason}", now)


def lost_everyone(staff: Staff, at_most: int | None, now: float) -> None:
    """Nobody holds the state any more (or nobody's counts), nor does the storage."""
    if staff.budgets.errors.incidents and staff.user_error is not None:
        fail_by(staff, staff.user_error, now)  # which is what took them
    error = "every worker that held the state is lost, and there is no checkpoint"
    if at_most is not None:
        error = (
            f"the weights of workers differ, and there is no checkpoint of step {at_most} or before, when they agreed; "
            "run it again to begin anew, and set CheckpointConfig"
        )
    fail(staff, error, "", now)


def fail(staff: Staff, error: str, traceback: str, now: float) -> None:
    _fail(staff, m.FailRun(error, traceback), now)


def fail_by(staff: Staff, event: m.WorkerFailed, now: float) -> None:
    _fail(staff, m.FailRun(event.error, event.traceback, event.worker, event.facts), now)


def _fail(staff: Staff, command: m.FailRun, now: float) -> None:
    if staff.run.phase is not Phase.OVER:
        staff.run.emit(command)
        _close(staff, f"failed: {command.error}", now)


def _close(staff: Staff, reason: str, now: float) -> None:
    run = staff.run
    run.phase = Phase.OVER
    run.say(reason)
    for worker in staff.workers.values():
        if worker.stage not in GONE:
            run.emit(m.ReleaseWorker(worker.id, reason))
            staff.move(worker, Stage.LEAVING, now)
    run.alarms.clear()
    run.alarms.wake(now + run.rules.release_timeout_s, "close")


def turn_out(staff: Staff, now: float) -> None:
    """Those who were released when the run ended, and did not go in time."""
    if now >= staff.run.alarms.due:
        staff.run.alarms.clear()
        for worker in staff.workers.values():
            if worker.stage is Stage.LEAVING:
                staff.run.emit(m.EvictWorker(worker.id, "did not leave"))
                staff.move(worker, Stage.EVICTED, now)
