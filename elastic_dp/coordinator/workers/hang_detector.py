"""Finds workers that are alive and make no progress: their heartbeats arrive and report the same
position.

Four things always hold. Time is counted in a worker's own heartbeats, so late messages, a frozen
worker or a controller that slept cannot make a worker look stuck. A heartbeat with others queued
behind it condemns no worker. A group that makes steps is never checked. Phases that users and
stores may prolong at will (the loop body, an evaluation, a checkpoint, data) are reported, but do
not count as hangs.

In a step, all members wait for the least advanced one. That member is the suspect, not those that
wait for it in a collective. If the phases of all members are equal, all are told to leave, and a
member that does not is the suspect. The time counts from the last moment at which any of them
moved: members that waited long for one that arrived at last were not hung.
"""

import math
from collections import deque
from statistics import median

from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import HeartbeatReceived
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState

MIN_LIMIT_S = 300.0  # the default limit, or so many median steps if that is longer:
STEPS = 20
SLOW_FACTOR = (
    6  # times the limit for a process that computes, or that may compile in its first step
)
BUSY_FRACTION = 0.1  # fraction of one processor
STEP_TIMES = 21  # number of recent step times, of which the median is taken

# The phases of a worker, in the order in which a step goes through them.
PHASE_ORDER = {
    **{"start": 0, "wait": 0, "form": 0, "restore": 1, "give": 2, "receive": 2},
    **{"body": 3, "evaluate": 4, "keep": 5, "data": 6, "compute": 6, "collective": 7, "apply": 8},
    "done": 9,
}
HANDING_OVER = frozenset({"give", "receive"})
UNTIMED_PHASES = {
    "start": "runs the user's code before the loop",
    "body": "is in the loop's body",
    "evaluate": "evaluates",
    "keep": "copies the state for a checkpoint",
    "data": "waits for data",
    "restore": "reads the checkpoint",
}


class HangDetector:
    """Evicts members that make no progress for `limit_s` seconds."""

    def __init__(self, run: RunState, registry: WorkerRegistry, generation: Generation) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self._step_times: deque[float] = deque(maxlen=STEP_TIMES)
        self.limit_s = run.config.hang_timeout_s or MIN_LIMIT_S
        self._look_at = -math.inf
        # When a backlog was last read: a queued heartbeat may already show progress.
        self.caught_up_at = -math.inf

    def stepped(self, steps: int, took_s: float) -> None:
        """Update the limit from the duration of the last `steps` steps."""
        if self.run.config.hang_timeout_s is None and took_s < math.inf:
            self._step_times.append(took_s / steps)
            self.limit_s = max(MIN_LIMIT_S, STEPS * median(self._step_times))

    def heartbeat_received(self, worker: WorkerState, event: HeartbeatReceived, now: float) -> None:
        """Take a worker's heartbeat. O(1) while the worker makes progress."""
        worker.progress.record(event)
        if self._stalled_s(worker) < self.limit_s or now <= self.caught_up_at:
            return
        inside = worker.id in self._generation.inside
        if worker.stage is Stage.UNREPORTED or (inside and self._generation.must_stop):
            self._evict_if_stuck(worker, now, "does not answer")
        elif inside and self.run.in_flight and now >= self._look_at:
            self._look_at = now + self.limit_s / 8
            self._look(now)

    # ------------------------------------------------------------------------------ private

    def _stalled_s(self, worker: WorkerState) -> float:
        return worker.progress.beats * self.run.config.heartbeat_interval_s

    def _is_stuck(self, worker: WorkerState) -> bool:
        stalled_s, progress = self._stalled_s(worker), worker.progress
        busy = progress.cpu_s >= BUSY_FRACTION * stalled_s
        is_first = progress.where[1] == progress.first_step
        return stalled_s >= self.limit_s * (SLOW_FACTOR if busy or is_first else 1)

    def _look(self, now: float) -> None:
        """Look for a stuck worker among the least advanced members, for which all others wait."""
        generation = self._generation
        inside = [
            worker for worker in generation.members.values() if worker.id in generation.inside
        ]
        if any(worker.progress.where[0] != generation.number for worker in inside):
            return  # forming has a deadline of its own
        least = min(map(_order, inside))
        last = [worker for worker in inside if _order(worker) == least]
        untimed = [worker for worker in last if worker.progress.phase in UNTIMED_PHASES]
        stuck = [worker for worker in last if self._is_stuck(worker)]
        alike = len(last) == len(inside) and least[2] == PHASE_ORDER["collective"]
        if untimed:
            self._look_at = now + self.limit_s
            self.run.explain(
                f"no step in {self._stalled_s(untimed[0]):.0f} s: {_describe(untimed[0])}"
            )
        elif (all_stalled_s := min(map(self._stalled_s, inside))) < self.limit_s:
            # a waiting member may have moved only now
            self._look_at = now + self.limit_s - all_stalled_s
        elif stuck and (alike or stuck[0].progress.phase in HANDING_OVER):
            generation.abort(f"no member makes progress in phase {stuck[0].progress.phase!r}")
            self._registry.failures.count(stuck[0], now)
        else:
            for worker in stuck:
                self._evict_if_stuck(worker, now, "makes no progress")

    def _evict_if_stuck(self, worker: WorkerState, now: float, what: str) -> None:
        if worker.progress.phase in UNTIMED_PHASES or not self._is_stuck(worker):
            return
        _, step, phase = worker.progress.where
        stalled_s = self._stalled_s(worker)
        reason = f"stuck: {what} for {stalled_s:.0f} s, in phase {phase!r} after step {step}"
        self._registry.evict(worker, reason, now, stuck=True)


def _order(worker: WorkerState) -> tuple[bool, int, int]:
    """Return how far a worker is. During the state transfer the step does not count."""
    _, step, phase = worker.progress.where
    order = PHASE_ORDER.get(phase, 0)
    trains = order > PHASE_ORDER["receive"]
    return trains, step if trains else 0, order


def _describe(worker: WorkerState) -> str:
    return f"{worker.id} {UNTIMED_PHASES[worker.progress.phase]}"
