"""The benchmarks of what a failure costs: the simulated cluster, and how work is counted."""

import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks import goodput_at_scale, kill_in_step, report, work_lost
from benchmarks.peers.torchft_work_lost import lost_passes
from benchmarks.simulated_cluster import PER_NODE, Costs, SimulatedCluster
from benchmarks.work_lost import Kill, Pass

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


def test_work_lost_by_a_kill_is_what_ran_beyond_a_step():
    """Two workers and 32 virtual workers: one dies in step 23 after 3 micro-batches."""
    passes = [Pass(100.0 * step + i, step, "ab"[i % 2]) for step in (22, 23) for i in range(32)]
    passes = [p for p in passes if p < Pass(2306.0, 23, "")]  # three of each when "b" dies
    passes += [Pass(2310.0 + i, 23, "a") for i in range(29)]  # three were kept
    passes += [Pass(2400.0 + i, 24, "a") for i in range(32)]
    found = work_lost.judge(sorted(passes), [Kill(2306.0, "b")])
    assert found == {"lost": [3], "died": [3], "restart": [2 * 32 + 6]}


def test_work_lost_under_torchft_is_what_was_not_committed():
    committed = [(1.0, "pass", 0), (2.0, "pass", 0), (3.0, "commit", 3)]
    torn = [(4.0, "pass", 0), (5.0, "pass", 0)]
    done = [(6.0, "pass", 0), (7.0, "pass", 0), (8.0, "commit", 2)]
    assert lost_passes(committed + torn + done, 2, None) == [4.0, 5.0]
    assert lost_passes(committed + torn, 2, None) == []
    assert lost_passes(committed + torn, 2, 5.5) == [4.0, 5.0]


@pytest.mark.parametrize("name", ["work_lost", "goodput_at_scale"])
def test_plot_of_the_recorded_results_is_there(name):
    module = {"work_lost": work_lost, "goodput_at_scale": goodput_at_scale}[name]
    assert json.loads((report.RESULTS / f"{name}.json").read_text())["results"]
    assert Path(module.SVG).read_text().startswith("<?xml")


def test_simulated_cluster_has_the_delays_that_were_measured_on_real_workers():
    """`benchmarks/kill_in_step.py`: four workers, eight micro-batches of 250 ms each, and kills
    that move through the step. Quoted is how much later the step was committed."""
    real = json.loads((report.RESULTS / "kill_in_step.json").read_text())["results"]["exact"]
    costs = Costs(**{**vars(COSTS), "micro_batch_s": 0.25, "copy_s": 0.0, "process_s": 60.0})
    more = []
    for number in range(9):
        cluster = SimulatedCluster(4, costs, seed=number)
        seen = []

        def strike(c=cluster, seen=seen):
            seen.append(c.group.began(c.now) + c.group.step_s)  # when the step would have ended
            c.kill_worker()

        def look(c=cluster, seen=seen):
            seen.append(c.group.commit_at(c.group.first + 1))

        within = 0.25 * (0.5 + number * 7 / 8)
        start = SimulatedCluster(4, costs, seed=number)
        start.run([], 1.0)
        begins = start.group.began(start.begun + 21.0) + 2.0 - start.begun  # of a step
        cluster.run([(begins + within, strike), (begins + 4.0, look)], 30.0)
        more.append(seen[1] - seen[0])
    assert statistics.median(more) == pytest.approx(real["more_s_median"], abs=0.1)
    assert max(more) == pytest.approx(real["more_s_worst"], abs=0.3)


def test_a_line_that_a_killed_worker_has_not_finished_is_no_pass(tmp_path):
    (tmp_path / "w1").write_text("pass 12 7 1.5\ncommit 12 1.9\npass 13 7 2.0\npass 1")
    (tmp_path / "w2").write_text("pass 13 8 2.0\npass")
    assert kill_in_step.passes_of(str(tmp_path)) == {12: 1, 13: 2}
    assert kill_in_step.passes_of(str(tmp_path), "w1") == {12: 1, 13: 1}
