"""Shares of members: equal ones, those after a loss, where what survivors have finished stays with
them, and those of steps that have more virtual workers than their membership."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.coordinator.messages import START, Member, Membership, whole_blocks
from elastic_dp.coordinator.planning.equal_ranges import equal_ranges
from elastic_dp.coordinator.planning.grown_shares import grown_shares
from elastic_dp.coordinator.planning.load_balancer import assign_ranges
from elastic_dp.coordinator.planning.retained_ranges import retain_ranges
from elastic_dp.distributed.reduction_tree import cover


def leaves(share):
    return [v for first, last in share for v in range(first, last)]


def after_loss(virtual_workers, world_size, lost):
    """The shares before and after; a rank of None is a worker that joins."""
    before = [(one,) for one in equal_ranges(virtual_workers, world_size)]
    previous = [share for rank, share in enumerate(before) if rank not in lost]
    return previous, retain_ranges(equal_ranges(virtual_workers, len(previous)), previous)


@pytest.mark.parametrize("lost", range(4))
def test_survivors_of_a_loss_keep_their_shares_and_divide_the_lost_one(lost):
    previous, shares = after_loss(32, 4, {lost})
    new = [set(leaves(now)) - set(leaves(had)) for now, had in zip(shares, previous, strict=True)]
    assert sorted(map(len, new)) == [2, 3, 3]
    assert set().union(*new) == {*range(8 * lost, 8 * lost + 8)}


@pytest.mark.parametrize("virtual_workers", range(2, 25))
def test_shares_cover_every_virtual_worker_once_in_ascending_ranges_of_the_same_sizes(
    virtual_workers,
):
    for world_size in range(2, virtual_workers + 1):
        for gone in (1, 2):
            for lost in itertools.combinations(range(min(world_size, 5)), gone):
                if gone == world_size:
                    continue
                _, shares = after_loss(virtual_workers, world_size, set(lost))
                every = [v for share in shares for v in leaves(share)]
                assert sorted(every) == [*range(virtual_workers)]
                wanted = equal_ranges(virtual_workers, len(shares))
                assert [len(leaves(share)) for share in shares] == [b - a for a, b in wanted]
                for share in shares:
                    ends = [*itertools.chain(*share)]
                    assert ends == sorted(set(ends))  # with gaps between them


def test_worker_that_replaces_the_lost_one_gets_its_share():
    before = [(one,) for one in equal_ranges(12, 3)]
    for lost in range(3):
        previous = [share for rank, share in enumerate(before) if rank != lost] + [()]
        shares = retain_ranges(equal_ranges(12, 3), previous)
        assert shares == (*previous[:2], before[lost])


def test_contiguous_ranges_stay_where_the_step_ends_as_early_with_fewer_sums():
    """With 3 virtual workers, one more runs on either worker. 1 and 2 would be two sums of a
    worker, 0 and 1 are one."""
    previous = [((0, 1),), ((1, 2),)]
    assert retain_ranges(equal_ranges(3, 2), previous) == (((0, 2),), ((2, 3),))
    assert len(cover(1, 3, 3)) == 2 and len(cover(0, 2, 3)) == 1


def test_share_that_must_shrink_keeps_the_subtrees_that_fit():
    finished = [((8, 12), (12, 14), (14, 15)), ((0, 4), (4, 6)), ()]
    shares = retain_ranges(((0, 6), (6, 12), (12, 16)), finished)
    assert shares == (((8, 14),), ((0, 6),), ((6, 8), (14, 16)))


def test_finished_subtree_that_is_larger_than_the_share_is_worth_nothing():
    """The sum of a subtree cannot be taken apart."""
    contiguous = ((0, 6), (6, 12), (12, 16))
    assert retain_ranges(contiguous, [((8, 16),), ((0, 8),), ()]) == tuple(
        (one,) for one in contiguous
    )


def test_contiguous_ranges_stay_where_nothing_of_the_step_is_finished():
    """Two of three were in their first virtual worker when the third one was lost."""
    contiguous = equal_ranges(12, 2)
    assert retain_ranges(contiguous, [(), ()]) == tuple((one,) for one in contiguous)


def test_survivor_that_is_ahead_keeps_what_it_has_finished():
    """One has finished all of its four virtual workers, the other one the first."""
    shares = retain_ranges(equal_ranges(12, 2), [((0, 1),), ((4, 8),)])
    assert shares == (((0, 4), (8, 10)), ((4, 8), (10, 12)))


@pytest.mark.parametrize("virtual_workers", range(1, 33))
def test_every_virtual_worker_is_dealt_once_and_evenly(virtual_workers):
    for world_size in range(1, virtual_workers + 1):
        ranges = equal_ranges(virtual_workers, world_size)
        assert [v for first, last in ranges for v in range(first, last)] == [
            *range(virtual_workers)
        ]
        sizes = [last - first for first, last in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("virtual_workers", "world_size", "pieces"),
    [(8, 1, 1), (8, 2, 2), (8, 4, 4), (8, 8, 8), (6, 4, 4), (7, 4, 4), (5, 4, 4), (8, 3, 5)],
)
def test_ranges_are_whole_subtrees_where_they_can_be(virtual_workers, world_size, pieces):
    ranges = equal_ranges(virtual_workers, world_size)
    assert sum(len(cover(first, last, virtual_workers)) for first, last in ranges) == pieces


@pytest.mark.parametrize("world_size", [0, 9])
def test_a_world_without_work_for_each_is_refused(world_size):
    with pytest.raises(ValueError, match="not within"):
        equal_ranges(8, world_size)


def count(share):
    return sum(last - first for first, last in share)


@given(data=st.data(), first=st.integers(1, 24), more=st.integers(0, 40), equal=st.booleans())
def test_shares_partition_the_virtual_workers_and_none_is_empty(data, first, more, equal):
    """Whatever the coordinator deals: by speed, by node, with what is finished."""
    workers = data.draw(st.integers(1, first))
    seconds = data.draw(st.lists(st.floats(0.1, 9.0), min_size=workers, max_size=workers))
    ranges = assign_ranges(seconds, first)
    split = st.integers(0, first - 1).map(lambda v: ((v, v + 1),))
    finished = data.draw(st.lists(st.just(()) | split, min_size=workers, max_size=workers))
    shares = retain_ranges(ranges, finished)
    grown = grown_shares(shares, first + more, (), equal=equal)
    assert sorted(v for share in grown for a, b in share for v in range(a, b)) == [
        *range(first + more)
    ]
    assert all(map(count, grown)) and [len(s) for s in grown] == [len(s) for s in shares]
    assert more or grown == shares


def test_equal_shares_stay_equal_where_blocks_would_not_be():
    shares = tuple(((a, b),) for a, b in assign_ranges([0.0] * 7, 8))
    assert sorted(map(count, shares)) == [1, 1, 1, 1, 1, 1, 2]
    assert max(map(count, grown_shares(shares, 32, (), equal=True))) == 5
    assert max(map(count, grown_shares(shares, 32, (), equal=False))) == 8


def test_a_split_by_speed_stays_one_by_speed():
    shares = (((0, 1),), ((1, 3),))
    assert grown_shares(shares, 6, (), equal=False) == (((0, 2),), ((2, 6),))


def test_a_node_keeps_its_virtual_workers():
    members = tuple(Member(f"w{n}", ((2 * n, 2 * n + 2),), START, has_state=True) for n in range(4))
    membership = Membership(1, members, "w0", 1.0, topology=((2, 2),))
    assert membership.shares(16, equal=True) == (((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),))
    assert membership.shares(8, equal=True) == tuple(member.ranges for member in members)


@given(data=st.data(), first=st.integers(1, 16), more=st.integers(0, 30))
def test_whole_blocks_are_those_whose_virtual_workers_are_all_finished(data, first, more):
    total = first + more
    low = data.draw(st.integers(0, total - 1))
    high = data.draw(st.integers(low + 1, total))
    one_each = tuple(((u, u + 1),) for u in range(first))
    blocks = [range(a, b) for ((a, b),) in grown_shares(one_each, total, (), equal=False)]
    whole = [u for u, block in enumerate(blocks) if low <= block.start and block.stop <= high]
    found = [u for a, b in whole_blocks([(low, high)], first, total) for u in range(a, b)]
    assert found == whole
