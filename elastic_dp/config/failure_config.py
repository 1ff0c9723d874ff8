"""How long a job waits for what does not answer, and how often it tries again."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_dp.config.field_checks import all_given, at_least, whole_number
from elastic_dp.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """How long to wait and how often to try.

    `heartbeat_timeout_s` is the one timeout to set; the others follow from it where they are None:
    the lease of a worker that hears no controller (2 ×), and the forming of a group (1 ×).
    `orphan_timeout_s`: workers that no controller has answered for so long end themselves, and
    drivers ask no longer (60 × the lease: 10 minutes, as long as KubeRay lets a worker node wait
    for a lost head). `hang_timeout_s`: how long a worker that lives may keep the others waiting in
    a step before it is replaced (the loop's body, evaluations and waits for data are not counted;
    six times as long where its process computes, and in its first step); None: 300 s, or 20 × the
    median step if that is longer. `compare_weights_every`: all members' weights are compared after
    so many steps, and after those that go into a checkpoint; None: never. Where they differ, all
    are replaced, and the run goes back to the newest checkpoint of when they agreed. (Not with
    `exact=False`: there, machines of different kinds may differ.) The budgets are of what may go
    wrong in a row without one committed step before the run fails, by kind, with a growing pause in
    between: `max_losses_without_progress` workers lost; `max_out_of_memory` workers that ran out of
    memory; `max_losses_of_micro_batch` workers that died while they ran one and the same
    micro-batch; `max_user_errors` exceptions of user code that are tried again, on a fresh worker
    (0: the first fails the run; errors of this package always do). What falls together is one
    incident. A worker whose node is preempted counts against none. `run_lease_s`: how long another
    cluster waits before it takes over a run whose controller renews no more. `storage_timeout_s`:
    how long a store may be away at the start, and in a run before the wait is said.
    """

    heartbeat_timeout_s: float = 5.0
    lease_s: float | None = None
    forming_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    release_timeout_s: float = 10.0
    compare_weights_every: int | None = 50
    max_losses_without_progress: int = 50
    max_losses_of_micro_batch: int = 5
    max_out_of_memory: int = 5
    max_user_errors: int = 0
    storage_timeout_s: float = 60.0
    run_lease_s: float = 60.0
    orphan_timeout_s: float | None = None

    def __post_init__(self) -> None:
        all_given("FailureConfig", self)
        at_least("FailureConfig.heartbeat_timeout_s", self.heartbeat_timeout_s, 0.1)
        at_least("FailureConfig.lease_s", self.lease_s, 0.1)
        at_least("FailureConfig.run_lease_s", self.run_lease_s, 0.5)
        at_least("FailureConfig.forming_timeout_s", self.forming_timeout_s, 0.1)
        at_least("FailureConfig.hang_timeout_s", self.hang_timeout_s, 1.0)
        at_least("FailureConfig.release_timeout_s", self.release_timeout_s, 0.0)
        whole_number("FailureConfig.compare_weights_every", self.compare_weights_every, 1)
        at_least("FailureConfig.storage_timeout_s", self.storage_timeout_s, 0.0)
        whole_number(
            "FailureConfig.max_losses_without_progress", self.max_losses_without_progress, 1
        )
        whole_number("FailureConfig.max_losses_of_micro_batch", self.max_losses_of_micro_batch, 1)
        whole_number("FailureConfig.max_out_of_memory", self.max_out_of_memory, 0)
        whole_number("FailureConfig.max_user_errors", self.max_user_errors, 0)
        at_least("FailureConfig.orphan_timeout_s", self.orphan_timeout_s, 0.1)
        if self.orphan_timeout < self.lease:
            raise SpecError(
                f"FailureConfig.orphan_timeout_s is {self.orphan_timeout_s}, less than the lease "
                f"({self.lease:g} s), after which a worker stops training; raise it"
            )

    @property
    def heartbeat_interval_s(self) -> float:
        return min(0.25, self.heartbeat_timeout_s / 8)

    @property
    def lease(self) -> float:
        return 2 * self.heartbeat_timeout_s if self.lease_s is None else self.lease_s

    @property
    def orphan_timeout(self) -> float:
        return 60 * self.lease if self.orphan_timeout_s is None else self.orphan_timeout_s

    @property
    def forming_timeout(self) -> float:
        if self.forming_timeout_s is None:
            return self.heartbeat_timeout_s
        return self.forming_timeout_s
