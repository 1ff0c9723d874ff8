"""Packed rows: each token once in an epoch, whoever asks and from any step."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.errors import DataError
from elastic_dp.sampling.order import OPEN_BYTES
from elastic_dp.sampling.packing import PackedOrder

sizes = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)


def tokens_of(order, steps):
    """The tokens (row group, number in it) of each row."""
    rows = []
    for step in steps:
        for v in range(order.virtual_workers):
            found = order.locate(step, v)
            here = [[] for _ in range(order.rows(step, v))]
            for group, start, length, place in zip(*(each.tolist() for each in found), strict=True):
                for i in range(length):
                    here[(place + i) // order.length].append((group, start + i))
            rows += here
    return rows


@settings(max_examples=40, deadline=None)
@given(
    group_tokens=sizes,
    length=st.integers(1, 70),
    group_bytes=st.sampled_from([1, OPEN_BYTES // 3, OPEN_BYTES]),
    virtual_workers=st.integers(1, 5),
    micro_batch_size=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    shuffle=st.sampled_from(["none", "rows", "full"]),
    tail=st.sampled_from(["short", "drop"]),
)
def test_each_token_is_in_one_packed_row_of_an_epoch(group_bytes, **options):
    group_tokens, length, tail = (options[x] for x in ("group_tokens", "length", "tail"))
    total, options["group_bytes"] = sum(group_tokens), [group_bytes] * len(group_tokens)
    of_step = options["virtual_workers"] * options["micro_batch_size"]
    if tail == "drop" and total // length < of_step:
        with pytest.raises(DataError):
            PackedOrder(**options)
        return
    order = PackedOrder(**options)
    per_epoch = order.steps_per_epoch
    every = {(g, i) for g, count in enumerate(group_tokens) for i in range(count)}
    for epoch in range(2):
        rows = tokens_of(order, range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch))
        seen = Counter(token for row in rows for token in row)
        assert max(seen.values()) == 1 and seen.keys() <= every
        if tail == "short":
            assert seen.keys() == every
            assert sorted(map(len, rows))[1:] == [length] * (len(rows) - 1)
        else:
            assert all(len(row) == length for row in rows)
            assert len(rows) == per_epoch * of_step
            left = total // length - len(rows)
            assert len(every) - len(seen) == total % length + left * length


def test_tokens_left_of_a_row_group_begin_the_next_row():
    order = PackedOrder(
        group_tokens=[5, 0, 3, 7],
        length=4,
        virtual_workers=1,
        micro_batch_size=1,
        shuffle="none",
        tail="short",
    )
    rows = tokens_of(order, range(1, 5))
    assert rows == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 4), (2, 0), (2, 1), (2, 2)],
        [(3, 0), (3, 1), (3, 2), (3, 3)],
        [(3, 4), (3, 5), (3, 6)],
    ]


def test_steps_located_together_are_those_located_alone():
    order = PackedOrder(
        group_tokens=[50, 7, 33, 41], length=6, virtual_workers=2, micro_batch_size=2, tail="short"
    )
    steps = range(2, 2 + 3 * order.steps_per_epoch)
    for v in (0, 1):
        for step, found in zip(steps, order.locate_each(steps, v), strict=True):
            alone = order.locate(step, v)
            assert [x.tolist() for x in found] == [x.tolist() for x in alone]


def test_packed_order_is_a_function_of_seed_and_epoch():
    def order(**changes):
        options = {"group_tokens": [300] * 20, "length": 32, "seed": 1}
        return PackedOrder(**options | changes, virtual_workers=4, micro_batch_size=2)

    one, same, other = order(), order(), order(seed=2)
    late = 3 * one.steps_per_epoch + 2
    assert tokens_of(one, range(late, late + 1)) == tokens_of(same, range(late, late + 1))
    assert tokens_of(one, range(1, 3)) != tokens_of(other, range(1, 3))
    assert one.identity == same.identity != other.identity
    assert order(length=33).identity != one.identity
    epochs = [one.documents(epoch, 3, 40) for epoch in (0, 0, 1)]
    first, again, second = (each.tolist() for each in epochs if each is not None)
    assert first == again != second and sorted(first) == sorted(second) == list(range(40))
    assert order(shuffle="none").documents(0, 3, 40) is None


def test_streams_of_packed_rows_read_the_line_in_order():
    """A stream opens a row group, and goes on to the next one of the line, without coming back."""
    order = PackedOrder(
        group_tokens=[100] * 64,
        length=30,
        virtual_workers=2,
        micro_batch_size=2,
        seed=3,
        group_bytes=[OPEN_BYTES // 2] * 64,
    )
    for v in (0, 1):
        steps = range(1, order.steps_per_epoch + 1)
        groups = [g for s in steps for g in order.locate(s, v).groups.tolist()]
        changes = [one for one, following in pairwise(groups) if one != following]
        assert len(changes) == len(set(changes))


def test_too_few_tokens_for_a_row_are_refused():
    with pytest.raises(DataError, match=r"9 tokens together, too few .* DataConfig\.pack=10"):
        PackedOrder(group_tokens=[4, 5], length=10, virtual_workers=1, micro_batch_size=1)


def test_golden_packed_order_is_unchanged():
    """Pinned: a change here changes the order of every run that packs."""
    order = PackedOrder(
        group_tokens=[11, 6, 20, 9], length=8, virtual_workers=1, micro_batch_size=2, seed=42
    )
    found = [[each.tolist() for each in order.locate(step, 0)] for step in (1, 2, 3)]
    assert found == [
        [[1, 0, 2], [4, 0, 0], [2, 11, 3], [0, 2, 13]],
        [[2], [3], [16], [0]],
        [[2, 1, 3], [14, 0, 0], [6, 6, 4], [0, 6, 12]],
    ]
    assert tokens_of(order, range(1, 2)) == [
        [*((1, i) for i in range(4, 6)), *((0, i) for i in range(6))],
        [*((0, i) for i in range(6, 11)), *((2, i) for i in range(3))],
    ]
    documents = order.documents(1, 2, 6)
    assert documents is not None and documents.tolist() == [2, 4, 5, 0, 1, 3]
