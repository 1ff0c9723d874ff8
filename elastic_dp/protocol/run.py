"""The run as every part of the coordinator sees it: its rules, where it stands and why, and what is to be said.

`reason` is said once, when it changes; what is said is collected here and handed out after each fact.
"""

import heapq
import math
from enum import StrEnum

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import Command, WorkerId
from elastic_dp.protocol.rules import Rules


class Phase(StrEnum):
    GATHERING = "gathering"
    CLAIMING = "claiming"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    SURVEYING = "surveying"
    OVER = "over"


IN_FLIGHT = frozenset({Phase.FORMING, Phase.RUNNING, Phase.ENDING})


class Alarms:
    """When to look again at what; each is set once, and rings even if it means nothing any more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, WorkerId]] = []
        self._set: set[tuple[float, str, WorkerId]] = set()
        self.due = math.inf  # when the next one rings

    def wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        alarm = (at, kind, worker)
        if at < math.inf and alarm not in self._set:
            self._set.add(alarm)
            heapq.heappush(self._heap, alarm)
            self.due = self._heap[0][0]

    def pop(self) -> tuple[str, WorkerId]:
        """What the next one was set for."""
        alarm = heapq.heappop(self._heap)
        self._set.discard(alarm)
        self.due = self._heap[0][0] if self._heap else math.inf
        return alarm[1:]

    def clear(self) -> None:
        self._heap.clear()
        self._set.clear()
        self.due = math.inf


class Run:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.size = rules.size
        self.phase = Phase.GATHERING
        self.reason = ""
        self.stop: str | None = None  # why it was asked to end
        self.alarms = Alarms()
        self._out: list[Command] = []

    @property
    def least(self) -> int:
        """How many members a generation must have."""
        return 1 if self.stop is not None else min(self.rules.min_workers, self.size)

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
