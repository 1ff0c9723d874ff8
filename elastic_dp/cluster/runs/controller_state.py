"""The state that a controller leaves to its successor, and the generations that it claimed.

A successor learns everything else from the workers. The state is small, and is written as one value
whenever it has changed: when workers come and go, on an operator's request, at the first step, and
at the end. A request is stored before it is acknowledged, and the outcome before any worker is
released.
"""

from __future__ import annotations

import math
import pickle
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId


@dataclass(frozen=True, slots=True)
class LossCounted:
    """An event: how many workers this start has lost so far."""

    workers_lost: int


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Generations, lost workers and seconds of several starts together.

    They come from the run's journal: a head node that is lost takes everything else with it.
    """

    generations: int = 0
    workers_lost: int = 0
    wall_s: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> RunTotals:
        """Add up the starts on clusters. The time of a start ends with its last event."""
        total, start, began_at, until = cls(), cls(), None, 0.0
        for line in events:
            if line.get("event") == "ControllerStarted" and not line.get("takes_over"):
                total = total if began_at is None else total._with(start, until - began_at)
                start, began_at = cls(), float(line["time"])
            elif line.get("command") == "FormGeneration":
                start = cls(int(line["generation"]), start.workers_lost)
            elif line.get("event") == "LossCounted":
                start = cls(start.generations, int(line["workers_lost"]))
            until = float(line["time"])
        return total if began_at is None else total._with(start, until - began_at)

    def _with(self, start: RunTotals, wall_s: float) -> RunTotals:
        return RunTotals(
            generations=self.generations + start.generations,
            workers_lost=self.workers_lost + start.workers_lost,
            wall_s=self.wall_s + wall_s,
        )


@dataclass
class ControllerState:
    """What a successor must know. Times are of `time.time`, because the successor may be on another
    machine.
    """

    started_at: float = field(default_factory=time.time)
    lease_token: str = field(default_factory=lambda: secrets.token_hex(8))
    term: int = 1  # the number of this controller among those of the run
    size: int | None = None  # requested by an operator
    min_workers: int | None = None  # likewise
    stop: m.StopRequested | None = None  # a request to end before the run's limits
    checkpoint: bool = False  # one was requested, and none was committed since
    # The deadline, and how far away it was when the notice came; None: not known.
    draining: dict[WorkerId, tuple[float, float] | None] = field(default_factory=dict)
    # workers that were requested and not released; whether each was up
    here: dict[WorkerId, bool] = field(default_factory=dict)
    lost: int = 0
    earlier: RunTotals = field(default_factory=RunTotals)  # of starts before this one
    stepped: bool = False  # a step was made
    at_most: int | None = None  # later steps are wrong, and no generation has gone back yet
    outcome: Any = None  # how the run ended


class ControllerStateStore:
    """The newest state of a run's controller, in memory: for a controller that dies with its
    run.
    """

    def __init__(self) -> None:
        self.state = ControllerState()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._changed = True

    @property
    def inherited(self) -> bool:
        """Whether another controller led the run before."""
        return self.state.term > 1

    def claim(self, generation: int) -> bool:
        """Create the generation's key. Return False if another controller has created it."""
        return True

    def highest_claimed(self) -> int:
        return 0

    def record(self, message: m.Event | m.Command) -> None:
        """Update the state by a message; `save` writes it if it has changed."""
        with self._lock:
            self._changed |= _update(self.state, message)

    def change(self, **facts: Any) -> None:
        """Update the state by what no message says."""
        with self._lock:
            for name, fact in facts.items():
                setattr(self.state, name, fact)
            self._changed = True

    @property
    def has_changed(self) -> bool:
        """Whether the state is not stored yet."""
        return self._changed

    def save(self) -> None:
        """Write the state if it has changed. When this returns, the state is stored.

        Nobody who records something waits for the writing.
        """
        with self._writing:
            with self._lock:
                changed, self._changed = self._changed, False
                state = pickle.dumps(self.state) if changed else b""
            if not changed:
                return
            try:
                self._write(state)
            except Exception:
                self._changed = True
                raise

    def _write(self, state: bytes) -> None:
        pass


def _update(state: ControllerState, message: m.Event | m.Command) -> bool:
    match message:
        case m.StartWorker(worker=worker):
            state.here[worker] = False
        case m.WorkerStarted(worker=worker) if state.here.get(worker) is False:
            state.here[worker] = True
        case m.ReleaseWorker(worker=worker) | m.WorkerLost(worker=worker):
            known = worker in state.here or worker in state.draining
            state.here.pop(worker, None)
            state.draining.pop(worker, None)
            return known
        case m.DrainNoticed(worker=worker, deadline=deadline):
            later_s = 0.0 if deadline is None else deadline - time.monotonic()
            state.draining[worker] = None if deadline is None else (time.time() + later_s, later_s)
        case m.SizeRequested(size=size, min_workers=least):
            state.size = size
            state.min_workers = state.min_workers if least is None else least
        case m.StopRequested():
            state.stop = state.stop or message  # the first counts
        case m.CheckpointRequested():
            state.checkpoint = True
        case m.CheckpointCommitted() if state.checkpoint:
            state.checkpoint = False
        case m.FindCheckpoint(at_most=int() as at_most):
            state.at_most = at_most
        case m.FormGeneration() if state.at_most is not None:
            state.at_most = None
        case m.HeartbeatReceived(step=step) if step > 0 and not state.stepped:
            state.stepped = True
        case _:
            return False
    return True


def pending_requests(state: ControllerState, now: float) -> list[m.Event]:
    """Return the accepted requests that are not done yet; `now` is of `time.monotonic`."""
    asked: list[m.Event] = []
    for worker, known in state.draining.items():
        # Never longer than it was at first, even if the clock was set back since.
        left_s = None if known is None else min(known[0] - time.time(), known[1])
        asked.append(m.DrainNoticed(worker, None if left_s is None else now + left_s))
    if state.stop is not None:
        asked.append(state.stop)
    if state.checkpoint:
        asked.append(m.CheckpointRequested())
    return asked


def time_left_s(state: ControllerState, max_time_s: float | None) -> float:
    return math.inf if max_time_s is None else state.started_at + max_time_s - time.time()
