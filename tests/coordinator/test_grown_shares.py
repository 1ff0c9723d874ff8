"""The shares of members in steps that have more virtual workers than their membership."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.coordinator.messages import START, Member, Membership, whole_blocks
from elastic_dp.coordinator.planning.grown_shares import grown_shares
from elastic_dp.coordinator.planning.load_balancer import assign_ranges
from elastic_dp.coordinator.planning.retained_ranges import retain_ranges


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
