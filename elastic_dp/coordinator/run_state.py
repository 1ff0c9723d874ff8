"""State that every part of the coordinator shares: configuration, sizes, phase, timers, commands.

Commands are collected here and returned after each event. `reason` is explained once, when it
changes.
"""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.coordinator.messages import Command
from elastic_dp.coordinator.phases import IN_FLIGHT, Phase, PhaseMachine, Transition
from elastic_dp.coordinator.timers import Timers


class RunState:
    """The shared state of a run."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.requested_size, self.min_workers = config.size, config.min_workers
        self.limit: int | None = None  # what other runs of the cluster leave; None: no limit
        self.reason = ""
        self.stop: m.StopRequested | None = None  # the request to end the run, if there was one
        self.timers = Timers()
        self._machine = PhaseMachine()
        self._out: list[Command] = []

    @property
    def phase(self) -> Phase:
        return self._machine.phase

    @property
    def in_flight(self) -> bool:
        """Whether a generation was announced and has not ended."""
        return self._machine.phase in IN_FLIGHT

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

    def apply(self, transition: Transition) -> None:
        """Change the phase; see `PhaseMachine`."""
        self._machine.apply(transition)

    def resize(self, size: int, min_workers: int) -> None:
        self.requested_size, self.min_workers = size, min_workers

    def limit_size(self, most: int | None) -> None:
        self.limit = most

    def request_stop(self, event: m.StopRequested) -> None:
        self.stop = event

    def end(self, reason: str) -> None:
        """End the run: only the release of workers follows. The caller may report `reason`."""
        self.apply(Transition.RUN_ENDED)
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
