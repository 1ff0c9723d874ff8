"""When a checkpoint is asked for, and how far "auto" is from the best that could be done."""

import math

import pytest

from elastic_dp.config import CheckpointConfig
from elastic_dp.train.checkpointing.checkpoint_schedule import (
    CheckpointSchedule,
    auto_interval_s,
    daly_s,
)

AUTO = CheckpointConfig(every_s="auto")


def schedule_of(config, now):
    schedule = CheckpointSchedule(config, now)
    schedule.began(now)
    return schedule


def test_fixed_steps_alone_are_never_asked_for():
    assert schedule_of(CheckpointConfig(every_steps=5), 0.0).due_at(1e6) == math.inf


def test_schedule_by_time_counts_from_the_last_checkpoint():
    schedule = schedule_of(CheckpointConfig(every_s=60.0, every_steps=10), 100.0)
    assert schedule.due_at(100.0) == 160.0
    schedule.committed(0.1, 120.0)  # of a fixed step
    assert schedule.due_at(120.0) == 180.0
    schedule.requested(180.0)
    assert schedule.due_at(180.0) == 240.0
    schedule.committed(0.1, 190.0)
    assert schedule.due_at(190.0) == 240.0, "from when it was asked for"


def test_first_of_auto_is_there_within_a_minute_of_training():
    schedule = CheckpointSchedule(AUTO, 0.0)
    schedule.resume(0, 3e6, 0.0)
    assert schedule.due_at(300.0) == math.inf, "nothing is trained yet"
    schedule.began(300.0)
    assert schedule.due_at(300.0) <= 360.0 - 5.0


def test_asked_again_where_nobody_was_there_to_take_it():
    schedule = schedule_of(CheckpointConfig(every_s=1.0), 0.0)
    schedule.requested(1.0)
    assert schedule.due_at(1.0) == 31.0
    schedule.lost(5.0)
    assert schedule.due_at(5.0) == 6.0


def test_auto_waits_for_an_upload_and_follows_what_was_seen():
    schedule = schedule_of(AUTO, 0.0)
    schedule.requested(10.0)
    schedule.committed(0.001, 10_000.0)
    assert schedule.due_at(10_000.0) >= 10.0 + 9990.0
    calm, bad = schedule_of(AUTO, 0.0), schedule_of(AUTO, 0.0)
    for seen, losses in ((calm, 1), (bad, 100)):
        seen.resume(losses, 1e6, 0.0)
        seen.requested(0.0)
        seen.committed(1.0, 0.0)
    assert calm.due_at(0.0) > 5 * bad.due_at(0.0)
    bad.lost(50.0)
    assert bad.observed(70.0) == (101, 1e6 + 70.0)


def test_auto_is_at_least_an_upload_and_above_nothing():
    assert auto_interval_s(0.001, 60.0, 100, 1e6) == 60.0
    assert auto_interval_s(0.0, 0.0, 100, 1e6) > 0


@pytest.mark.parametrize(("cost_s", "mean_s"), [(1.0, 900.0), (1.0, 90000.0), (30.0, 600.0)])
def test_daly_is_the_best_of_all_intervals(cost_s, mean_s):
    """Against the exact expectation for exponential losses (Daly's equation 20, without a
    restart)."""

    def wall_s(interval_s):
        return mean_s * math.expm1((interval_s + cost_s) / mean_s) / interval_s

    best = min(wall_s(daly_s(cost_s, mean_s) * factor / 100) for factor in range(20, 500))
    assert wall_s(daly_s(cost_s, mean_s)) < best + 0.001 * (best - 1)
