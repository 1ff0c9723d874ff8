"""State that every part of the coordinator shares: configuration, sizes, phase, timers, commands.

Commands are collected here and returned after each event. `reason` is explained once, when it
changes. The phases of a run:

    gathering    no generation; waits for enough workers, and until it is safe to continue
    claiming     waits until the number of the next generation is claimed, so that no other
                 controller has it; usually it is by now, since it is claimed while ending
    forming      a membership was announced; its members connect, and members without state
                 receive it
    running      all members are past forming
    ending       the generation was told to end, at a step (planned) or now (abort); waits for
                 every member
    taking over  a coordinator that replaces another asks every worker for its state
    over         finished, failed, or another controller leads

    gathering -> claiming -> gathering -> forming -> running -> ending -> gathering -> ...

The phase changes only here, as `NEXT` says. Any other change is a bug.
"""

import heapq
import math
from collections.abc import Iterable
from enum import StrEnum

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Command, WorkerId


class Phase(StrEnum):
    """The phases, described above."""

    GATHERING = "gathering"
    CLAIMING = "claiming"
    FORMING = "forming"
    RUNNING = "running"
    ENDING = "ending"
    TAKING_OVER = "taking over"
    OVER = "over"


IN_FLIGHT = frozenset({Phase.FORMING, Phase.RUNNING, Phase.ENDING})

NEXT: dict[Phase, set[Phase]] = {
    Phase.GATHERING: {Phase.CLAIMING, Phase.FORMING, Phase.TAKING_OVER, Phase.OVER},
    Phase.CLAIMING: {Phase.GATHERING, Phase.OVER},
    Phase.FORMING: {Phase.RUNNING, Phase.ENDING, Phase.GATHERING, Phase.OVER},
    Phase.RUNNING: {Phase.ENDING, Phase.GATHERING, Phase.OVER},
    Phase.ENDING: {Phase.ENDING, Phase.GATHERING, Phase.OVER},
    Phase.TAKING_OVER: {Phase.ENDING, Phase.OVER},
    Phase.OVER: set(),
}


class Timers:
    """A queue of timers, each with a kind and perhaps a worker. A timer fires once, even if it no
    longer has a meaning.
    """

    def __init__(self) -> None:
        self._times: list[float] = []  # a heap
        # by time, in the order in which they were set
        self._at: dict[float, dict[tuple[str, WorkerId], None]] = {}
        self.due = math.inf  # when the next timers fire

    def wake(self, at: float, kind: str = "", worker: WorkerId = "") -> None:
        """Set a timer for time `at`; inf sets none."""
        if at == math.inf:
            return
        if at not in self._at:
            self._at[at] = {}
            heapq.heappush(self._times, at)
            self.due = self._times[0]
        self._at[at][kind, worker] = None

    def take_due(self) -> Iterable[tuple[str, WorkerId]]:
        """Remove the next timers and return their kinds and workers."""
        at = heapq.heappop(self._times)
        self.due = self._times[0] if self._times else math.inf
        return self._at.pop(at)

    def cancel_all(self) -> None:
        self._times.clear()
        self._at.clear()
        self.due = math.inf


class RunState:
    """The shared state of a run."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.requested_size, self.min_workers = config.size, config.min_workers
        self.limit: int | None = None  # what other runs of the cluster leave; None: no limit
        self.reason = ""
        self.stop: m.StopRequested | None = None  # the request to end the run, if there was one
        self.timers = Timers()
        self.phase = Phase.GATHERING
        self._out: list[Command] = []

    @property
    def in_flight(self) -> bool:
        """Whether a generation was announced and has not ended."""
        return self.phase in IN_FLIGHT

    @property
    def size(self) -> int:
        """The number of members to aim for."""
        if self.limit is None:
            return self.requested_size
        return min(self.requested_size, max(self.limit, self.min_workers))

    @property
    def min_members(self) -> int:
        """How many members a generation must have."""
        return 1 if self.stop is not None else min(self.min_workers, self.size)

    def enter(self, phase: Phase) -> None:
        """Change the phase. Raises ValueError if it cannot follow the present one."""
        if phase not in NEXT[self.phase]:
            raise ValueError(f"{phase} cannot follow {self.phase}")
        self.phase = phase

    def end(self, reason: str) -> None:
        """End the run: only the release of workers follows. The caller may report `reason`."""
        self.enter(Phase.OVER)
        self.reason = reason
        self.timers.cancel_all()

    def emit(self, command: Command) -> None:
        self._out.append(command)

    def explain(self, text: str) -> None:
        self._out.append(m.Explain(text))

    def set_reason(self, reason: str) -> None:
        """Set the reason for the present state, and explain it if it has changed."""
        if reason != self.reason:
            self.reason = reason
            self.explain(reason)

    def flush(self) -> list[Command]:
        out, self._out = self._out, []
        return out
