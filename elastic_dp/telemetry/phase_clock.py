"""Splits the time of a worker by what it did, in the phases that its heartbeats report.

The time of a step counts for its parts when the step is committed. If the step is undone instead,
all of it was lost. So what a worker reports never has to be taken back, and its sum is the time
since the worker entered its first generation, less the step in flight.
"""

from __future__ import annotations

from typing import NamedTuple


class PhaseTimes(NamedTuple):
    """Seconds of one worker, or of several, since the first generation of each."""

    data: float = 0.0  # waited for the rows of committed steps
    compute: float = 0.0  # forward and backward of committed steps
    collective: float = 0.0  # finished the exchange of gradients of committed steps
    other: float = 0.0  # optimizer, loop body, evaluations
    checkpoint: float = 0.0  # copied the state for a checkpoint
    pause: float = 0.0  # outside generations, forming one, or transferring state
    redone: float = 0.0  # in steps that were undone

    def plus(self, other: PhaseTimes, sign: int = 1) -> PhaseTimes:
        return PhaseTimes(*(a + sign * b for a, b in zip(self, other, strict=True)))

    @classmethod
    def of(cls, values: tuple[float, ...]) -> PhaseTimes:
        """Return the times that a message holds. One of another version may have fewer or more."""
        return cls(*values[: len(cls._fields)])


_STEP_PARTS = ("data", "compute", "collective")
_PART_OF = {
    **{part: part for part in _STEP_PARTS},
    **dict.fromkeys(("apply", "body", "evaluate"), "other"),
    **dict.fromkeys(("wait", "form", "restore", "give", "receive", "done"), "pause"),
    "keep": "checkpoint",
}


class PhaseClock:
    """The times of one worker. A worker that has never formed a group has none."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PhaseTimes._fields, 0.0)
        self._step = dict.fromkeys(_STEP_PARTS, 0.0)  # of the step in flight
        self._part: str | None = None  # of the present phase; None before the first generation
        self._since = 0.0

    def enter(self, phase: str, now: float) -> bool:
        """Record that the worker enters `phase` at `now` (seconds of any steady clock).

        Returns whether `state` has changed. Called many times in each step.
        """
        part, passed, self._since = self._part, now - self._since, now
        if part is None:
            self._part = "pause" if phase == "form" else None
            return phase == "form"
        self._part = _PART_OF.get(phase, "other")
        if part in self._step:
            self._step[part] += passed
            if self._part in self._step:
                return False
            for each, seconds in self._step.items():
                self._seconds[each if phase == "apply" else "redone"] += seconds
                self._step[each] = 0.0
        else:
            self._seconds[part] += passed
        return True

    @property
    def state(self) -> tuple[float, ...]:
        """The times up to the present phase, the index of the part that passes now (-1 in a step
        and before the first generation), and since when.
        """
        counts = self._part is not None and self._part not in self._step
        index = PhaseTimes._fields.index(self._part) if counts else -1
        return (*self._seconds.values(), index, self._since)
