"""Goodput: what a run's workers were there for, as a pure function of the run's events.

The unit is the worker-second. The whole is the number of workers that the run wants (or has, if
that is more), over the time of the run, and each second of it is in one category:

    useful               steps that count: forward, backward, collectives, optimizer, loop body
    redone               steps that were undone, and steps behind the checkpoint from which all
                         began again; also what a worker did after its last report before it died
    pause                outside a generation, while the next one forms, and transfers of state
    waiting for data     the rows of steps that count
    checkpoint           copies of the state, as far as they block training
    waiting for workers  wanted workers that have not entered a generation yet

`GoodputMeter` takes the lines of `events.jsonl`. Besides the coordinator's messages it needs the
two of this file, which the controller adds: how many workers are wanted when it begins to lead, and
what workers have reported about their times. While a run goes on, its controller gives the meter
each report; the journal has one of each worker every ten seconds or so, and its last one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_dp.telemetry.phase_clock import PhaseTimes

_MOST_POINTS = 4096  # of the progress of a run; beyond that every second one is dropped


@dataclass(frozen=True, slots=True)
class ControllerStarted:
    """A controller begins to lead. `takes_over`: the workers of another one go on."""

    size: int  # the number of workers that the run wants
    takes_over: bool


@dataclass(frozen=True, slots=True)
class TimesReported:
    """What workers have reported: the last committed step, and the times of each."""

    step: int
    times: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Worker-seconds by category."""

    useful: float = 0.0
    redone: float = 0.0
    pause: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0
    waiting_for_workers: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def fraction(self) -> float:
        """The useful part of all; 1 before anything has happened."""
        return self.useful / self.total if self.total else 1.0


def goodput_of(lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """Return the goodput of the runs in a journal, up to its last line."""
    meter = GoodputMeter()
    for line in lines:
        meter.line(line)
    return meter.goodput()


@dataclass(slots=True)
class _Presence:
    """One worker, since it was named a member for the first time."""

    since: float
    times: PhaseTimes = field(default_factory=PhaseTimes)

    def unknown(self, now: float) -> float:
        """The time that the worker has not reported: its present phase, or the step in flight."""
        return max(0.0, now - self.since - sum(self.times))


class GoodputMeter:
    """Adds up worker-seconds, line by line. It reads no clock: time is that of the lines."""

    def __init__(self) -> None:
        self._now = 0.0
        self._wanted = 0
        self._leads = False  # a run goes on, so that time counts
        self._present: dict[str, _Presence] = {}
        self._gone: set[str] = set()
        self._released: set[str] = set()
        self.times = PhaseTimes()  # of all workers so far, as they reported them
        self._died_with = 0.0  # what workers had not reported when they died
        self._left_with = 0.0  # the same of workers that were told to leave
        self._finished_with = 0.0  # the same of workers that saw the end of the run
        self._missing = 0.0  # worker-seconds of workers that were wanted
        self._redone = 0.0  # useful before the run went back to a checkpoint
        self._step = 0
        self._points: list[tuple[int, float]] = []  # (step, useful seconds up to its end)

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of the journal. Lines that say nothing about times, or that another program
        has damaged, are ignored.
        """
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        kind = line.get("event") or line.get("command")
        if kind is None:
            return
        if kind == "ControllerStarted" and not line["takes_over"]:
            self._forget_workers()  # of a run that ended without a word, so at its last line
        self._pass(float(line["time"]))
        match kind:
            case "ControllerStarted":
                self._wanted, self._leads = int(line["size"]), True
            case "SizeRequested":
                self._wanted = int(line["size"])
            case "FormGeneration":
                for worker in line.get("members", ()):
                    self._enter(str(worker))
            case "TimesReported":
                for worker, times in line["times"].items():
                    self.report(worker, PhaseTimes.of(tuple(times)))
                self.reached(int(line["step"]))
            case "ReleaseWorker":
                self._released.add(line["worker"])
            case "WorkerLost":
                self._leave(line["worker"])
            case "CheckpointFound":
                self._go_back(line["step"] or 0)
            case "FinishRun" | "FailRun":
                self._end()

    def report(self, worker: str, times: PhaseTimes) -> None:
        """Take the times of one worker. Older ones than those before are ignored."""
        presence = self._present.get(worker)
        if presence is None or not sum(presence.times) < sum(times) < math.inf:
            return
        self.times = self.times.plus(times).plus(presence.times, -1)
        presence.times = times

    def reached(self, step: int) -> None:
        """Take the last step that is committed."""
        if step < self._step:
            return
        self._step = step
        if self._points and self._points[-1][0] == step:
            self._points.pop()  # the loop body and evaluations after the step belong to it
        self._points.append((step, self._useful()))
        if len(self._points) > _MOST_POINTS:
            del self._points[::2]

    def goodput(self, now: float | None = None) -> Goodput:
        """Return the goodput up to `now`, or up to the last line.

        What a living worker has not reported yet counts as useful.
        """
        now = self._now if now is None else max(now, self._now)
        since = now - self._now if self._leads else 0.0
        times = self.times
        unknown = self._finished_with + sum(one.unknown(now) for one in self._present.values())
        return Goodput(
            useful=self._useful() + unknown,
            redone=times.redone + self._redone + self._died_with,
            pause=times.pause + self._left_with,
            data_wait=times.data,
            checkpoint=times.checkpoint,
            waiting_for_workers=self._missing + since * max(0, self._wanted - len(self._present)),
        )

    # ------------------------------------------------------------------------------ private

    def _useful(self) -> float:
        return self.times.compute + self.times.collective + self.times.other - self._redone

    def _pass(self, now: float) -> None:
        """Let time pass. A clock that was set back stands still meanwhile."""
        if self._leads:
            missing = max(0, self._wanted - len(self._present))
            self._missing += missing * max(0.0, now - self._now)
        self._now = max(now, self._now)

    def _forget_workers(self) -> None:
        for worker in list(self._present):
            self._leave(worker)
        self._gone.clear()  # the next run may use the same names
        self._released.clear()
        self._leads = False

    def _enter(self, worker: str) -> None:
        if self._leads and worker not in self._present and worker not in self._gone:
            self._present[worker] = _Presence(self._now)

    def _leave(self, worker: str) -> None:
        presence = self._present.pop(worker, None)
        self._gone.add(worker)
        if presence is not None:
            if worker in self._released:
                self._left_with += presence.unknown(self._now)
            else:
                self._died_with += presence.unknown(self._now)

    def _go_back(self, step: int) -> None:
        """All workers with a state were lost: the run begins again after `step`."""
        if step >= self._step:
            return
        at = 0.0
        while self._points and self._points[-1][0] > step:
            self._points.pop()
        if self._points:
            at = self._points[-1][1]
        self._redone += max(0.0, self._useful() - at)
        self._step = step

    def _end(self) -> None:
        for presence in self._present.values():
            self._finished_with += presence.unknown(self._now)
        self._gone.update(self._present)
        self._present.clear()
        self._leads = False
