"""Who holds which piece: two members each, balanced, on two nodes, and little moves."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_dp.distributed.piece_assignment import assign_pieces
from elastic_dp.train.state.state_moves import plan_rounds

MIB = 1 << 20


def sizes_of(rng, count):
    return [rng.choice([MIB, MIB, MIB, rng.randint(0, MIB)]) for _ in range(count)]


def loads(holders, sizes, world_size):
    """What each rank holds, and of what it is the primary."""
    all_, primary = [0] * world_size, [0] * world_size
    for one, size in zip(holders, sizes, strict=True):
        primary[one.primary] += size
        for rank in one.ranks:
            all_[rank] += size
    return all_, primary


def moved(holders, held, sizes):
    return sum(sizes[n] for n, _ in missing(holders, held))


def missing(holders, held):
    """Pieces, and ranks that are to get them."""
    pairs = enumerate(zip(holders, held, strict=True))
    return [(n, rank) for n, (one, ranks) in pairs for rank in set(one.ranks) - ranks]


def least_bytes_to_move(sizes, world_size, held):
    """A number of bytes below which no balanced assignment is reached: each copy that is missing
    is made once, and a rank that holds less than its part is given the rest."""
    copies = min(2, world_size)
    missing = sum(
        size * max(0, copies - len(ranks)) for size, ranks in zip(sizes, held, strict=True)
    )
    part = copies * sum(sizes) // world_size - max(sizes, default=0)
    has = [0] * world_size
    for size, ranks in zip(sizes, held, strict=True):
        for rank in ranks:
            has[rank] += size
    return max(missing, sum(max(0, part - one) for one in has))


def check(holders, sizes, world_size):
    assert all(len(set(one.ranks)) == min(2, world_size) for one in holders)
    assert all(0 <= rank < world_size for one in holders for rank in one.ranks)
    held, primary = loads(holders, sizes, world_size)
    assert max(held) - min(held) <= 2 * max(sizes)
    assert max(primary) - min(primary) <= 2 * max(sizes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 16])
def test_each_piece_has_two_holders_and_loads_are_equal(world_size):
    sizes = sizes_of(random.Random(world_size), 300)
    holders = assign_pieces(sizes, world_size)
    check(holders, sizes, world_size)
    assert holders == assign_pieces(sizes, world_size)
    assert (holders[0].backup is None) == (world_size == 1)


@pytest.mark.parametrize("victim", range(4))
def test_lone_holders_are_primaries_where_parts_grow_little(victim):
    """Nothing moves before the next step where the largest part of a primary grows by 1/64 for it,
    or by 256 KiB."""
    # Of a GPT with 8 blocks of width 512: by the byte another division is nearly always evener.
    block = [2048] * 4 + [MIB] * 3 + [6144, MIB, 2048] + [MIB] * 4 + [8192] + [MIB] * 4 + [2048]
    sizes = [MIB // 2, MIB // 8, *(8 * block), 2048, 2048, MIB // 2]
    ranks = [rank for rank in range(4) if rank != victim]
    before = assign_pieces(sizes, 4)
    held = [{ranks.index(rank) for rank in one.ranks if rank != victim} for one in before]
    after = assign_pieces(sizes, 3, (), held)
    alone = [number for number, one in enumerate(held) if len(one) == 1]
    assert alone and all({after[number].primary} == held[number] for number in alone)
    _, primary = loads(after, sizes, 3)
    assert max(primary) <= sum(sizes) / 3 + MIB


def test_join_moves_only_the_part_of_the_joiner():
    sizes = [MIB] * 600
    held = [set(one.ranks) for one in assign_pieces(sizes, 7)]
    after = assign_pieces(sizes, 8, (), held)
    copies = missing(after, held)
    assert {rank for _, rank in copies} == {7}
    assert len(copies) == pytest.approx(2 * 600 / 8, abs=8)
    rounds = plan_rounds(held, [one.ranks for one in after], sizes, 1 << 40)
    senders = Counter(one.sender for some in rounds for one in some)
    assert max(senders.values()) - min(senders.values()) <= 2  # all send equally much


def test_assignment_of_an_unchanged_group_moves_nothing():
    sizes = sizes_of(random.Random(0), 300)
    holders = assign_pieces(sizes, 5)
    held = [set(one.ranks) for one in holders]
    assert missing(assign_pieces(sizes, 5, (), held), held) == []


@pytest.mark.parametrize(
    ("topology", "place_of"),
    [
        ([(2, 2)], [0, 0, 1, 1]),
        ([(1, 2, 3)], [0, 1, 1, 2, 2, 2]),
        ([(2, 2, 2, 2), (4, 4)], [0, 0, 0, 0, 1, 1, 1, 1]),  # zones
    ],
)
def test_backup_is_on_another_node_and_in_another_zone(topology, place_of):
    sizes = sizes_of(random.Random(1), 400)
    world_size = len(place_of)
    holders = assign_pieces(sizes, world_size, topology)
    check(holders, sizes, world_size)
    assert all(place_of[one.primary] != place_of[one.backup] for one in holders)


def test_piece_without_holder_gets_two():
    holders = assign_pieces([MIB] * 4, 3, (), [{0, 1}, set(), {2}, {0, 1, 2}])
    assert all(len(set(one.ranks)) == 2 for one in holders)
    assert holders[0].ranks in ((0, 1), (1, 0))
    assert 2 in holders[2].ranks


def test_sixty_four_workers_hold_equal_parts_on_other_nodes_and_little_moves():
    """From one that has everything to 64 on 16 nodes; then one is lost, and one joins."""
    sizes, node = [MIB] * 3200, [rank // 4 for rank in range(64)]
    topology = [(4,) * 16]
    first = [{0}] * len(sizes)
    holders = assign_pieces(sizes, 64, topology, first)
    check(holders, sizes, 64)
    assert all(node[one.primary] != node[one.backup] for one in holders)
    # Who has everything keeps its part.
    assert moved(holders, first, sizes) == (2 * 3200 - 100) * MIB
    held = [set(one.ranks) - {63} for one in holders]
    after = assign_pieces(sizes, 63, [(4,) * 15 + (3,)], held)
    check(after, sizes, 63)
    assert moved(after, held, sizes) <= 1.05 * least_bytes_to_move(sizes, 63, held)
    held = [set(one.ranks) for one in after]
    again = assign_pieces(sizes, 64, topology, held)
    check(again, sizes, 64)
    assert moved(again, held, sizes) <= 1.1 * least_bytes_to_move(sizes, 64, held)


def topology_of(nodes):
    """The topology of members that lie on these nodes, and the node of each rank. Ranks of a node
    are consecutive."""
    return [tuple(Counter(sorted(nodes)).values())], sorted(nodes)


def on_one_node(holders, node, sizes):
    """Bytes by the node that has both copies of them."""
    found = Counter()
    for one, size in zip(holders, sizes, strict=True):
        if one.backup is not None and node[one.primary] == node[one.backup]:
            found[node[one.primary]] += size
    return found


def must_be_on_one_node(node, sizes):
    """Bytes by the node that has more than half of the members, and so of all copies."""
    copies = {n: 2 * sum(sizes) * count // len(node) for n, count in Counter(node).items()}
    return {n: max(0, held - sum(sizes)) for n, held in copies.items()}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 999),
    count=st.sampled_from([60, 200]),
    changes=st.lists(st.integers(-8, 3), min_size=1, max_size=11),
)
@example(seed=0, count=200, changes=[0, 1, 1])  # two on the first node, then two on another
@example(seed=0, count=200, changes=[0, 0, 1, 1, 1, 2, 2, 2])
@example(seed=0, count=200, changes=[0, 0, 1, 1, -1])  # loads are even, and nothing need move
def test_copies_are_on_two_nodes_while_workers_join_one_by_one_or_are_lost(seed, count, changes):
    """A change is the node of a worker that joins, or below 0 the number of one that is lost."""
    rng = random.Random(seed)
    sizes = sizes_of(rng, count)
    nodes, largest = [0], max(sizes)
    topology, node = topology_of(nodes)
    holders = assign_pieces(sizes, 1, topology)
    all_moved = all_least = 0
    for change in changes:
        together = on_one_node(holders, node, sizes)
        if change < 0 and len(node) > 2:
            lost = -change % len(node)
            held = [{r - (r > lost) for r in one.ranks if r != lost} for one in holders]
            nodes.remove(node[lost])
        elif change >= 0:
            # Behind those of its node, the joiner moves the ranks of later nodes by one.
            joined = sum(one <= change for one in node)
            held = [{r + (r >= joined) for r in one.ranks} for one in holders]
            nodes.append(change)
        else:
            continue
        topology, node = topology_of(nodes)
        holders = assign_pieces(sizes, len(node), topology, held)
        check(holders, sizes, len(node))
        must = must_be_on_one_node(node, sizes)
        for n, nbytes in on_one_node(holders, node, sizes).items():
            assert nbytes <= (must[n] + 2 * len(node) * largest if must[n] else 0)
        apart = sum(max(0, together[n] - must.get(n, 0)) for n in together)
        all_moved += moved(holders, held, sizes)
        all_least += max(least_bytes_to_move(sizes, len(node), held), apart)
    assert all_moved <= 1.1 * all_least + len(changes) * len(node) * largest
