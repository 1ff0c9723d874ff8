"""The position of one worker, and whether it holds the run's state, for the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_dp.coordinator.messages import TrainingPosition

LAST_STEP = "the last step"

LogCall = tuple[int, int]  # the step of a call of ctx.log, and its number within the step's body


@dataclass
class WorkerProgress:
    """The progress of one worker. Other parts only read the fields. Each method is an event of the
    worker and updates every field that the event changes."""

    position: TrainingPosition = field(default_factory=lambda: TrainingPosition(0))
    has_state: bool = False
    lineage_id: int = 0  # the generation whose source gave the initial weights
    joined_after: int = 0  # the step with whose state this worker began
    ended: str | None = None  # why the run has ended
    evaluations: list[dict[str, float]] = field(default_factory=list)  # of the present step's body
    evaluations_begun: int = 0
    logged: LogCall | None = None  # the last call of ctx.log, if it is known
    loop_left_with: tuple[int, LogCall | None] | None = None  # evaluations_begun and logged

    def step_committed(self, step: int, *, is_last: bool) -> None:
        self.position = TrainingPosition(step, int(is_last))
        self.ended = LAST_STEP if is_last else None
        self.evaluations = []
        self.evaluations_begun = 0

    def stop_agreed(self, reason: str) -> None:
        self.ended, self.position = reason, self.position._replace(ended=1)

    def logs(self) -> tuple[LogCall, LogCall | None]:
        """Counts a call of ctx.log. Returns it, and the call before it."""
        step, previous = self.position.step, self.logged
        self.logged = step, _calls_in(step, previous) + 1
        return self.logged, previous

    def evaluation_begins(self) -> int:
        """Starts an evaluation. Returns its number within the body."""
        self.evaluations_begun += 1
        return self.evaluations_begun - 1

    def evaluation_committed(self, result: dict[str, float]) -> None:
        self.evaluations.append(result)
        self.position = self.position._replace(evaluations=len(self.evaluations))

    def loop_left(self) -> None:
        self.loop_left_with = self.evaluations_begun, self.logged

    def of_finished_bodies(self) -> tuple[int, LogCall | None]:
        """Returns the number of evaluations and the last call of ctx.log, for a joiner. It runs no
        body that this worker has run, and it runs all that follows the loop."""
        return self.loop_left_with or (self.evaluations_begun, self.logged)

    def has_initial_state(self, lineage_id: int) -> None:
        """Records that this worker holds the state with which generation `lineage_id` begins. The
        state consists of its own weights or those of a checkpoint."""
        self.has_state, self.lineage_id = True, lineage_id

    def log_calls_of_body(self) -> int:
        """Returns how often the body of the present step, which has ended, called ctx.log."""
        _, logged = self.of_finished_bodies()
        return _calls_in(self.position.step, logged)

    def restored(
        self, step: int, evaluations: list[dict[str, float]], log_calls: int, *, is_last: bool
    ) -> None:
        """Records a restored checkpoint, of a body that called ctx.log `log_calls` times."""
        self.evaluations = evaluations
        self.evaluations_begun = len(evaluations)
        self.ended = LAST_STEP if is_last else None
        self.position = TrainingPosition(step, int(is_last), len(evaluations))
        self.logged = (step, log_calls) if log_calls else None

    def joined(self, evaluations_begun: int, logged: LogCall | None) -> None:
        """Records `of_finished_bodies` of the source of the state."""
        self.evaluations_begun, self.logged = evaluations_begun, logged

    def took_over(
        self,
        position: TrainingPosition,
        evaluations: list[dict[str, float]],
        ended: str | None,
        lineage_id: int,
    ) -> None:
        if not self.has_state:
            self.joined_after = position.step
        self.evaluations, self.ended = evaluations, ended
        self.position, self.has_state, self.lineage_id = position, True, lineage_id


def _calls_in(step: int, last: LogCall | None) -> int:
    """Returns how often ctx.log was called in `step`, if `last` is the last call."""
    return last[1] if last is not None and last[0] == step else 0
