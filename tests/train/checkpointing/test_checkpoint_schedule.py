"""When a checkpoint is asked for, and how far "auto" is from the best interval."""

import math

import pytest

from elastic_dp.config import CheckpointConfig
from elastic_dp.train.checkpointing.checkpoint_schedule import CheckpointSchedule, auto_interval_s

AUTO = CheckpointConfig(every_s="auto")


def schedule_of(config, now):
    schedule = CheckpointSchedule(config)
    schedule.began(now)
    return schedule


def test_fixed_steps_alone_are_never_asked_for():
    assert schedule_of(CheckpointConfig(every_steps=5), 0.0).due_at() == math.inf


def test_schedule_by_time_counts_from_the_last_checkpoint():
    schedule = schedule_of(CheckpointConfig(every_s=60.0, every_steps=10), 100.0)
    assert schedule.due_at() == 160.0
    schedule.committed(0.1, 120.0)  # of a fixed step
    assert schedule.due_at() == 180.0
    schedule.requested(180.0)
    assert schedule.due_at() == 240.0
    schedule.committed(0.1, 190.0)
    assert schedule.due_at() == 240.0, "from when it was asked for"


def test_first_of_auto_is_there_within_a_minute_of_training():
    schedule = CheckpointSchedule(AUTO)
    assert schedule.due_at() == math.inf, "nothing is trained yet"
    schedule.began(300.0)
    assert schedule.due_at() <= 360.0 - 5.0


def test_asked_again_where_nobody_was_there_to_take_it():
    schedule = schedule_of(CheckpointConfig(every_s=1.0), 0.0)
    schedule.requested(1.0)
    assert schedule.due_at() == 31.0
    schedule.lost(5.0)
    assert schedule.due_at() == 6.0


def test_auto_waits_for_an_upload_and_follows_the_cost():
    schedule = schedule_of(AUTO, 0.0)
    schedule.requested(10.0)
    schedule.committed(0.001, 10_000.0)
    assert schedule.due_at() >= 10.0 + 9990.0
    assert auto_interval_s(0.001, 60.0) == 60.0
    assert 0 < auto_interval_s(0.0, 0.0) < auto_interval_s(1.0, 0.0) < auto_interval_s(60.0, 0.0)


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 30.0])
def test_auto_costs_hardly_more_than_the_best_interval(cost_s):
    """Against the exact expectation for exponential losses, one in six hours (J. T. Daly, FGCS 22,
    2006, equation 20, without a restart)."""
    mean_s = 6 * 3600.0

    def wall_s(interval_s):
        return mean_s * math.expm1((interval_s + cost_s) / mean_s) / interval_s

    auto = auto_interval_s(cost_s, 0.0)
    best = min(wall_s(auto * factor / 100) for factor in range(20, 500))
    assert wall_s(auto) < best * 1.001
