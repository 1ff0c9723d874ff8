"""How long to train between two checkpoints, by what one costs and how often everyone is lost.

The interval is Daly's (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", FGCS 22, 2006), a refinement of Young's sqrt(2 · cost · mean time between losses).
"""

from __future__ import annotations

import math

# What is believed before anything was seen: a loss of everyone in six hours, with the weight of
# half a loss.
_PRIOR_LOSSES, _PRIOR_S = 0.5, 3 * 3600.0
_FIRST_COST_S = 1.0  # until one checkpoint was measured


def auto_interval_s(cost_s: float | None, upload_s: float, losses: int, observed_s: float) -> float:
    """Of training time between two snapshots. Never shorter than an upload: a snapshot that is not
    committed saves nothing.

    `cost_s`: what a checkpoint takes from training, None before the first; `upload_s`: from its
    snapshot to its commit record. `losses`: how often everyone was lost in `observed_s`.
    """
    cost = _FIRST_COST_S if cost_s is None else max(cost_s, 1e-3)
    return max(daly_s(cost, mean_time_s(losses, observed_s)), upload_s)


def mean_time_s(losses: int, observed_s: float) -> float:
    """Between losses of everyone: the posterior mean of a rate with the prior above."""
    return (_PRIOR_S + observed_s) / (_PRIOR_LOSSES + losses)


def daly_s(cost_s: float, mean_s: float) -> float:
    """The interval with the least expected loss, for a cost per checkpoint and a mean time between
    losses."""
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = math.sqrt(cost_s / (2 * mean_s))
    return math.sqrt(2 * cost_s * mean_s) * (1 + ratio / 3 + ratio**2 / 9) - cost_s
