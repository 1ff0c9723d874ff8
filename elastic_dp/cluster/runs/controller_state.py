"""What a controller must not forget when its process dies: which generations it claimed, and a few facts of the run.

All else it learns anew from the workers. The facts are small, and written as one value when one of them changed, which
is when workers come and go, when an operator asks for something, at the first step, and at the end.

An operator's request is kept before it is acknowledged, and the outcome before anybody is told to go.
"""

from __future__ import annotations

import math
import pickle
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.coordinator.messages import (
    CheckpointRequested,
    CheckpointSealed,
    Command,
    DrainNoticed,
    Event,
    FindCheckpoint,
    FormGeneration,
    ReleaseWorker,
    SizeRequested,
    StartWorker,
    StopRequested,
    WorkerHeard,
    WorkerId,
    WorkerLost,
    WorkerStarted,
)


@dataclass
class Facts:
    """Times are of `time.time`: who takes over may be another machine."""

    started_at: float = field(default_factory=time.time)
    lease_token: str = field(default_factory=lambda: secrets.token_hex(8))
    term: int = 1  # the number of the controller: of how many it is the newest
    size: int | None = None  # what an operator asked for
    min_workers: int | None = None  # likewise
    stop: StopRequested | None = None  # to end before the run's limits
    checkpoint: bool = False  # one was asked for, and none was sealed since
    # The deadline, and how long it was until then when the notice came; None: none is known.
    draining: dict[WorkerId, tuple[float, float] | None] = field(default_factory=dict)
    here: dict[WorkerId, bool] = field(default_factory=dict)  # asked for, not to leave: was it up?
    lost: int = 0
    stepped: bool = False  # a step was made
    at_most: int | None = None  # later steps are wrong, and nobody has gone back yet
    outcome: Any = None  # how the run ended


class Ledger:
    """In memory, for a controller that dies with its run."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._lock = threading.Lock()
        self._changed = True

    @property
    def inherited(self) -> bool:
        """Whether another controller led before."""
        return self.facts.term > 1

    def claim(self, generation: int) -> bool:
        """Create the generation's key; whether it was not there."""
        return True

    def highest_claimed(self) -> int:
        return 0

    def note(self, message: Event | Command) -> None:
        """Something has happened, or is about to be done, of which these facts may tell."""
        with self._lock:
            self._changed |= _noted(self.facts, message)

    def lost(self) -> None:
        """One more worker, before the end, that was not asked to leave."""
        with self._lock:
            self.facts.lost += 1
            self._changed = True

    def ended(self, outcome: Any) -> None:
        with self._lock:
            self.facts.outcome, self._changed = outcome, True
        self.keep()

    def keep(self) -> None:
        """Write the facts if they changed; who returns from here has them kept."""
        with self._lock:
            if self._changed:
                self._write(pickle.dumps(self.facts))
                self._changed = False

    def _write(self, facts: bytes) -> None:
        pass


def _noted(facts: Facts, message: Event | Command) -> bool:
    match message:
        case StartWorker(worker=worker):
            facts.here[worker] = False
        case WorkerStarted(worker=worker) if facts.here.get(worker) is False:
            facts.here[worker] = True
        case ReleaseWorker(worker=worker) | WorkerLost(worker=worker):
            known = worker in facts.here or worker in facts.draining
            facts.here.pop(worker, None)
            facts.draining.pop(worker, None)
            return known
        case DrainNoticed(worker=worker, deadline=deadline):
            later_s = 0.0 if deadline is None else deadline - time.monotonic()
            facts.draining[worker] = None if deadline is None else (time.time() + later_s, later_s)
        case SizeRequested(size=size, min_workers=least):
            facts.size = size
            facts.min_workers = facts.min_workers if least is None else least
        case StopRequested():
            facts.stop = facts.stop or message  # the first counts
        case CheckpointRequested():
            facts.checkpoint = True
        case CheckpointSealed() if facts.checkpoint:
            facts.checkpoint = False
        case FindCheckpoint(at_most=int() as at_most):
            facts.at_most = at_most
        case FormGeneration() if facts.at_most is not None:
            facts.at_most = None
        case WorkerHeard(step=step) if step > 0 and not facts.stepped:
            facts.stepped = True
        case _:
            return False
    return True


def requests(facts: Facts, now: float) -> list[Event]:
    """What is still to be done of what was asked of the controller before; `now` is of `time.monotonic`."""
    asked: list[Event] = []
    for worker, known in facts.draining.items():
        # Never longer than it was, also where the clock was set back meanwhile.
        left_s = None if known is None else min(known[0] - time.time(), known[1])
        asked.append(DrainNoticed(worker, None if left_s is None else now + left_s))
    if facts.stop is not None:
        asked.append(facts.stop)
    if facts.checkpoint:
        asked.append(CheckpointRequested())
    return asked


def time_left_s(facts: Facts, max_time_s: float | None) -> float:
    return math.inf if max_time_s is None else facts.started_at + max_time_s - time.time()
