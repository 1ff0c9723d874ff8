"""The benchmarks of what a failure costs: the simulated cluster, and how work is counted."""

import math

import pytest

from benchmarks import goodput_at_scale
from benchmarks.simulated_cluster import PER_NODE, Costs, SimulatedCluster

COSTS = Costs(
    micro_batch_s=0.5,
    per_worker=8,
    heartbeat_s=7e-6,
    message_s=1e-4,
    notice_s=0.02,
    claim_s=0.002,
    connect_s=0.003,
    copy_s=2.0,
    restore_s=3.0,
    process_s=3.0,
    warm_up_s=1.0,
    checkpoint_every_s=400.0,
)
STEP_S = COSTS.micro_batch_s * COSTS.per_worker


def price_s(fault, size=16, standby=0, after=101.3, seed=0):
    """(the simulated cluster, the seconds that a fault costs)"""
    cluster = SimulatedCluster(size, COSTS, standby=standby, seed=seed)
    cluster.run([(after, lambda: fault(cluster))], 1000.0)
    return cluster, 1000.0 - (cluster.progress - cluster.first) * STEP_S


def test_simulated_cluster_that_nothing_happens_to_makes_every_step():
    cluster, lost = price_s(lambda _: None)
    assert abs(lost) < 0.1
    assert cluster.generations == 1


@pytest.mark.parametrize("kind", ["kill_worker", "kill_node", "lose_node"])
def test_simulated_cluster_after_a_failure_is_whole_and_has_lost_seconds(kind):
    cluster, lost = price_s(lambda c: getattr(c, kind)())
    assert len(cluster.members()) == 16
    assert cluster.coordinator.phase == "running"
    assert cluster.generations == 3  # without the lost ones, and with new ones
    silence_s = 5.0 if kind == "lose_node" else 0.0
    # two changes, the copy, and until the replacement is there steps that are longer
    assert COSTS.copy_s < lost - silence_s < COSTS.copy_s + 5 * STEP_S
    assert cluster.steps_back == 0


def test_simulated_cluster_with_a_standby_has_one_change_for_a_killed_worker():
    cluster, lost = price_s(lambda c: c.kill_worker(), standby=1)
    assert cluster.generations == 2
    assert COSTS.copy_s < lost < COSTS.copy_s + 3 * COSTS.micro_batch_s


def test_simulated_cluster_goes_back_to_a_checkpoint_after_a_flipped_bit():
    cluster, lost = price_s(lambda c: c.flip())
    assert 0 < cluster.steps_back * STEP_S <= COSTS.checkpoint_every_s
    assert lost > cluster.steps_back * STEP_S
    assert len(cluster.members()) == 16


def test_simulated_cluster_that_loses_all_goes_back_to_a_checkpoint():
    cluster, _ = price_s(lambda c: c.kill_node(), size=PER_NODE)
    assert cluster.steps_back > 0
    assert len(cluster.members()) == PER_NODE


def test_simulated_cluster_follows_the_places_that_there_are():
    cluster = SimulatedCluster(16, COSTS)
    sizes = []

    def look():
        sizes.append(len(cluster.members()))

    changes = [(100.0, lambda: cluster.allow(9)), (200.0, look), (300.0, lambda: cluster.allow(16))]
    cluster.run([*changes, (400.0, look)], 500.0)
    assert sizes == [9, 16]


def test_goodput_at_scale_has_the_published_failures():
    assert goodput_at_scale.FAILURES == 419
    assert math.isclose(goodput_at_scale.GPU_S / 16384, 54 * 86400 / 419)


def test_goodput_at_scale_orders_the_ways_to_meet_a_failure():
    a = goodput_at_scale.assumptions()
    assert all(one.source for one in a.values())
    for size in (64, 4096):
        best = goodput_at_scale.best(a, size).goodput(size)
        dropped = goodput_at_scale.dropped(a, size).goodput(size)
        restarted = goodput_at_scale.restarted(a, size).goodput(size)
        looked_for = goodput_at_scale.restarted(a, size, 600.0).goodput(size)
        assert 1 > best > dropped > restarted > looked_for > 0


def test_young_daly_interval_costs_least():
    def price(every_s):
        return 2.0 / every_s + every_s / 2 / 5000.0

    every_s = goodput_at_scale.young_daly(2.0, 5000.0)
    assert price(every_s) < min(price(0.9 * every_s), price(1.1 * every_s))
    assert every_s == pytest.approx(math.sqrt(2 * 2.0 * 5000.0))
