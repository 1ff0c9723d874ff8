"""Every row exactly once per epoch, whatever the row groups, V and b; and the order itself,
pinned."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_dp.errors import DataError
from elastic_dp.sampling.order import OPEN_BYTES, STREAMS, Order

WANTED = [(1, 0), (1, 1), (4, 1), (5, 0)]  # (step, virtual worker)
FEW, SOME, MANY = (
    OPEN_BYTES // 2,
    OPEN_BYTES // 5,
    1,
)  # bytes per row group, for S < V and for S >= V
ragged = st.lists(st.integers(0, 60), min_size=1, max_size=25)


def epoch(order, number):
    """The micro-batches of an epoch, each a list of (row group, row)."""
    first = number * order.steps_per_epoch + 1
    batches = []
    for step in range(first, first + order.steps_per_epoch):
        assert order.epoch_of(step) == number
        assert order.ends_epoch(step) == (step == first + order.steps_per_epoch - 1)
        for virtual_worker in range(order.virtual_workers):
            groups, rows = order.locate(step, virtual_worker)
            assert len(rows) == order.rows(step, virtual_worker)
            batches.append(list(zip(groups.tolist(), rows.tolist(), strict=True)))
    return batches


@settings(max_examples=50)
@given(
    groups=ragged,
    group_bytes=st.sampled_from([FEW, SOME, OPEN_BYTES // 20, MANY]),
    virtual_workers=st.integers(1, 9),
    micro_batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    number=st.integers(0, 5),
    shuffle=st.sampled_from(["none", "rows", "full"]),
    tail=st.sampled_from(["drop", "short"]),
)
def test_each_row_exactly_once(groups, group_bytes, number, tail, **options):
    virtual_workers, micro_batch_size = options["virtual_workers"], options["micro_batch_size"]
    whole, total = virtual_workers * micro_batch_size, sum(groups)
    assume(total >= (whole if tail == "drop" else 1))
    nbytes = [group_bytes] * len(groups)
    order = Order(group_rows=groups, group_bytes=nbytes, tail=tail, **options)
    batches = epoch(order, number)
    seen = [row for batch in batches for row in batch]
    every = {(group, row) for group, rows in enumerate(groups) for row in range(rows)}
    assert len(set(seen)) == len(seen), "a row twice"
    assert set(seen) <= every
    if tail == "short":
        assert len(seen) == total
        assert sum(len(batch) < micro_batch_size for batch in batches) <= virtual_workers
    else:
        assert len(seen) == total - total % whole
        assert all(len(batch) == micro_batch_size for batch in batches)


def located(order, positions):
    found = [order.locate(step, virtual_worker) for step, virtual_worker in positions]
    return [list(zip(groups.tolist(), rows.tolist(), strict=True)) for groups, rows in found]


def test_golden_order_is_unchanged():
    """Pinned again with "order 2": streams by the size of row groups, the turn without cuts, faster
    rounds."""
    settings = dict(group_rows=[5, 0, 7, 3, 9], virtual_workers=2, micro_batch_size=3, seed=42)
    order = Order(**settings)
    assert order.identity == "order 2 seed=42 b=3 V=2 shuffle=rows tail=drop streams=16"
    assert order.steps_per_epoch == 4
    assert located(order, WANTED) == [
        [(4, 6), (4, 8), (3, 1)],
        [(2, 2), (2, 3), (2, 5)],
        [(2, 4), (2, 6), (4, 1)],
        [(4, 1), (4, 3), (4, 4)],
    ]
    shared = Order(**settings, group_bytes=[1 << 30] * 5)
    assert shared.identity == "order 2 seed=42 b=3 V=2 shuffle=rows tail=drop streams=1"
    assert located(shared, WANTED) == [
        [(4, 6), (4, 7), (4, 8)],
        [(3, 0), (3, 1), (3, 2)],
        [(4, 0), (4, 3), (4, 2)],
        [(4, 6), (4, 4), (4, 5)],
    ]
    full = Order(group_rows=[24], virtual_workers=2, micro_batch_size=4, seed=42, shuffle="full")
    assert [full.locate(s, v)[1].tolist() for s, v in WANTED] == [
        [15, 4, 13, 20],
        [11, 23, 19, 22],
        [15, 10, 0, 21],
        [2, 11, 7, 8],
    ]


def test_no_shuffle_is_file_order():
    order = Order(group_rows=(5, 0, 8), virtual_workers=2, micro_batch_size=3, shuffle="none")
    seen = [row for batch in epoch(order, 3) for row in batch]
    assert seen == [(0, row) for row in range(5)] + [(2, row) for row in range(7)]


def test_short_tail_fills_virtual_workers_in_order():
    order = Order(group_rows=(100,), virtual_workers=4, micro_batch_size=8, tail="short")
    assert order.steps_per_epoch == 4
    assert [order.rows(4, v) for v in range(4)] == [4, 0, 0, 0]
    assert [order.rows(3, v) for v in range(4)] == [8, 8, 8, 8]


def test_epochs_and_seeds_differ():
    first = Order(group_rows=(50,) * 20, virtual_workers=2, micro_batch_size=10, seed=1)
    other = Order(group_rows=(50,) * 20, virtual_workers=2, micro_batch_size=10, seed=2)
    per_epoch = first.steps_per_epoch
    rows = {
        str(order.locate(step, 0)) for order in (first, other) for step in (1, 1 + per_epoch, 2)
    }
    assert len(rows) == 6


def stretches(used):
    """How often a row group is read, if it is dropped after the first step that does not use it."""
    return sum(len(now - before) for before, now in pairwise([set(), *used]))


def test_a_virtual_worker_reads_each_of_its_row_groups_once():
    order = Order(group_rows=[100] * 640, virtual_workers=4, micro_batch_size=16)
    steps = range(1, order.steps_per_epoch + 1)
    used = [set(order.locate(step, 2)[0].tolist()) for step in steps]
    assert order.streams == 4 * STREAMS
    assert order.open_row_groups(1) == STREAMS
    assert order.open_row_groups(4) == 4 * STREAMS
    assert max(map(len, used)) <= 2 * STREAMS  # all go to their next row group in the same step
    cuts = STREAMS + 1
    assert stretches(used) <= 640 / 4 + cuts


@pytest.mark.parametrize(
    ("group_bytes", "streams"),
    [
        (None, 64),
        (1, 64),
        (4 << 20, 64),
        (11 << 19, 40),
        (32 << 20, 8),
        (65 << 19, 7),
        (1 << 30, 1),
    ],
)
def test_streams_follow_from_the_size_of_row_groups(group_bytes, streams):
    sizes = None if group_bytes is None else [group_bytes] * 100
    order = Order(group_rows=[1000] * 100, group_bytes=sizes, virtual_workers=8, micro_batch_size=4)
    assert order.streams == order.open_row_groups(8) == streams
    assert f"streams={streams}" in order.identity


@pytest.mark.parametrize("fit", [1, 2, 3, 5, 7])
def test_virtual_workers_share_a_stream_of_large_row_groups(fit):
    order = Order(
        group_rows=[500] * 30,
        group_bytes=[OPEN_BYTES // fit] * 30,
        virtual_workers=8,
        micro_batch_size=10,
    )
    steps = range(1, order.steps_per_epoch + 1)
    located = [[order.locate(step, v)[0] for v in range(8)] for step in steps]
    for count in (1, 2, 3, 8):  # virtual workers of one worker, wherever its range begins
        for first in range(8 - count + 1):
            used = [set(np.concatenate(step[first : first + count]).tolist()) for step in located]
            at_once = order.open_row_groups(count)
            assert at_once <= fit
            assert max(map(len, used)) <= 2 * at_once
            assert np.mean(list(map(len, used))) <= 1.5 * at_once  # two only where one ends
            of_a_team = 30 * -(-8 // fit) / 8  # row groups
            assert stretches(used) <= at_once * (of_a_team + 3)  # and those that a cut runs through


def test_the_dropped_rows_differ_per_epoch_even_with_one_row_group():
    order = Order(group_rows=(999,), virtual_workers=2, micro_batch_size=100, seed=3)
    dropped = []
    for number in range(3):
        seen = {row for batch in epoch(order, number) for _, row in batch}
        dropped.append(frozenset(range(999)) - seen)
    assert len(set(dropped)) == 3


def test_sorted_labels_are_mixed():
    """Row groups sorted by label, the worst case: a global batch must hold most labels, not one."""
    order = Order(group_rows=(100,) * 100, virtual_workers=8, micro_batch_size=16)
    groups = np.concatenate([order.locate(5, v)[0] for v in range(8)])
    assert len(set((groups // 10).tolist())) >= 9  # of 10 labels


@pytest.mark.parametrize(("tail", "way_out"), [("drop", 'tail="short"'), ("short", "add rows")])
def test_too_few_rows(tail, way_out):
    rows = (31,) if tail == "drop" else (0,)
    with pytest.raises(DataError) as caught:
        Order(group_rows=rows, virtual_workers=4, micro_batch_size=8, tail=tail)
    said = str(caught.value)
    assert f"{rows[0]} rows" in said
    assert "micro_batch_size 8 × 4 micro-batches" in said
    assert way_out in said


def test_a_pure_function_of_step_and_virtual_worker():
    """Asked in any order, by any object: what workers do cannot show."""
    settings = dict(virtual_workers=3, micro_batch_size=4, seed=5, tail="short")
    for size in (FEW, SOME, MANY):
        shape = dict(group_rows=[30, 7, 19, 1, 44], group_bytes=[size] * 5)
        forward, other = Order(**shape, **settings), Order(**shape, **settings)
        asked = [(step, v) for step in (1, 2, 9, 10, 11, 40, 10**7) for v in range(3)]
        there = located(forward, asked)
        assert there == located(other, asked[::-1])[::-1]
        assert located(forward, asked) == there


@pytest.mark.parametrize("shuffle", ["none", "rows", "full"])
def test_rows_that_were_located_ahead_are_those_of_their_step(shuffle):
    """Also where those of the last call end within a micro-batch, an epoch or a short step."""
    shape = dict(group_rows=[900, 700, 1_403], virtual_workers=2, micro_batch_size=7, seed=3)
    order = Order(**shape, shuffle=shuffle, tail="short")
    steps = [*range(1, order.steps_of(2) + 1), *range(order.steps_of(2), 0, -13)]
    for step in steps:
        fresh = Order(**shape, shuffle=shuffle, tail="short")
        both = [(step, 0), (step, 1)]
        assert located(order, both) == located(fresh, both)
