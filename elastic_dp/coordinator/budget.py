"""How much may go wrong without a step in between, by kind, and how long to pause after it.

What is counted is not workers but incidents: a rack that goes takes fifty workers in one incident,
while a sample that kills its worker makes a new one each time. So a loss is new if the generation
that it broke was formed after the last incident, or if the worker was asked for after it.

Workers that are lost, workers that run out of memory, and errors of the user's code each have a
budget of their own. A preemption has none. Whoever dies while it runs a micro-batch is counted
against that, too: one that crashes each worker that runs it, wherever that is, would otherwise use
up the fleet.
"""

from dataclasses import dataclass, field

from elastic_dp.coordinator.coordinator_config import CoordinatorConfig
from elastic_dp.wording import counted

FREE = 3  # losses that cost no pause
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Budget:
    limit: int
    free: int = 0  # incidents that cost no pause
    incidents: int = 0
    _generation: int = -1
    _identities: int = 0
    _before: tuple[int, int] = (-1, 0)  # of these two, the last incident

    def counts(self, generation: int, number: int, identities: int) -> bool:
        """A loss in `generation` of the worker with `number`; `identities` were given out so
        far."""
        if self._is_known(generation, number):
            return False
        self._before = self._generation, self._identities
        self._generation, self._identities = generation, identities
        self.incidents += 1
        return True

    def take_back(self) -> None:
        """The last incident was none."""
        if self.incidents:
            self.incidents -= 1
            self._generation, self._identities = self._before

    def forgive(self) -> None:
        self.incidents = 0

    def allows(self, generation: int, number: int) -> bool:
        """Whether such a loss would leave something of it."""
        return self._is_known(generation, number) or self.incidents < self.limit

    def _is_known(self, generation: int, number: int) -> bool:
        """It is part of the last incident."""
        known = generation <= self._generation and number <= self._identities
        return self.incidents > 0 and known

    @property
    def exhausted(self) -> bool:
        return self.incidents > self.limit

    @property
    def pause_s(self) -> float:
        if self.incidents <= self.free:
            return 0.0
        return float(
            min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.incidents - self.free - 1, 16))
        )


@dataclass(slots=True)
class Budgets:
    config: CoordinatorConfig
    losses: Budget = field(init=False)
    memory: Budget = field(init=False)
    errors: Budget = field(init=False)
    _micro_batches: dict[tuple[int, int], int] = field(default_factory=dict)  # deaths in each
    _deadly: tuple[int, int] | None = None  # the first of them that is over its limit
    _furthest: int = 0

    def __post_init__(self) -> None:
        self.losses = Budget(self.config.max_losses_without_progress, FREE)
        self.memory = Budget(self.config.max_out_of_memory)
        self.errors = Budget(self.config.max_user_errors)

    def progressed(self, step: int) -> bool:
        """Whether all is forgiven: a run that went back to a checkpoint has to come further than
        before."""
        if step <= self._furthest:
            return False
        self._furthest = step
        for budget in (self.losses, self.memory, self.errors):
            budget.forgive()
        for at in [at for at in self._micro_batches if at[0] <= step]:
            del self._micro_batches[at]
        return True

    def died_in(self, step: int, virtual_worker: int) -> None:
        """What was once passed kills nobody by itself."""
        if step > self._furthest:
            at = step, virtual_worker
            self._micro_batches[at] = deaths = self._micro_batches.get(at, 0) + 1
            if deaths > self.config.max_losses_of_micro_batch:
                self._deadly = self._deadly or at

    def did_not_die_in(self, step: int, virtual_worker: int) -> None:
        """It was taken away meanwhile."""
        at = step, virtual_worker
        if at in self._micro_batches:
            self._micro_batches[at] -= 1

    def exhausted(self, last: str) -> str:
        """Why the run has to fail, in words; empty while it has not. `last`: what happened last."""
        if self._deadly is not None:
            step, virtual_worker = self._deadly
            died = counted(self._micro_batches[self._deadly], "worker")
            return (
                f"{died} died while they ran virtual worker {virtual_worker} of step {step}, "
                "one after another: its rows, or the code that runs on them, end the "
                "process (a segmentation "
                "fault, memory, an assert on the device)"
            )
        if self.memory.exhausted:
            return (
                f"workers ran out of memory {counted(self.memory.incidents, 'time')} without "
                f"a step in between; last: {last}. "
                "Lower micro_batch_size or DataConfig.memory_bytes (a checkpoint takes one "
                "more state), ask for more "
                'by resources_per_worker={"memory": …}, or raise FailureConfig.max_out_of_memory'
            )
        if self.losses.exhausted:
            return (
                f"{counted(self.losses.incidents, 'loss', 'losses')} without a step in between; "
                f"last: {last}"
            )
        return ""
