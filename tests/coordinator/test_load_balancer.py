"""Virtual workers assigned by speed: what split, and when it is worth the end of a generation."""

import itertools
import random
from unittest import mock

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.planning import load_balancer
from elastic_dp.coordinator.planning.equal_ranges import equal_ranges
from elastic_dp.coordinator.planning.load_balancer import MIN_GAIN, assign_ranges, longest_s
from tests.coordinator.scenarios import Scenario


def sizes(ranges):
    return [last - first for first, last in ranges]


def test_deal_gives_half_as_many_to_a_worker_that_needs_twice_as_long():
    assert assign_ranges([1.0, 2.0], 12) == ((0, 8), (8, 12))
    assert sizes(assign_ranges([3.0, 1.0, 3.0], 15)) == [3, 9, 3]


def test_deal_gives_every_worker_at_least_one():
    assert sizes(assign_ranges([1.0, 1e6, 1.0], 10)) == [5, 1, 4]


def test_deal_without_measurements_or_with_little_gain_is_even():
    assert assign_ranges([0.0, 0.0, 0.0], 8) == equal_ranges(8, 3)
    assert assign_ranges([1.0, 1.05], 64) == equal_ranges(64, 2)


def test_deal_counts_an_unmeasured_worker_as_the_median():
    assert assign_ranges([1.0, 0.0, 4.0, 1.0], 26) == assign_ranges([1.0, 1.0, 4.0, 1.0], 26)


@pytest.mark.parametrize("seed", range(30))
def test_no_split_is_faster_by_more_than_the_margin(seed):
    rng = random.Random(seed)
    ranks, virtual = rng.randint(1, 3), rng.randint(3, 12)
    seconds = [rng.choice((1.0, 1.3, 2.0, 5.0)) for _ in range(ranks)]
    assigned = assign_ranges(seconds, virtual)
    assert [v for first, last in assigned for v in range(first, last)] == list(range(virtual))
    others = itertools.product(range(1, virtual + 1), repeat=ranks)
    best = min(
        max(n * s for n, s in zip(split, seconds, strict=True))
        for split in others
        if sum(split) == virtual
    )
    assert longest_s(assigned, seconds) * (1 - MIN_GAIN) <= best + 1e-9


def pair(**config):
    scenario = Scenario.training("w1", "w2", virtual_workers=12, **config)
    scenario.hear("w1", "w2", step=1)
    return scenario


def measured(scenario, w1=0.01, w2=0.02, step=20):
    scenario.hear("w1", step=step, virtual_s=w1)
    scenario.hear("w2", step=step, virtual_s=w2)
    scenario.wait(1.0, step=step)
    scenario.hear("w1", "w2", step=step)


def assigned(scenario):
    return [member.num_virtual_workers for member in scenario.coordinator.membership.members]


def test_a_generation_ends_for_a_faster_split():
    scenario = pair()
    measured(scenario)
    assert scenario.ever(m.EndGeneration) and not scenario.ever(m.AbortGeneration)
    assert "from 120 ms to 80 ms" in scenario.coordinator.reason
    assert scenario.coordinator.reason.startswith("generation 1 ends: w2 needs 20 ms for a virtual")
    scenario.change(step=20)
    assert assigned(scenario) == [8, 4]


def test_rebalance_for_a_small_gain_does_not_happen():
    scenario = pair()
    measured(scenario, w2=0.0115)
    assert scenario.coordinator.phase == "running"


def test_speeds_are_kept_in_the_next_generation():
    """Whatever ended the one before; a member without one counts as the others."""
    scenario = pair(size=3)
    scenario.hear("w1", step=20, virtual_s=0.01)
    scenario.hear("w2", step=20, virtual_s=0.03)
    scenario.ready("w3")
    scenario.wait(0.1, "w1", "w2", step=20)
    scenario.change(step=20)
    assert scenario.members == ["w1", "w2", "w3"]
    assert assigned(scenario) == [7, 2, 3], "w3 counts as 20 ms"


def test_rebalance_waits_for_a_worker_that_joins_soon():
    scenario = pair(size=4, stabilization_s=5.0)
    scenario.ready("w3")
    scenario.tell(m.WorkerStarted("w4"))
    measured(scenario)
    assert scenario.coordinator.phase == "running", "w4 is about to be ready"
    scenario.wait(6.0, "w1", "w2", "w3", "w4", step=20)
    assert scenario.coordinator.phase == "ending"
    scenario.change(step=20)
    assert scenario.members == ["w1", "w2", "w3"]


def test_rebalance_does_not_happen_where_a_finished_member_is_gone():
    scenario = pair()
    scenario.hear("w2", step=20, virtual_s=0.02)
    scenario.tell(m.WorkerFinished("w2", 1, m.TrainingPosition(20, 1), "digest"))
    scenario.lost("w2")
    scenario.hear("w1", step=20, virtual_s=0.01)
    scenario.wait(2.0, "w1", step=20)
    assert scenario.coordinator.phase == "running"


def test_rebalance_computes_no_split_where_none_could_pay():
    """A split of thousands of virtual workers takes long to compute."""
    scenario = pair()
    with mock.patch.object(load_balancer, "_fastest", side_effect=AssertionError("assigned")):
        measured(scenario, w1=0.01, w2=0.0105)
    assert scenario.coordinator.phase == "running"
