"""Which ranks share a node or a zone, and which virtual workers a node runs."""

import itertools

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerLocation
from elastic_dp.coordinator.planning.equal_ranges import equal_ranges, ranges_by_node
from elastic_dp.coordinator.planning.topology import order_by_location, topology_of
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState
from elastic_dp.distributed.reduction_tree import cover
from tests.coordinator.scenarios import Scenario


def workers(*nodes, start=0):
    """One on each of `nodes`, numbered: "a/n" is node n of zone a, "" is not known."""
    made = []
    for number, name in enumerate(nodes, start):
        zone, _, node = name.rpartition("/")
        location = WorkerLocation(node, zone=zone)
        made.append(WorkerState(f"{name or '?'}{number}", number, Stage.READY, 0.0, location))
    return made


@pytest.mark.parametrize(
    ("staying", "joining", "order"),
    [
        ((), ("x", "y", "x", "y"), "x0 x2 y1 y3"),
        ((), ("x", "y", "y"), "y1 y2 x0"),
        ((), ("a/x", "b/y", "b/z", "a/x"), "a/x0 a/x3 b/y1 b/z2"),
        ((), ("a/x", "b/y", "b/z"), "b/y1 b/z2 a/x0"),
        ((), ("", "x", "", "x"), "x1 x3 ?0 ?2"),
        (("x", "y"), ("y", "x", "z"), "x0 x3 y1 y2 z4"),
        (("x", "y", "x"), ("x",), "x0 y1 x2 x3"),
        (("a/x", "b/y"), ("a/z", "b/y", "a/x"), "a/x0 a/x4 a/z2 b/y1 b/y3"),
        (("", ""), ("x", "", "x"), "?0 ?1 x2 x4 ?3"),
    ],
)
def test_joiners_come_beside_members_of_their_node_and_those_who_stay_keep_their_order(
    staying, joining, order
):
    made = order_by_location(workers(*staying), workers(*joining, start=len(staying)))
    assert " ".join(worker.id for worker in made) == order


@pytest.mark.parametrize(
    ("members", "topology"),
    [
        ("x x y y", ((2, 2),)),
        ("x x x", ()),
        ("x y z", ()),
        ("x y y", ((1, 2),)),
        ("a/x a/y b/z", ((2, 1),)),
        ("a/w a/w a/x b/y b/z", ((2, 1, 1, 1), (3, 2))),
        ("a/x a/x b/y b/y", ((2, 2),)),
        ("x y x", ()),
    ],
)
def test_topology_has_the_levels_at_which_some_but_not_all_members_share(members, topology):
    assert topology_of(workers(*members.split())) == topology


def test_members_whose_location_is_not_known_share_nothing():
    assert topology_of(workers("", "", "")) == ()


@pytest.mark.parametrize("nodes", [*itertools.product((1, 2, 3, 8), repeat=3)], ids=str)
def test_ranges_by_node_are_as_short_as_equal_ones(nodes):
    for virtual_workers in (sum(nodes), sum(nodes) + 1, 24, 32, 100):
        world_size = sum(nodes)
        ranges = ranges_by_node(virtual_workers, nodes)
        assert [v for first, last in ranges for v in range(first, last)] == [
            *range(virtual_workers)
        ]
        longest = max(last - first for first, last in equal_ranges(virtual_workers, world_size))
        assert min(last - first for first, last in ranges) >= 1
        assert max(last - first for first, last in ranges) == longest


@pytest.mark.parametrize(
    ("virtual_workers", "nodes", "subtrees"),
    [
        (8, (4, 4), [1, 1]),
        (16, (3, 4), [1, 1]),  # equal ranges have 2 and 2
        (32, (7, 8, 8, 8), [1, 1, 1, 1]),
        (32, (8, 7, 8, 8), [1, 1, 1, 1]),
        (8, (4, 2, 1, 1), [1, 1, 1, 1]),
        (10, (2, 2), [1, 2]),
        (8, (3, 1), [2, 1]),  # without slack
    ],
)
def test_range_of_a_node_is_whole_subtrees_wherever_the_numbers_allow(
    virtual_workers, nodes, subtrees
):
    ranges = iter(ranges_by_node(virtual_workers, nodes))
    of_nodes = [list(itertools.islice(ranges, count)) for count in nodes]
    found = [cover(one[0][0], one[-1][1], virtual_workers) for one in of_nodes]
    assert [len(nodes) for nodes in found] == subtrees


def ranges_of(scenario):
    membership = scenario.coordinator.membership
    return {member.worker: member.ranges for member in membership.members}


def test_loss_on_one_node_leaves_the_virtual_workers_of_other_nodes_where_they_are():
    """So they keep the rows that they have read ahead, and what they have finished of the step."""
    scenario = Scenario(size=8, virtual_workers=16, min_workers=1)
    everyone = [f"w{number}" for number in range(1, 9)]
    for number, worker in enumerate(everyone):
        scenario.tell(m.WorkerPlaced(worker, WorkerLocation("xy"[number % 2])))
    scenario.running(*everyone)
    membership = scenario.coordinator.membership
    assert membership.topology == ((4, 4),)
    assert [member.worker for member in membership.members] == [
        f"w{number}" for number in (1, 3, 5, 7, 2, 4, 6, 8)
    ]
    before = ranges_of(scenario)
    scenario.lost("w3")
    for worker in everyone:
        if worker != "w3":
            scenario.stopped(worker, step=1)
    after = ranges_of(scenario)
    assert scenario.coordinator.membership.topology == ((3, 4),)
    on_the_other_node = ("w2", "w4", "w6", "w8")
    assert [after[worker] for worker in on_the_other_node] == [
        before[worker] for worker in on_the_other_node
    ]
