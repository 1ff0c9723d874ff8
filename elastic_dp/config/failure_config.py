"""How long a job waits for missing answers, and how often it tries again."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_dp.config.field_checks import check_fields
from elastic_dp.config.removed_names import refuses_removed_names
from elastic_dp.errors import SpecError

_LEAST = {
    **dict.fromkeys(("heartbeat_timeout_s", "forming_timeout_s", "orphan_timeout_s"), 0.1),
    **{"hang_timeout_s": 1.0, "run_lease_s": 0.5, "storage_timeout_s": 0.0, "replace_slow": 1.0},
    **{"compare_weights_every": 1, "max_losses_without_progress": 1, "max_user_errors": 0},
}


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """When the loss jumps, and what the run does then: it goes on from an earlier checkpoint,
    without the rows of the steps around the jump. The weights are the same bits on any fleet.

    - `factor`: a loss of more than so many times the median of the last `window` losses, or one
      that is not finite. Of a median below 0: as far above it.
    - `window`: nothing is a jump before so many steps have been made.
    - `before`, `after`: the rows of so many steps before the jump and after it are left out. The
      run goes back to its newest checkpoint from before them.
    - `at_most`: how often, rewinds by hand included. After that, a jump changes nothing, and a loss
      that is not finite fails the run.
    """

    factor: float = 3.0
    window: int = 100
    before: int = 100
    after: int = 100
    at_most: int = 3

    def __post_init__(self) -> None:
        check_fields(self, factor=1.0, window=1, before=0, after=0, at_most=1)


@refuses_removed_names
@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """Timeouts in seconds, and limits on failures.

    `heartbeat_timeout_s` is the one timeout to set; those that are None follow from it.

    - `heartbeat_timeout_s`: a worker that sends no heartbeat for this long is evicted. After twice
      as long (the lease), a worker that no controller has answered stops training, and one that was
      asked to leave is killed.
    - `forming_timeout_s`: how long a group may take to form (default: `heartbeat_timeout_s`).
    - `hang_timeout_s`: how long a live worker may keep the others waiting in a step before it is
      replaced. The loop body, evaluations and waits for data do not count. The limit is six times
      as long while its process computes, and in its first step. Default: 300 s, or 20 × the median
      step if that is longer.
    - `compare_weights_every`: compare the weights of all members after each step that is a multiple
      of this, and after every step that is checkpointed; None: never. If they differ, all members
      are replaced, and the run goes back to the newest checkpoint from before. (Not with
      `exact=False`, where machines of different kinds may differ.)
    - `max_losses_without_progress`: lost workers. Less is allowed of workers that ran out of memory
      (5), and of those that died while running the same micro-batch (5).
    - `max_user_errors`: exceptions of user code that are retried on a new worker. 0: the first one
      fails the run; errors of this package always do.
    - `on_spike`: what to do when the loss jumps (see `Rewind`). None: nothing; a loss that is not
      finite fails the run.
    - `replace_slow`: a worker that slows the run down for so many seconds is replaced, on another
      node if there is one; three at most. None: it is only named.
    - `storage_timeout_s`: how long a store may be unavailable at the start; during a run, how long
      before the wait is reported.
    - `run_lease_s`: how long another cluster waits before it takes over a run whose controller no
      longer renews its lease.
    - `orphan_timeout_s`: workers that no controller has answered for this long exit, and drivers
      stop asking (default: 60 × the lease: 10 minutes, as long as KubeRay lets a worker node wait
      for a lost head).

    The `max_…` budgets limit failures in a row, without a committed step in between, before
    the run fails; the pauses between attempts grow. Failures at the same time count as one. A
    worker whose node is preempted counts against no budget.
    """

    heartbeat_timeout_s: float = 5.0
    forming_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    compare_weights_every: int | None = 50
    max_losses_without_progress: int = 50
    max_user_errors: int = 0
    on_spike: Rewind | None = None
    replace_slow: float | None = None
    storage_timeout_s: float = 60.0
    run_lease_s: float = 60.0
    orphan_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, **_LEAST)
        if not isinstance(self.on_spike, Rewind | None):
            raise SpecError(
                f"FailureConfig.on_spike is a {type(self.on_spike).__name__}, must be a Rewind"
            )
        if self.orphan_timeout < self.lease:
            raise SpecError(
                f"FailureConfig.orphan_timeout_s is {self.orphan_timeout_s}, less than the lease "
                f"({self.lease:g} s), after which a worker stops training; raise it"
            )

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats of a worker."""
        return min(0.25, self.heartbeat_timeout_s / 8)

    @property
    def lease(self) -> float:
        """Seconds after which a worker that no controller has answered stops training, and one that
        was asked to leave is killed."""
        return 2 * self.heartbeat_timeout_s

    @property
    def orphan_timeout(self) -> float:
        """The orphan timeout in seconds."""
        return 60 * self.lease if self.orphan_timeout_s is None else self.orphan_timeout_s

    @property
    def forming_timeout(self) -> float:
        """The forming timeout in seconds."""
        if self.forming_timeout_s is None:
            return self.heartbeat_timeout_s
        return self.forming_timeout_s
