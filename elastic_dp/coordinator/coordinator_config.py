"""The coordinator's configuration: numbers of workers, timeouts and limits."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """What the job and its operator fix for the coordinator. All times are in seconds.

    `size` is the number of members to aim for (max_workers); `standby` more workers are kept warm.

    A member may block the others only as long as its heartbeats arrive, so `heartbeat_timeout_s`
    alone decides whether a worker counts as dead. `gather_timeout_s` limits how long a planned end
    waits for the other members once one has stopped; it also delays the log line that says which
    members the run waits for.
    """

    min_workers: int = 1
    size: int = 1
    standby: int = 0
    virtual_workers: int = 1
    balances: bool = True  # whether faster workers get more virtual workers
    exact: bool = True  # whether all workers must be of one kind of machine
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    lease_s: float = 10.0  # a worker whose heartbeats are not answered for so long stops training
    forming_timeout_s: float = 30.0
    gather_timeout_s: float = 10.0
    release_timeout_s: float = 30.0  # a released worker that has not left by then is evicted
    # a ready joiner waits so long for others, so a burst causes one change
    join_window_s: float = 0.05
    # A ready joiner waits at most so long for workers that build their model, and so long after the
    # last join.
    stabilization_s: float = 0.0
    # a draining worker leaves so long before the deadline of its notice
    drain_margin_s: float = 5.0
    # wait for an initial source; then a worker is released for a new one
    source_timeout_s: float = 60.0
    steps_ahead: int = 2  # steps between the last one that heartbeats foretell and a planned end
    hang_timeout_s: float | None = None  # None: see `hang_detector.HangDetector`
    # How many failures a run survives without a committed step in between, by kind.
    max_losses_without_progress: int = 20
    max_losses_of_micro_batch: int = 5  # workers that died while running the same micro-batch
    max_out_of_memory: int = 5
    max_user_errors: int = 0
    checkpointing: bool = False  # whether there is storage for checkpoints
    max_rejections: int = 3  # workers that do not fit and are replaced
    max_failed_joins: int = 3  # of one worker, before it is replaced
