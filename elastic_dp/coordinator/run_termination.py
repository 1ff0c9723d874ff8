"""Ends a run: finished, failed, or stopped before the first step. Then every worker is released.

The first decision counts. A worker that is still there `release_timeout_s` later is evicted.
"""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import TrainingPosition
from elastic_dp.coordinator.run_state import Phase
from elastic_dp.coordinator.workers.worker_registry import DEPARTED_STAGES, WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Stage


def finish(registry: WorkerRegistry, generation: Generation, now: float) -> None:
    """End the run with the result of the members of `generation`, which have finished."""
    finished = [*generation.members.values()]
    digests = {worker.finished for worker in finished}
    position = max(worker.position for worker in finished)
    if len(digests) > 1:
        registry.run.explain(f"THE RESULT IS NOT EXACT: {len(digests)} different final weights")
    reason = finished[0].finished_because or "all members finished"
    registry.run.emit(m.FinishRun(position, finished[0].finished or "", reason, len(digests) > 1))
    _close(registry, f"finished after step {position.step}: {reason}", now)


def stop_before_first_step(
    registry: WorkerRegistry, checkpoint_step: int | None, reason: str, now: float
) -> None:
    """End the run before any worker has state; its result is the newest checkpoint, if there is
    one.
    """
    registry.run.emit(m.FinishRun(TrainingPosition(checkpoint_step or 0), "", reason))
    _close(registry, f"stopped before the first step: {reason}", now)


def fail_without_state(registry: WorkerRegistry, at_most: int | None, now: float) -> None:
    """Fail the run: no worker has valid state any more, and there is no usable checkpoint.

    `at_most` is the last step at which all weights agreed, if they differed later.
    """
    user_error = registry.failures.user_error
    if registry.failures.errors.incidents and user_error is not None:
        fail_by_worker(registry, user_error, now)  # the error that took the workers
    error = "every worker with the training state is lost, and there is no checkpoint"
    if at_most is not None:
        error = (
            f"the weights of the workers differ, and there is no checkpoint of step {at_most} or "
            "earlier, when they were equal; run the job again to start from the beginning, and "
            "set CheckpointConfig to make checkpoints"
        )
    fail(registry, error, "", now)


def fail(registry: WorkerRegistry, error: str, traceback: str, now: float) -> None:
    """Fail the run with `error`."""
    _fail(registry, m.FailRun(error, traceback), now)


def fail_by_worker(registry: WorkerRegistry, event: m.WorkerFailed, now: float) -> None:
    """Fail the run with the error that a worker has reported."""
    _fail(registry, m.FailRun(event.error, event.traceback, event.worker, event.facts), now)


def _fail(registry: WorkerRegistry, command: m.FailRun, now: float) -> None:
    if registry.run.phase is not Phase.OVER:
        registry.run.emit(command)
        _close(registry, f"failed: {command.error}", now)


def _close(registry: WorkerRegistry, reason: str, now: float) -> None:
    run = registry.run
    run.set_reason(reason)
    run.end(reason)
    for worker in registry.workers.values():
        if worker.stage not in DEPARTED_STAGES:
            run.emit(m.ReleaseWorker(worker.id, reason))
            registry.move(worker, Stage.LEAVING, now)
    run.timers.wake(now + run.config.release_timeout_s, "close")


def evict_remaining(registry: WorkerRegistry, now: float) -> None:
    """Evict the workers that were released when the run ended and did not leave in time."""
    timers = registry.run.timers
    if now >= timers.due:
        timers.cancel_all()
        for worker in registry.workers.values():
            if worker.stage is Stage.LEAVING:
                registry.run.emit(m.EvictWorker(worker.id, "did not leave"))
                registry.move(worker, Stage.EVICTED, now)
