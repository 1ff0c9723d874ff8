"""Every row exactly once per epoch, whatever the row groups, V and b; and the order itself, pinned."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_dp.errors import DataError
from elastic_dp.sampling.order import BLOCK_ROW_GROUPS, STREAMS, Order

WANTED = [(1, 0), (1, 1), (4, 1), (5, 0)]  # (step, virtual worker)
ragged = st.lists(st.integers(0, 60), min_size=1, max_size=25)


def epoch(order: Order, number: int) -> list[list[tuple[int, int]]]:
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


@given(
    groups=ragged,
    virtual_workers=st.integers(1, 9),
    micro_batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    number=st.integers(0, 5),
    shuffle=st.sampled_from(["none", "rows", "full"]),
    tail=st.sampled_from(["drop", "short"]),
)
def test_each_row_exactly_once(
    groups, virtual_workers, micro_batch_size, seed, number, shuffle, tail
):
    whole, total = virtual_workers * micro_batch_size, sum(groups)
    assume(total >= (whole if tail == "drop" else 1))
    order = Order(
        group_rows=tuple(groups),
        virtual_workers=virtual_workers,
        micro_batch_size=micro_batch_size,
        seed=seed,
        shuffle=shuffle,
        tail=tail,
    )
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


def test_golden_order():
    order = Order(group_rows=(5, 0, 7, 3, 9), virtual_workers=2, micro_batch_size=3, seed=42)
    assert order.steps_per_epoch == 4
    places = [
        [(g, r) for g, r in zip(*map(list, order.locate(s, v)), strict=True)] for s, v in WANTED
    ]
    assert places == [
        [(2, 1), (2, 4), (2, 5)],
        [(4, 2), (4, 4), (4, 6)],
        [(4, 3), (4, 5), (4, 8)],
        [(2, 0), (2, 2), (2, 4)],
    ]
    full = Order(group_rows=(24,), virtual_workers=2, micro_batch_size=4, seed=42, shuffle="full")
    assert [full.locate(s, v)[1].tolist() for s, v in WANTED] == [
        [12, 22, 14, 17],
        [1, 6, 21, 19],
        [10, 15, 5, 17],
        [18, 19, 22, 9],
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


def test_a_virtual_worker_has_few_row_groups_open():
    order = Order(group_rows=(100,) * 640, virtual_workers=4, micro_batch_size=16)
    steps = range(1, order.steps_per_epoch + 1)
    used = [set(order.locate(step, 2)[0].tolist()) for step in steps]
    assert max(map(len, used)) <= 2 * STREAMS * BLOCK_ROW_GROUPS  # where all go to their next block
    half_a_group = [
        set().union(*used[i : i + 25]) for i in range(len(used) - 25)
    ]  # 25 · 16 / 8 rows
    assert max(map(len, half_a_group)) <= 2 * STREAMS * BLOCK_ROW_GROUPS
    assert (
        len(set().union(*used)) <= 640 / 4 + STREAMS + 1
    )  # one virtual worker reads each, but for cuts


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
    assert "4 virtual workers × micro_batch_size 8" in said
    assert way_out in said
