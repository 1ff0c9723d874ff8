"""Many who come, and who goes: a burst makes one change or two, and a smaller run gives whole nodes
back."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerLocation
from elastic_dp.coordinator.planning.scale_down import choose_departing
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState
from tests.coordinator.scenarios import Scenario


def alone(**config):
    """w1 trains; five places are free."""
    scenario = Scenario(**({"size": 6, "stabilization_s": 5.0} | config))
    scenario.running("w1")
    return scenario


def joins(scenario):
    return scenario.coordinator.phase == "ending"


def test_a_joiner_waits_for_who_builds_and_for_nobody_else():
    scenario = alone()
    scenario.tell(m.WorkerStarted("w3"))
    scenario.ready("w2")
    scenario.wait(1.0, "w1", "w3")
    assert not joins(scenario), "w3 will be ready soon"
    scenario.ready("w3")
    scenario.wait(0.1, "w1")
    assert joins(scenario), "w4 may never come"
    scenario.change()
    assert scenario.members == ["w1", "w2", "w3"]


def test_joiner_after_a_dead_joiner_starts_a_new_join_window():
    scenario = alone()
    scenario.tell(m.WorkerStarted("w3"))
    scenario.ready("w2")
    scenario.lost("w2")
    scenario.wait(6.0, "w1", "w3")
    scenario.ready("w4")
    assert not joins(scenario), "w3 will be ready soon"


def test_full_group_waits_for_no_builder():
    scenario = alone(size=2, standby=1)
    scenario.tell(m.WorkerStarted("w3"))
    scenario.ready("w2")
    assert joins(scenario)


def test_five_nodes_in_three_seconds_make_two_changes():
    """Also where nobody is seen to build: each is ready as soon as it has started."""
    scenario = alone(size=8)
    before, here = scenario.coordinator.generation, ["w1"]
    for late in ("w2", "w3", "w4", "w5", "w6"):
        scenario.ready(late)
        here.append(late)
        scenario.wait(0.6, *here, step=1)
        if joins(scenario):
            scenario.change()
    scenario.wait(5.0, *here, step=1)
    if joins(scenario):
        scenario.change()
    assert len(scenario.members) == 6
    assert scenario.coordinator.generation - before == 2


def test_a_drain_does_not_wait_for_a_burst():
    scenario = alone(min_workers=1)
    scenario.tell(m.WorkerStarted("w3"))
    scenario.ready("w2")
    assert not joins(scenario)
    scenario.tell(m.DrainNoticed("w1", scenario.now + 6.0))
    assert joins(scenario)


def placed(scenario, **nodes):
    """By worker: its node, of the spot market where it begins with s."""
    for worker, node in nodes.items():
        scenario.tell(m.WorkerPlaced(worker, WorkerLocation(node, spot=node.startswith("s"))))


def stay_after(size, *drained, **nodes):
    """Who stays when these are told to go, and then the run is made smaller."""
    scenario = Scenario.training(*nodes)
    placed(scenario, **nodes)
    for worker in drained:
        scenario.tell(m.DrainNoticed(worker, None))
    scenario.tell(m.SizeRequested(size))
    scenario.change()
    return scenario.members


def test_a_smaller_run_gives_whole_nodes_back():
    assert stay_after(2, w1="a", w2="b", w3="a", w4="b") == ["w1", "w3"]
    assert stay_after(3, w1="a", w2="b", w3="b", w4="a", w5="c") == ["w2", "w3", "w5"]


def test_scale_down_releases_spot_workers_first():
    assert stay_after(2, w1="s1", w2="a", w3="s2", w4="b") == ["w2", "w4"]
    assert stay_after(3, w1="a", w2="s1", w3="s1", w4="a") == ["w1", "w2", "w4"]


def test_a_node_that_somebody_leaves_anyhow_is_emptied_first():
    """Before spot ones, and before those with more workers."""
    assert stay_after(3, "w1", w1="a", w2="a", w3="b", w4="s1", w5="b") == ["w3", "w4", "w5"]
    assert stay_after(3, "w1", w1="a", w2="a", w3="a", w4="b", w5="b") == ["w2", "w4", "w5"]


def test_scale_down_releases_from_the_node_with_the_fewest_workers():
    workers = [worker(n, node) for n, node in enumerate("aaabb", 1)]
    (first,) = choose_departing(workers, 1)
    assert (first[0].id, first[1]) == ("w5", "other workers stay on its node")


def test_a_node_that_others_stay_on_is_not_emptied():
    standby = worker(9, "b")
    chosen = choose_departing([worker(1, "a"), worker(2, "b")], 1, [standby])
    assert [(w.id, why) for w, why in chosen] == [("w1", "its node a becomes free")]


def test_scale_down_releases_workers_without_a_node_first():
    chosen = choose_departing([worker(1, "s"), worker(2, ""), worker(3, ""), worker(4, "a")], 3)
    assert [w.id for w, _ in chosen] == ["w3", "w2", "w1"]
    assert choose_departing([worker(1, "a")], 3)[0][0].id == "w1"
    assert choose_departing([worker(1, "a")], -1) == []


def test_standbys_leave_by_node_too():
    scenario = Scenario.training("w1", "w2", standby=2)
    scenario.ready("w3", "w4")
    placed(scenario, w1="a", w2="a", w3="b", w4="a")
    scenario.tell(m.SizeRequested(1))
    (released,) = scenario.of(m.ReleaseWorker)
    assert released == m.ReleaseWorker("w3", "the size is 1 now; its node b becomes free")


def worker(number, node):
    made = WorkerState(f"w{number}", number, Stage.MEMBER, 0.0)
    made.location = WorkerLocation(node, spot=node.startswith("s"))
    return made
