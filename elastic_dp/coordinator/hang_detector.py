"""Which workers live and do not go on: their heartbeats come, and say the same again and again.

Four things always hold. Time is counted in a worker's own heartbeats, so no worker grows older by a
message that is late, by being frozen, or by a controller that slept. None is judged by a heartbeat
behind which others wait to be read. A group that makes steps is never looked at. What users and
stores may take as long as they like for (the loop's body, an evaluation, a checkpoint, data) is
said, and is no hang.

In a step, all wait for the least advanced member. That one is the suspect; those that wait for it
in a collective are not. Where no phase tells one from the others, all are told to leave, and one
that cannot is the suspect then. The time counts from when the last of them moved: those that have
long waited for one that came at last were not hung.
"""

import math
from collections import deque
from statistics import median

from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import HeartbeatReceived
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.worker_registry import WorkerRegistry
from elastic_dp.coordinator.worker_state import Stage, WorkerState

LEAST_S = 300.0  # the limit, where the job names none; or so many steps, if that is longer:
STEPS = 20
LONGER = 6  # times the limit: for a process that computes, or is in its first step and may compile
BUSY = 0.1  # of one processor
PACES = 21  # the last steps' durations, of which the median is taken

# The phases of a worker, in the order in which it goes through them between two commits.
ORDER = {
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
    def __init__(self, run: RunState, registry: WorkerRegistry, generation: Generation) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self._paces: deque[float] = deque(maxlen=PACES)
        self.limit_s = run.config.hang_timeout_s or LEAST_S
        self._look_at = self._caught_up_at = -math.inf

    def catch_up(self, now: float) -> None:
        """What is read now says what was: a heartbeat that says more may be behind it."""
        self._caught_up_at = now

    def stepped(self, steps: int, took_s: float) -> None:
        if self.run.config.hang_timeout_s is None and took_s < math.inf:
            self._paces.append(took_s / steps)
            self.limit_s = max(LEAST_S, STEPS * median(self._paces))

    def heard(self, worker: WorkerState, event: HeartbeatReceived, now: float) -> None:
        """O(1) while there is progress."""
        worker.progress.heard(event)
        if self._stalled_s(worker) < self.limit_s or now <= self._caught_up_at:
            return
        inside = worker.id in self._generation.inside
        if worker.stage is Stage.UNREPORTED or (inside and self._generation.must_stop):
            self._judge(worker, now, "does not answer")
        elif inside and self.run.in_flight and now >= self._look_at:
            self._look_at = now + self.limit_s / 8
            self._look(now)

    # ------------------------------------------------------------------------------ private

    def _stalled_s(self, worker: WorkerState) -> float:
        return worker.progress.beats * self.run.config.heartbeat_interval_s

    def _is_stuck(self, worker: WorkerState) -> bool:
        stalled_s, progress = self._stalled_s(worker), worker.progress
        busy = progress.cpu_s >= BUSY * stalled_s
        is_first = progress.where[1] == progress.first_step
        return stalled_s >= self.limit_s * (LONGER if busy or is_first else 1)

    def _look(self, now: float) -> None:
        """All wait for the least advanced of those inside."""
        generation = self._generation
        inside = [
            worker for worker in generation.members.values() if worker.id in generation.inside
        ]
        if any(worker.progress.where[0] != generation.number for worker in inside):
            return  # it forms, which has a deadline of its own
        least = min(map(_order, inside))
        last = [worker for worker in inside if _order(worker) == least]
        untimed = [worker for worker in last if worker.progress.phase in UNTIMED_PHASES]
        stuck = [worker for worker in last if self._is_stuck(worker)]
        alike = len(last) == len(inside) and least[2] == ORDER["collective"]
        if untimed:
            self._look_at = now + self.limit_s
            self.run.explain(
                f"no step for {self._stalled_s(untimed[0]):.0f} s: {_says(untimed[0])}"
            )
        elif (all_stalled_s := min(map(self._stalled_s, inside))) < self.limit_s:
            self._look_at = now + self.limit_s - all_stalled_s  # whoever waited may move only now
        elif stuck and (alike or stuck[0].progress.phase in HANDING_OVER):
            generation.abort(f"nothing moves in {stuck[0].progress.phase!r}")
            self._registry.failures.count(stuck[0], now)
        else:
            for worker in stuck:
                self._judge(worker, now, "does not go on")

    def _judge(self, worker: WorkerState, now: float, what: str) -> None:
        if worker.progress.phase in UNTIMED_PHASES or not self._is_stuck(worker):
            return
        _, step, phase = worker.progress.where
        reason = (
            f"stuck: {what} for {self._stalled_s(worker):.0f} s, in {phase!r} after step {step}"
        )
        self._registry.evict(worker, reason, now, stuck=True)


def _order(worker: WorkerState) -> tuple[bool, int, int]:
    """During the state transfer the step does not count: a worker without state has none."""
    _, step, phase = worker.progress.where
    order = ORDER.get(phase, 0)
    trains = order > ORDER["receive"]
    return trains, step if trains else 0, order


def _says(worker: WorkerState) -> str:
    return f"{worker.id} {UNTIMED_PHASES[worker.progress.phase]}"
