"""When a checkpoint is asked for, and how far "auto" is from the best that could be done."""

import math
import random

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


def lost_s(losses_at, end_s, cost_s, interval):
    """Time that went into checkpoints and into redoing, for `interval(now, lost)` seconds between
    checkpoints."""
    now, lost, pending = 0.0, 0.0, list(losses_at)
    begun = False
    while now < end_s:
        work = interval(now, begun)
        begun = bool(pending and pending[0] < now + work + cost_s)
        if begun:
            lost += pending[0] - now
            now = pending.pop(0)
        else:
            lost += cost_s
            now += work + cost_s
    return lost


class AtWork:
    """A schedule as the committer drives it; every third loss of everyone ends the controller, too,
    and a commit record knows the rest."""

    def __init__(self, cost_s):
        self.cost_s, self.schedule, self.kept, self.lost = (
            cost_s,
            schedule_of(AUTO, 0.0),
            (0, 0.0),
            0,
        )

    def interval_s(self, now, lost):
        """Training begins at `now`, after a loss of everyone or a checkpoint."""
        if lost:
            self.lost += 1
            if self.lost % 3 == 0:
                self.schedule = schedule_of(AUTO, now)
                self.schedule.resume(*self.kept, now)
            self.schedule.lost(now)
        elif now:
            self.schedule.committed(self.cost_s, now)
            self.kept = self.schedule.observed(now)
            self.schedule.requested(now)  # training goes on from here: as if it was asked for now
            self.schedule.committed(self.cost_s, now)
        due_s = self.schedule.due_at(now) - now
        for _ in range(3):  # it moves on while time goes by
            due_s = self.schedule.due_at(now + due_s) - now
        return due_s


@pytest.mark.parametrize("mean_s", [900.0, 9000.0, 90000.0])
@pytest.mark.parametrize("cost_s", [0.2, 5.0])
def test_auto_loses_little_more_than_the_best_fixed_interval(mean_s, cost_s):
    """Over a time with thirty losses on average, from the first second on, in which it knows
    nothing; 8 histories."""
    end_s, auto, best = 30 * mean_s, 0.0, 0.0
    for seed in range(8):
        chance, at, losses = random.Random(seed), 0.0, []
        while at < end_s:
            at += chance.expovariate(1 / mean_s)
            losses.append(at)
        auto += lost_s(losses, end_s, cost_s, AtWork(cost_s).interval_s)
        best += lost_s(losses, end_s, cost_s, lambda now, lost: daly_s(cost_s, mean_s))
    assert auto < 1.3 * best, auto / best


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
