"""When a checkpoint is due, other than at fixed steps: by time, or by what it costs."""

from __future__ import annotations

import math

from elastic_dp.config import CheckpointConfig

_REQUEST_AGAIN_S = 30.0  # no worker may have been there to take it, or it was lost
_BETWEEN_LOSSES_S = 6 * 3600.0
_FIRST_S = 50.0  # the first checkpoint measures the cost, and is there a minute after the start


class CheckpointSchedule:
    """Not thread-safe, and without a clock: times are seconds of one clock.

    The workers know the steps, the committer knows the time. It requests a checkpoint from one
    member, that member announces it in the header of the next step, and all members take it.

    The interval is Young's, sqrt(2 · cost · mean time between losses of all workers). That time is
    taken to be six hours: the interval depends on its root alone, so a run that loses all workers
    every hour does 0.4 checkpoints where the best would be one.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config, self._last_at = config, math.inf
        self._cost_s: float | None = None
        self._upload_s = 0.0
        self._requested = False

    def began(self, now: float) -> None:
        """Records that training began: the first interval runs from here."""
        self._last_at = now

    def due_at(self) -> float:
        """Returns when to request a checkpoint, or to repeat a request; infinity for never."""
        every_s = self._config.every_s
        if every_s == "auto":
            interval_s = auto_interval_s(self._cost_s, self._upload_s)
        else:
            interval_s = math.inf if every_s is None else float(every_s)
        return self._last_at + max(interval_s, _REQUEST_AGAIN_S if self._requested else 0.0)

    def requested(self, now: float) -> None:
        """Records that a checkpoint was requested."""
        self._requested, self._last_at = True, now

    def committed(self, stall_s: float, now: float) -> None:
        """Records that a checkpoint was committed, which blocked training for `stall_s`."""
        self._cost_s = stall_s
        if self._requested:
            self._upload_s = now - self._last_at
        else:  # at a fixed step
            self._last_at = now
        self._requested = False

    def lost(self, now: float) -> None:
        """Records that all workers were lost, and a requested checkpoint with them."""
        if self._last_at < math.inf:
            self._requested, self._last_at = False, now


def auto_interval_s(cost_s: float | None, upload_s: float) -> float:
    """Returns the training time between two snapshots, in seconds. It is at least the time of an
    upload: a snapshot that is not committed saves nothing. `cost_s` is how long a checkpoint blocks
    training, None before the first one; `upload_s` is the time from a snapshot to its commit
    record."""
    if cost_s is None:
        return _FIRST_S
    return max(math.sqrt(2 * max(cost_s, 1e-3) * _BETWEEN_LOSSES_S), upload_s)
