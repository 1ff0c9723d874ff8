"""How long to train between two checkpoints, given their cost and how often all workers are lost.

The interval is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 22, 2006), a refinement of Young's sqrt(2 · cost · mean time between losses).
"""

from __future__ import annotations

import math

# The prior before anything was observed: one loss of all workers in six hours, with the weight of
# half a loss.
_PRIOR_LOSSES, _PRIOR_S = 0.5, 3 * 3600.0
_FIRST_S = 50.0  # the first checkpoint measures the cost, and is there a minute after the start


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
