"""When a checkpoint is due besides those at fixed steps: by time, or by what a checkpoint costs and
saves.

The workers know the steps, the committer knows the time: it requests a checkpoint, a member says so
in the next step's header, and all members take it. How often all workers were lost, and in how much
time, is counted over all starts of a run, since each checkpoint stores it. This module has no clock
and no I/O.
"""

from __future__ import annotations

import math

from elastic_dp.checkpoint.checkpoint_interval import auto_interval_s
from elastic_dp.config import CheckpointConfig

_REQUEST_AGAIN_S = 30.0  # perhaps no worker was there to take it, or it was lost


class CheckpointSchedule:
    """All times are seconds of one clock. Not thread-safe."""

    def __init__(self, config: CheckpointConfig, now: float) -> None:
        self._config, self._began_at, self._last_at = config, now, now
        self._losses, self._observed_s = 0, 0.0  # of earlier starts
        self._cost_s: float | None = None
        self._upload_s = 0.0
        self._requested = False

    def resume(self, losses: int, observed_s: float, now: float) -> None:
        """Add what earlier starts of the run have counted. This one begins now."""
        self._losses, self._observed_s = losses, observed_s
        self._began_at = self._last_at = now

    def due_at(self, now: float) -> float:
        """When to request a checkpoint, or to request it again; infinity: never."""
        interval_s = math.inf if self._config.every_s is None else self._config.every_s
        if self._config.every == "auto":
            seen = self.observed(now)
            interval_s = min(interval_s, auto_interval_s(self._cost_s, self._upload_s, *seen))
        return self._last_at + max(interval_s, _REQUEST_AGAIN_S if self._requested else 0.0)

    def requested(self, now: float) -> None:
        self._requested, self._last_at = True, now

    def committed(self, stall_s: float, now: float) -> None:
        """A checkpoint is committed now. It stopped training for `stall_s`."""
        self._cost_s = stall_s
        if self._requested:
            self._upload_s = now - self._last_at
        else:  # at a fixed step
            self._last_at = now
        self._requested = False

    def lost(self, now: float) -> None:
        """All workers were lost, and the requested checkpoint with them."""
        self._losses, self._requested, self._last_at = self._losses + 1, False, now

    def observed(self, now: float) -> tuple[int, float]:
        """How often all workers were lost, and the time over which that was counted."""
        return self._losses, self._observed_s + now - self._began_at
