"""Shares after a loss: what survivors have finished stays with them."""

import itertools

import pytest

from elastic_dp.coordinator.planning.equal_ranges import equal_ranges
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
