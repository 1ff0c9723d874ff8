"""How a run ends: finished, failed, or stopped before it began; then everybody goes.

What was decided first counts. Whoever is still there `release_timeout_s` after that is evicted.
"""

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import START
from elastic_dp.protocol.roster import Stage, Worker
from elastic_dp.protocol.run import Phase
from elastic_dp.protocol.staff import GONE, Staff


def finish(staff: Staff, finished: list[Worker], now: float) -> None:
    digests = {worker.finished for worker in finished}
    place = max(worker.place for worker in finished)
    if len(digests) > 1:
        staff.run.explain(f"THE RESULT IS NOT EXACT: {len(digests)} different final weights")
    reason = staff.run.stop or "all members finished"
    staff.run.emit(m.FinishRun(place, finished[0].finished or "", reason, len(digests) > 1))
    _close(staff, f"finished after step {place.step}: {reason}", now)


def stop_before_first_step(staff: Staff, reason: str, now: float) -> None:
    staff.run.emit(m.FinishRun(START, "", reason))
    _close(staff, f"stopped before the first step: {reason}", now)


def lost_everyone(staff: Staff, now: float) -> None:
    """Nobody holds the state any more. With checkpoints, a new generation starts from the newest seal
    here, under the same rule about the lease of the one before."""
    fail(staff, "every worker that held the state is lost, and there is no checkpoint", "", now)


def fail(staff: Staff, error: str, traceback: str, now: float) -> None:
    if staff.run.phase is not Phase.OVER:
        staff.run.emit(m.FailRun(error, traceback))
        _close(staff, f"failed: {error}", now)


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
