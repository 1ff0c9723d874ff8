"""When a checkpoint is due besides those at fixed steps: by time, or by its cost and benefit.

The workers know the steps, the committer knows the time. The committer requests a checkpoint from
one member, that member announces it in the header of the next step, and all members take it. The
number of losses of all workers, and the time in which they occurred, accumulate over all starts of
a run, since each checkpoint stores them. This module has no clock and no I/O.

The interval is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 22, 2006), a refinement of Young's sqrt(2 · cost · mean time between losses).
"""

from __future__ import annotations

import math

from elastic_dp.config import CheckpointConfig

_REQUEST_AGAIN_S = 30.0  # no worker may have been there to take it, or it was lost
# The prior before anything was observed: one loss of all workers in six hours, with the weight of
# half a loss.
_PRIOR_LOSSES, _PRIOR_S = 0.5, 3 * 3600.0
_FIRST_S = 50.0  # the first checkpoint measures the cost, and is there a minute after the start


class CheckpointSchedule:
    """The schedule of one run, from `began` on. Times are seconds of one clock. Not thread-safe."""

    def __init__(self, config: CheckpointConfig, now: float) -> None:
        self._config, self._began_at, self._last_at = config, now, math.inf
        self._losses, self._observed_s = 0, 0.0  # of earlier starts
        self._cost_s: float | None = None
        self._upload_s = 0.0
        self._requested = False

    def resume(self, losses: int, observed_s: float, now: float) -> None:
        """Adds what earlier starts of the run counted. The present start begins at `now`."""
        self._losses, self._observed_s = losses, observed_s
        self._began_at = now

    def began(self, now: float) -> None:
        """Records that training began: the first interval runs from here."""
        self._last_at = now

    def due_at(self, now: float) -> float:
        """Returns when to request a checkpoint, or to repeat a request; infinity for never."""
        every_s = self._config.every_s
        if every_s == "auto":
            interval_s = auto_interval_s(self._cost_s, self._upload_s, *self.observed(now))
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
        self._losses, self._requested, self._last_at = self._losses + 1, False, now

    def observed(self, now: float) -> tuple[int, float]:
        """Returns how often all workers were lost, and over how many seconds that was counted."""
        return self._losses, self._observed_s + now - self._began_at


def auto_interval_s(cost_s: float | None, upload_s: float, losses: int, observed_s: float) -> float:
    """Returns the training time between two snapshots, in seconds.

    It is at least the time of an upload: a snapshot that is not committed saves nothing. `cost_s`
    is how long a checkpoint blocks training, None before the first one; `upload_s` is the time from
    a snapshot to its commit record. All workers were lost `losses` times in `observed_s` seconds.
    """
    if cost_s is None:
        return _FIRST_S
    cost = max(cost_s, 1e-3)
    return max(daly_s(cost, mean_time_s(losses, observed_s)), upload_s)


def mean_time_s(losses: int, observed_s: float) -> float:
    """Returns the mean time between losses of all workers, in seconds: a posterior mean with the
    prior above."""
    return (_PRIOR_S + observed_s) / (_PRIOR_LOSSES + losses)


def daly_s(cost_s: float, mean_s: float) -> float:
    """Returns the interval with the least expected loss of training time, in seconds."""
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = math.sqrt(cost_s / (2 * mean_s))
    return math.sqrt(2 * cost_s * mean_s) * (1 + ratio / 3 + ratio**2 / 9) - cost_s
