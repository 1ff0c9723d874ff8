"""The interval of "auto", by itself; `tests/train/checkpointing/test_checkpoint_schedule.py` has it
at work."""

import math

import pytest

from elastic_dp.checkpoint.checkpoint_interval import auto_interval_s, daly_s, mean_time_s


def test_auto_follows_cost_and_losses():
    few, many = (1, 1e6), (100, 1e6)
    assert mean_time_s(*few) > 50 * mean_time_s(*many)
    assert auto_interval_s(1.0, 0.0, *few) > 5 * auto_interval_s(1.0, 0.0, *many)
    assert auto_interval_s(4.0, 0.0, *few) > 1.8 * auto_interval_s(1.0, 0.0, *few)
    assert auto_interval_s(0.001, 60.0, *many) == 60.0
    assert auto_interval_s(0.0, 0.0, *many) > 0
    assert auto_interval_s(None, 0.0, *few) < 60.0, "the first, whatever it will cost"


@pytest.mark.parametrize(("cost_s", "mean_s"), [(1.0, 900.0), (1.0, 90000.0), (30.0, 600.0)])
def test_daly_is_the_best_of_all_intervals(cost_s, mean_s):
    """Against the exact expectation for exponential losses (Daly's equation 20, without a
    restart)."""

    def wall_s(interval_s):
        return mean_s * math.expm1((interval_s + cost_s) / mean_s) / interval_s

    best = min(wall_s(daly_s(cost_s, mean_s) * factor / 100) for factor in range(20, 500))
    assert wall_s(daly_s(cost_s, mean_s)) < best + 0.001 * (best - 1)
