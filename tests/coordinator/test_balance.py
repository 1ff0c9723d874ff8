"""Virtual workers dealt by speed: what split, and when it is worth the end of a generation."""

import itertools
import random
from unittest import mock

import pytest

from elastic_dp.coordinator import balance
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.balance import MIN_GAIN, MIN_INTERVAL_S, assign_ranges, longest_s
from elastic_dp.coordinator.equal_ranges import equal_ranges
from tests.coordinator.scenes import Scene


def sizes(ranges):
    return [last - first for first, last in ranges]


# ------------------------------------------------------------------------------------ the split


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
    dealt = assign_ranges(seconds, virtual)
    assert [v for first, last in dealt for v in range(first, last)] == list(range(virtual))
    others = itertools.product(range(1, virtual + 1), repeat=ranks)
    best = min(
        max(n * s for n, s in zip(split, seconds, strict=True))
        for split in others
        if sum(split) == virtual
    )
    assert longest_s(dealt, seconds) * (1 - MIN_GAIN) <= best + 1e-9


# --------------------------------------------------------------------------- when it is worth it


def pair(**rules):
    scene = Scene(**({"size": 2, "virtual_workers": 12} | rules))
    scene.running("w1", "w2")
    scene.hear("w1", "w2", step=1)
    return scene


def measured(scene, w1=0.01, w2=0.02, step=20):
    scene.hear("w1", step=step, virtual_s=w1)
    scene.hear("w2", step=step, virtual_s=w2)
    scene.wait(1.0, step=step)
    scene.hear("w1", "w2", step=step)


def change(scene, step=20):
    for worker in scene.members:
        scene.stopped(worker, step=step)
    scene.hear(*scene.members, step=step)
    assert scene.coordinator.phase == "running", scene.coordinator.reason


def dealt(scene):
    return [member.last - member.first for member in scene.coordinator.membership.members]


def test_a_generation_ends_for_a_faster_split():
    scene = pair()
    measured(scene)
    assert scene.ever(m.EndGeneration) and not scene.ever(m.AbortGeneration)
    assert "from 120 ms to 80 ms" in scene.coordinator.reason
    assert scene.coordinator.reason.startswith("generation 1 ends: w2 needs 20 ms for a virtual")
    change(scene)
    assert dealt(scene) == [8, 4]


def test_rebalance_waits_until_all_members_are_measured():
    scene = pair()
    measured(scene, w1=0.0)
    assert scene.coordinator.phase == "running"


def test_rebalance_for_a_small_gain_does_not_happen():
    scene = pair()
    measured(scene, w2=0.0115)
    assert scene.coordinator.phase == "running"


def test_rebalance_ignores_measurements_of_another_generation():
    """The other split may have made the workers so slow."""
    scene = pair(size=3)
    measured(scene, w1=0.02)
    assert scene.coordinator.phase == "running"
    scene.ready("w3")
    scene.wait(0.1, "w1", "w2", step=20)
    change(scene)
    assert scene.members == ["w1", "w2", "w3"]
    scene.hear("w3", step=30, virtual_s=0.09)
    scene.wait(2.0, "w1", "w2", "w3", step=30)
    assert scene.coordinator.phase == "running"
    scene.hear("w1", "w2", step=40, virtual_s=0.02)
    scene.wait(2.0, "w1", "w2", "w3", step=40)
    assert scene.coordinator.phase == "ending"


def test_rebalance_again_waits_for_the_rest_time():
    scene = pair()
    measured(scene)
    change(scene)
    measured(scene, w1=0.02, w2=0.01, step=40)
    scene.wait(MIN_INTERVAL_S - 5.0, "w1", "w2", step=40)
    assert scene.coordinator.phase == "running"
    scene.wait(10.0, "w1", "w2", step=40)
    assert scene.coordinator.phase == "ending"
    change(scene, step=40)
    assert dealt(scene) == [4, 8]


def test_speeds_are_kept_in_the_next_generation():
    """Whatever ended the one before; a member without one counts as the others."""
    scene = pair(size=3)
    scene.hear("w1", step=20, virtual_s=0.01)
    scene.hear("w2", step=20, virtual_s=0.03)
    scene.ready("w3")
    scene.wait(0.1, "w1", "w2", step=20)
    change(scene)
    assert scene.members == ["w1", "w2", "w3"]
    assert dealt(scene) == [7, 2, 3], "w3 counts as 20 ms"


def test_rebalance_waits_for_a_worker_that_joins_soon():
    scene = pair(size=4, stabilization_s=5.0)
    scene.ready("w3")
    scene.tell(m.WorkerStarted("w4"))
    measured(scene)
    assert scene.coordinator.phase == "running", "w4 is about to be ready"
    scene.wait(6.0, "w1", "w2", "w3", "w4", step=20)
    assert scene.coordinator.phase == "ending"
    change(scene)
    assert scene.members == ["w1", "w2", "w3"]


