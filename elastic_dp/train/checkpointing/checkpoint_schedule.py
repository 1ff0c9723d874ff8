"""When a checkpoint is wanted besides those that lie at fixed steps: by time, or by what one costs and saves.

The workers know the steps, the sealer knows the time: it wants one, a member says so in the next step's header, and
all take it. How often everyone was lost, and in how much time, is learned over all starts of a run: the seals keep it.
Here is no clock and no I/O.
"""

from __future__ import annotations

import math

from elastic_dp.checkpoint.interval import auto_interval_s
from elastic_dp.spec import CheckpointConfig

_ASK_AGAIN_S = 30.0  # nobody may have been there to take it, or it was lost


class CheckpointSchedule:
    """Times are of one clock, in seconds. Of one thread."""

    def __init__(self, config: CheckpointConfig, now: float) -> None:
        self._config, self._began_at, self._kept_at = config, now, now
        self._losses, self._observed_s = 0, 0.0  # of earlier starts
        self._cost_s: float | None = None
        self._upload_s = 0.0
        self._asked = False

    def resume(self, losses: int, observed_s: float, now: float) -> None:
        """What earlier starts of the run have seen; this one begins now."""
        self._losses, self._observed_s = losses, observed_s
        self._began_at = self._kept_at = now

    def due_at(self, now: float) -> float:
        """When to ask for one, or to ask again; infinity: never."""
        interval_s = math.inf if self._config.every_s is None else self._config.every_s
        if self._config.every == "auto":
            seen = self.observed(now)
            interval_s = min(interval_s, auto_interval_s(self._cost_s, self._upload_s, *seen))
        return self._kept_at + max(interval_s, _ASK_AGAIN_S if self._asked else 0.0)

    def asked(self, now: float) -> None:
        self._asked, self._kept_at = True, now

    def sealed(self, stall_s: float, now: float) -> None:
        """A checkpoint took `stall_s` from the training; it was sealed now."""
        self._cost_s = stall_s
        if self._asked:
            self._upload_s = now - self._kept_at
        else:  # at a fixed step
            self._kept_at = now
        self._asked = False

    def lost(self, now: float) -> None:
        """Everyone was, and with them what was asked for."""
        self._losses, self._asked, self._kept_at = self._losses + 1, False, now

    def observed(self, now: float) -> tuple[int, float]:
        """Losses of everyone, and the time in which there were so many."""
        return self._losses, self._observed_s + now - self._began_at
