"""The values of which the report of a run consists. They are data for a page: no clock, no I/O.

Times are seconds since the epoch. Lists are in the order of the journal and have an upper limit; of
a longer history they hold the newest entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from elastic_dp.telemetry.goodput import Goodput
from elastic_dp.telemetry.phase_clock import PhaseTimes
from elastic_dp.telemetry.slow_workers import SlowWorker

_DIGITS = 6  # significant digits of a number in JSON that is no time


class RunPhase(StrEnum):
    """What a run does, as far as its folder tells."""

    RUNNING = "running"
    SILENT = "silent"  # not ended, but nothing was written for a while
    FINISHED = "finished"
    FAILED = "failed"


class EventKind(StrEnum):
    """The events that are shown beside the number of workers."""

    START = "start"
    TAKEOVER = "takeover"  # a new controller leads the same workers
    JOIN = "join"
    NOTICE = "notice"  # the worker's node will go away
    LOSS = "loss"
    LEAVE = "leave"  # as asked
    EVICTION = "eviction"
    PAUSE = "pause"
    ROLLBACK = "rollback"  # back to a checkpoint
    CHECKPOINT = "checkpoint"
    SCALE = "scale"
    STOP = "stop"
    SLOW = "slow"  # a worker slows the others down
    ERROR = "error"  # of the user's code
    END = "end"


class WorkerCondition(StrEnum):
    """Where a worker is in its life."""

    WAITING = "waiting for a node"
    BUILDING = "building the model"
    READY = "ready"
    TRAINING = "training"
    LEAVING = "leaving"
    LEFT = "left"
    LOST = "lost"
    ENDED = "ended with the run"


GONE = (WorkerCondition.LEFT, WorkerCondition.LOST, WorkerCondition.ENDED)


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event. `seconds`: how long it took, for a pause and for a checkpoint."""

    time: float
    kind: EventKind
    text: str
    step: int
    worker: str = ""
    seconds: float | None = None


class GroupSize(NamedTuple):
    """The number of workers in the generation, and of those wanted, from `time` on."""

    time: float
    present: int
    wanted: int


class CurvePoint(NamedTuple):
    """A value of a metric. `counts` is False if the run went back and logged the step again.

    `value` is None where it was NaN or infinite.
    """

    time: float
    step: int
    value: float | None
    counts: bool


@dataclass(slots=True)
class WorkerRow:
    """One worker. `start` counts the starts of the run, which use the names of workers again.

    `step_s` is the mean time of its steps, `times` its seconds by phase (`PhaseTimes`).
    """

    name: str
    start: int
    since: float
    node: str = ""
    condition: WorkerCondition = WorkerCondition.WAITING
    until: float | None = None
    steps: int = 0
    step_s: float | None = None
    times: dict[str, float] = field(default_factory=PhaseTimes()._asdict)
    reason: str = ""
    seen_step: int = 0  # the run's step when the worker last reported


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint. `seconds` from its snapshot to its commit; None: the journal does not say.

    `stored`: it is in the store.
    """

    step: int
    time: float | None
    seconds: float | None
    stored: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the controller with its reason, in words."""

    time: float
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A run, in one look. `until` is the time up to which it is described."""

    name: str
    phase: RunPhase
    reason: str  # how it ended, or the newest decision
    began: float
    until: float
    led_s: float  # seconds in which a controller led it
    step: int
    starts: int
    generation: int
    present: int
    wanted: int
    lost: int  # workers that did not leave as asked
    rollbacks: int
    last_line: float
    goodput: Goodput
    exact: bool | None = None  # None: it has no result
    inexact_because: tuple[str, ...] = ()
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    band: list[GroupSize] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)
    slow: list[SlowWorker] = field(default_factory=list)  # at its newest line
    failures: int = 0  # ends of generations since the last step
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    verdict: tuple[str, ...] = ()  # three sentences

    @property
    def is_over(self) -> bool:
        return self.phase in (RunPhase.FINISHED, RunPhase.FAILED)

    @property
    def newest_checkpoint(self) -> CheckpointRow | None:
        """Of a run that goes on also one that was committed since somebody looked at the store."""
        goes_on = self.phase is RunPhase.RUNNING
        rows = (row for row in self.checkpoints if goes_on or row.stored)
        return max(rows, key=lambda row: row.step, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. What is no finite number becomes None."""
        values: dict[str, Any] = _json(self)
        values["goodput"]["fraction"] = _json(self.goodput.fraction)
        return values


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str | int) or value is None:
        return str(value) if isinstance(value, str) else value
    if dataclasses.is_dataclass(value):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    return [_json(each) for each in value]


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return round(value, 4) if abs(value) >= 1e6 else float(f"{value:.{_DIGITS}g}")