def test_rebalance_does_not_happen_where_a_finished_member_is_gone():
    scene = pair()
    scene.hear("w2", step=20, virtual_s=0.02)
    scene.tell(m.WorkerFinished("w2", 1, m.TrainingPosition(20, 1), "digest"))
    scene.lost("w2")
    scene.hear("w1", step=20, virtual_s=0.01)
    scene.wait(2.0, "w1", step=20)
    assert scene.coordinator.phase == "running"


def test_rebalance_computes_no_split_where_none_could_pay():
    """Of thousands of virtual workers, that takes long."""
    scene = pair()
    with mock.patch.object(balance, "_fastest", side_effect=AssertionError("dealt")):
        measured(scene, w1=0.01, w2=0.0105)
    assert scene.coordinator.phase == "running"


# ---------------------------------------------------------------- who is too slow for any split


def slowed(step=20, w2=0.05, seconds=0.0, **rules):
    """w1 and w2 run one virtual worker each, w3 is a standby."""
    scene = pair(**({"virtual_workers": 2, "standby": 1, "slow_s": 30.0} | rules))
    scene.ready("w3")
    measured(scene, w2=w2, step=step)
    scene.wait(seconds, "w1", "w2", "w3", step=step)
    return scene


def leaves(scene):
    return scene.coordinator.phase == "ending"


def test_slow_worker_with_the_least_share_is_replaced_by_a_standby():
    scene = slowed(seconds=28.0)
    assert scene.coordinator.phase == "running"
    scene.wait(4.0, "w1", "w2", "w3", step=20)
    assert leaves(scene) and scene.coordinator.reason == "generation 1 ends: w2 drain"
    why = "the others wait for it, though it runs a single virtual worker"
    assert m.Explain(f"a standby replaces w2: {why}") in scene.all
    change(scene)
    assert scene.members == ["w1", "w3"]
    scene.hear("w1", "w3", step=21)
    assert m.ReleaseWorker("w2", why) in scene.all
    assert m.StartWorker("w4") in scene.all, "the next standby"


def test_slow_worker_by_a_small_margin_is_not_replaced():
    assert not leaves(slowed(w2=0.012, seconds=100.0))


def test_slow_worker_without_a_ready_standby_is_not_replaced():
    scene = slowed(seconds=10.0)
    scene.lost("w3")
    scene.wait(100.0, "w1", "w2", step=20)
    assert scene.coordinator.phase == "running"
    scene.ready("w4")
    scene.hear("w1", step=20)
    assert leaves(scene), "it was too slow all the time"


def test_slow_worker_that_recovered_is_not_replaced():
    scene = slowed(seconds=20.0)
    measured(scene, w2=0.01)
    measured(scene, w2=0.05)
    scene.wait(20.0, "w1", "w2", "w3", step=20)
    assert scene.coordinator.phase == "running"


def test_slow_worker_that_can_be_given_less_is_not_replaced():
    scene = slowed(virtual_workers=4, w2=0.01)
    scene.hear("w2", step=20, virtual_s=0.013)
    scene.wait(100.0, "w1", "w2", "w3", step=20)
    assert not leaves(scene), "two virtual workers each, and no split is better"


def test_slow_worker_is_not_replaced_for_another_generation():
    scene = slowed(seconds=20.0)
    scene.stopped("w1", step=20)
    scene.stopped("w2", step=20)
    scene.hear("w1", "w2", step=20)
    scene.wait(30.0, "w1", "w2", "w3", step=20)
    assert scene.coordinator.phase == "running", "not measured yet"
    measured(scene, w2=0.05)
    assert leaves(scene)


def test_slow_worker_after_another_one_is_replaced_only_after_a_while():
    scene = slowed(seconds=32.0)
    change(scene)
    scene.hear("w1", "w3", step=21)
    scene.ready("w4")
    scene.hear("w1", step=21, virtual_s=0.01)
    scene.hear("w3", step=21, virtual_s=0.05)
    scene.wait(55.0, "w1", "w3", "w4", step=21)
    assert scene.coordinator.phase == "running"
    scene.wait(10.0, "w1", "w3", "w4", step=21)
    assert leaves(scene)


def test_slow_worker_does_not_inherit_the_slow_time_of_another():
    scene = slowed(seconds=20.0)
    scene.hear("w1", step=20, virtual_s=0.05)
    scene.hear("w2", step=20, virtual_s=0.01)
    scene.wait(20.0, "w1", "w2", "w3", step=20)
    assert scene.coordinator.phase == "running"
    scene.wait(12.0, "w1", "w2", "w3", step=20)
    assert leaves(scene) and "w1 drain" in scene.coordinator.reason
