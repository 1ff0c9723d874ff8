"""What a job and its operator fix for the coordinator: numbers of workers, and how long to wait for
what."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """`size` is the number of members aimed at (max_workers); `standby` more are kept warm beside
    them.

    A member may only be waited for as long as it is heard, so the one timeout that decides about
    life is `heartbeat_timeout_s`; `gather_timeout_s` bounds how long a planned end may stay polite
    once somebody has stopped, and says when waiting is worth a line in the log.
    """

    min_workers: int = 1
    size: int = 1
    standby: int = 0
    virtual_workers: int = 1
    exact: bool = True  # whether all workers must be of one kind
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    lease_s: float = 10.0  # an unanswered worker stops after this; nobody else goes on before
    forming_timeout_s: float = 30.0
    gather_timeout_s: float = 10.0
    release_timeout_s: float = 30.0  # one that was asked to leave is evicted after this
    join_window_s: float = 0.05  # a ready joiner waits so long for others: a burst makes one change
    # A ready joiner waits at most this long for those who build, and for as long after the last
    # join.
    stabilization_s: float = 0.0
    min_on_demand: int = 0  # so many on nodes that stay are left when some must go
    drain_margin_s: float = 5.0  # be gone this long before the deadline of a notice
    source_timeout_s: float = 60.0  # nobody's weights count yet and nobody fresh starts: make room
    steps_ahead: int = 2  # a planned end lies this far beyond what the heartbeats foretell
    slow_s: float = 300.0  # one that all wait for, and that runs the least, is replaced after this
    hang_timeout_s: float | None = None  # None: see `progress.HangDetector`
    max_losses_without_progress: int = 20
    max_losses_of_micro_batch: int = 5  # that died while they ran it
    max_out_of_memory: int = 5  # likewise without progress
    max_user_errors: int = 0
    keeps: bool = False  # whether there is a storage for checkpoints
    max_rejections: int = 3  # workers that do not fit and are replaced; further ones are not
    max_failed_joins: int = 3  # of one worker, before it is replaced

    def __post_init__(self) -> None:
        for name in ("min_workers", "size", "virtual_workers", "max_losses_without_progress"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not self.min_workers <= self.size <= self.virtual_workers:
            raise ValueError(
                f"min_workers {self.min_workers} <= size {self.size} <= virtual_workers "
                f"{self.virtual_workers} does not hold"
            )
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout_s must exceed heartbeat_interval_s")
