"""The run as every part of the coordinator sees it: its config, where it stands and why, and what is to be said.

`reason` is said once, when it changes; what is said is collected here and handed out after each fact.
"""

import heapq
import math
from collections.abc import Iterable
from enum import StrEnum

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.coordinator_config import CoordinatorConfig
from elastic_dp.protocol.messages import Command, WorkerId


class Phase(StrEnum):
    GATHERING = "gathering"
    CLAIMING = "claiming"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    TAKING_OVER = "taking over"
    OVER = "over"


IN_FLIGHT = frozenset({Phase.FORMING, Phase.RUNNING, Phase.ENDING})


class Timers:
    """When to look again at what; each is set once, and rings even if it means nothing any more."""

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap
        self._at: dict[float, dict[tuple[str, WorkerId], None]] = {}  # each in the order of setting
        self.due = math.inf  # when the next ones ring

    def wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        if at == math.inf:
            return
        if at not in self._at:
            self._at[at] = {}
            heapq.heappush(self._times, at)
            self.due = self._times[0]
        self._at[at][kind, worker] = None

    def pop(self) -> Iterable[tuple[str, WorkerId]]:
        """What the next ones were set for."""
        at = heapq.heappop(self._times)
        self.due = self._times[0] if self._times else math.inf
        return self._at.pop(at)

    def clear(self) -> None:
        self._times.clear()
        self._at.clear()
        self.due = math.inf


class RunState:
    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.size, self.min_workers = config.size, config.min_workers
        self.phase = Phase.GATHERING
        self.reason = ""
        self.stop: m.StopRequested | None = None  # it was asked to end
        self.timers = Timers()
        self._out: list[Command] = []

    @property
    def least(self) -> int:
        """How many members a generation must have."""
        return 1 if self.stop is not None else min(self.min_workers, self.size)

    @property
    def in_flight(self) -> bool:
        return self.phase in IN_FLIGHT

    def emit(self, command: Command) -> None:
        self._out.append(command)

    def explain(self, text: str) -> None:
        self._out.append(m.Explain(text))

    def say(self, reason: str) -> None:
        """Why things are as they are; said once, when it changes."""
        if reason != self.reason:
            self.reason = reason
            self.explain(reason)

    def flush(self) -> list[Command]:
        out, self._out = self._out, []
        return out
