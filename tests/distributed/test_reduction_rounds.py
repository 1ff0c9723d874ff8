"""What crosses from node to node in the exchange of gradients, and that the sum stays the same."""

import itertools
import random
from itertools import accumulate, pairwise

import pytest

from elastic_dp.coordinator.planning.equal_ranges import ranges_by_node
from elastic_dp.distributed.reduction_tree import add_up, cover, reduction_rounds
from tests.distributed.test_reduction_tree import whole

Topology = tuple[tuple[int, ...], ...]
Shares = list[list[tuple[int, int]]]
LAYOUTS = {
    2: [()],
    3: [((2, 1),), ((1, 2),)],
    4: [((2, 2),), ((3, 1),), ((2, 1, 1), (3, 1))],
    5: [((2, 3),), ((1, 3, 1),)],
    6: [((3, 3),), ((2, 2, 2),), ((4, 1, 1), (4, 2)), ((2, 2, 2), (4, 2))],
    7: [((4, 3),), ((1, 5, 1),)],
    8: [((4, 4),), ((2, 2, 2, 2), (4, 4)), ((7, 1),), ((3, 3, 2),), ((2, 6),)],
}
EVERY = [(size, topology) for size, layouts in LAYOUTS.items() for topology in layouts]


def shares_of(world_size, virtual_workers, topology):
    nodes = topology[0] if topology else (world_size,)
    return [[one] for one in ranges_by_node(virtual_workers, nodes)]


def shuffled(shares, seed):
    """Return as many virtual workers for each rank, but any."""
    leaves = list(range(max(last for share in shares for _, last in share)))
    random.Random(seed).shuffle(leaves)
    given = iter(leaves)
    sizes = [sum(last - first for first, last in share) for share in shares]
    return [ranges_of(sorted(itertools.islice(given, size))) for size in sizes]


def ranges_of(leaves):
    found = []
    for leaf in leaves:
        first = found.pop()[0] if found and found[-1][1] == leaf else leaf
        found.append((first, leaf + 1))
    return found


def rounds_of_all(world_size, virtual_workers, topology, shares=None):
    shares = shares or shares_of(world_size, virtual_workers, topology)
    ranks = range(world_size)
    return shares, [reduction_rounds(r, shares, virtual_workers, topology) for r in ranks]


def exchanged(shares, rounds, virtual_workers):
    """The final part of each rank, symbolically: each chunk of a sum is (chunk, tree)."""
    ranks = range(len(shares))
    held = [
        [
            [(chunk, whole(node)) for chunk in ranks]
            for one in share
            for node in cover(*one, virtual_workers)
        ]
        for share in shares
    ]
    for number in range(len(rounds[0])):
        inboxes = [[[] for _ in rounds[r][number].sent] for r in ranks]
        for sender in ranks:
            for j, sizes in enumerate(rounds[sender][number].sent):
                cuts = pairwise(accumulate(sizes, initial=0))
                assert sum(sizes) == (len(held[sender][j]) if j < len(held[sender]) else 0)
                for receiver, (first, last) in enumerate(cuts):
                    assert rounds[receiver][number].received[j][sender] == last - first
                    if last > first:
                        inboxes[receiver][j] += held[sender][j][first:last]
        for rank in ranks:
            mine, arrived = rounds[rank][number], {}
            for nodes, inbox in zip(mine.nodes, inboxes[rank], strict=True):
                assert len(inbox) == len(nodes) * mine.owned
                for index, node in enumerate(nodes):
                    arrived[node] = inbox[index * mine.owned : (index + 1) * mine.owned]
            held[rank] = [add_up(arrived, root, added) for root in mine.sums]
    return held


def added(one, other, _):
    assert [chunk for chunk, _ in one] == [chunk for chunk, _ in other]
    return [(chunk, (a, b)) for (chunk, a), (_, b) in zip(one, other, strict=True)]


@pytest.mark.parametrize(("world_size", "topology"), EVERY, ids=str)
@pytest.mark.parametrize("extra", [0, 1, 3, 8])
def test_rank_ends_with_its_part_of_the_whole_tree(world_size, topology, extra):
    virtual_workers = world_size + extra
    shares, rounds = rounds_of_all(world_size, virtual_workers, topology)
    assert {len(mine) for mine in rounds} == {len(topology) + 1}
    tree = whole((0, virtual_workers))
    finished = [[[(rank, tree)]] for rank in range(world_size)]
    assert exchanged(shares, rounds, virtual_workers) == finished
    for seed in range(4):  # as where survivors keep what they had
        shares, rounds = rounds_of_all(
            world_size, virtual_workers, topology, shuffled(shares, seed)
        )
        assert exchanged(shares, rounds, virtual_workers) == finished


def chunks_between(groups, rounds):
    """Chunks that ranks of different `groups` send each other."""
    group_of = [number for number, size in enumerate(groups) for _ in range(size)]
    return sum(
        size
        for sender, of_sender in enumerate(rounds)
        for one in of_sender
        for sizes in one.sent
        for receiver, size in enumerate(sizes)
        if group_of[sender] != group_of[receiver]
    )


@pytest.mark.parametrize(("nodes", "members"), [(2, 2), (2, 4), (4, 2), (4, 8), (3, 4)])
def test_chunks_between_nodes_fall_by_the_number_of_members_of_a_node(nodes, members):
    sizes, world_size = (members,) * nodes, nodes * members
    _, flat = rounds_of_all(world_size, world_size, ())
    _, by_node = rounds_of_all(world_size, world_size, (sizes,))
    before, after = chunks_between(sizes, flat), chunks_between(sizes, by_node)
    assert before == members * after
    assert after == nodes * (nodes - 1) * members


def test_chunks_between_zones_fall_by_the_number_of_members_of_a_zone():
    zones, nodes = (4, 4), (2, 2, 2, 2)
    _, flat = rounds_of_all(8, 8, ())
    _, by_node = rounds_of_all(8, 8, (nodes,))
    _, by_zone = rounds_of_all(8, 8, (nodes, zones))
    crossing = [chunks_between(zones, rounds) for rounds in (flat, by_node, by_zone)]
    assert crossing == [32, 16, 8]
