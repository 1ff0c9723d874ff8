"""A batch that changes takes the micro-batches of a constant one, each once, in other steps."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_dp.errors import DataError
from elastic_dp.sampling.growing_order import GrowingOrder
from elastic_dp.sampling.mixture import Mixture, MixtureSource
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.packing import PackedOrder
from elastic_dp.sampling.step_schedule import StepSchedule

STEPS = 30
numbers = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 9)), min_size=1, max_size=4)
schedules = numbers.filter(lambda pairs: all(a[1] != b[1] for a, b in pairwise(pairs))).map(
    lambda pairs: {
        begin - pairs[0][0]: number
        for begin, (_, number) in zip(np.cumsum([n for n, _ in pairs]).tolist(), pairs, strict=True)
    }
)


def rows_of(order, step, virtual_worker):
    groups, rows = order.locate(step, virtual_worker)
    assert len(rows) == order.rows(step, virtual_worker)
    return list(zip(groups.tolist(), rows.tolist(), strict=True))


@settings(max_examples=30, deadline=None)
@given(
    groups=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    schedule=schedules,
    micro_batch_size=st.integers(1, 4),
    shuffle=st.sampled_from(["none", "rows", "full"]),
    tail=st.sampled_from(["drop", "short"]),
    seed=st.integers(0, 2**40),
)
def test_each_row_is_taken_once_an_epoch_whatever_the_schedule(
    groups, schedule, micro_batch_size, shuffle, tail, seed
):
    options = {"micro_batch_size": micro_batch_size, "shuffle": shuffle, "tail": tail}
    most, total = max(schedule.values()) * micro_batch_size, sum(groups)
    least = min(schedule.values())
    of_base = least * micro_batch_size
    assume(total // of_base * of_base >= most or tail == "short")
    base = Order(group_rows=groups, virtual_workers=least, seed=seed, **options)
    order = GrowingOrder(base, StepSchedule(schedule))
    of_epoch, epoch = [], 0
    for step in range(1, STEPS):
        assert order.epoch_of(step) == epoch
        assert order.steps_of(epoch) < step <= order.steps_of(epoch + 1)
        batch = [rows_of(order, step, v) for v in range(order.schedule.at(step))]
        assert any(batch), "a step without rows"
        of_epoch += [row for one in batch for row in one]
        if order.ends_epoch(step):
            assert len(set(of_epoch)) == len(of_epoch), "a row twice"
            dropped = total - len(of_epoch)
            assert dropped == 0 if tail == "short" else 0 <= dropped < most + of_base
            of_epoch, epoch = [], epoch + 1


@settings(max_examples=25, deadline=None)
@given(schedule=schedules)
def test_a_step_takes_the_next_micro_batches_of_the_constant_batch(schedule):
    least = min(schedule.values())
    base = Order(group_rows=[10_000], virtual_workers=least, micro_batch_size=2, shuffle="full")
    order = GrowingOrder(base, StepSchedule(schedule))
    taken = 0
    for step in range(1, 30):
        count = order.schedule.at(step)
        mine = [rows_of(order, step, v) for v in range(count)]
        assert rows_of(order, step, count) == []  # planned ahead before the number fell
        numbers = [divmod(n, least) for n in range(taken, taken + count)]
        assert sorted(mine) == sorted(rows_of(base, turn + 1, v) for turn, v in numbers)
        taken += count
        assert order.schedule.total(step) == taken


def test_virtual_workers_keep_to_the_streams_that_they_had():
    """A worker with the first half of the virtual workers reads the same row groups as before."""
    base = Order(group_rows=[100] * 64, virtual_workers=4, micro_batch_size=8, seed=1)
    order = GrowingOrder(base, StepSchedule({0: 4, 5: 8, 7: 12}))

    def row_groups(step):
        half = range(order.schedule.at(step) // 2)
        return {group for v in half for group, _ in rows_of(order, step, v)}

    assert len(row_groups(5)) == 16
    assert row_groups(5) == row_groups(6) == row_groups(8)


def test_golden_growth_is_unchanged():
    """Pinned: a change here changes the rows of every run whose batch grows."""
    base = Order(group_rows=[7, 9, 8], virtual_workers=2, micro_batch_size=2, seed=3)
    order = GrowingOrder(base, StepSchedule({0: 2, 1: 3, 4: 5}))
    found = [
        [rows_of(order, step, v) for v in range(order.schedule.at(step))] for step in (1, 2, 5)
    ]
    assert found == [
        [[(0, 4), (0, 6)], [(2, 1), (2, 3)]],
        [[(1, 1), (1, 3)], [(1, 5), (1, 6)], [(2, 4), (2, 7)]],
        [
            *([(2, 2), (2, 3)], [(2, 6), (2, 7)], [(1, 1), (1, 2)], [(1, 5), (1, 7)]),
            [(0, 0), (0, 3)],
        ],
    ]


def test_short_steps_at_the_end_of_epochs_have_rows():
    """9 rows and 8 virtual workers: without growth 2 steps, of which the second has one row."""
    base = Order(group_rows=[9], virtual_workers=8, micro_batch_size=1, tail="short")
    order = GrowingOrder(base, StepSchedule({0: 8, 2: 12}))
    assert order.steps_per_epoch == 2 and order.steps_of(4) == 5
    rows = [sum(order.rows(step, v) for v in range(order.schedule.at(step))) for step in (1, 2, 3)]
    assert rows == [8, 1, 9]


def test_epoch_with_fewer_rows_than_the_largest_batch_is_refused_with_the_way_out():
    base = Order(group_rows=[20], virtual_workers=4, micro_batch_size=2)
    with pytest.raises(DataError, match=r"8 micro-batches of 2 rows, .* 9 of the largest"):
        GrowingOrder(base, StepSchedule({0: 4, 3: 9}))


def test_mixture_goes_through_its_sources_as_without_growth():
    sources = [
        MixtureSource(name=name, weight=weight, group_rows=[rows])
        for name, weight, rows in (("a", 3, 40), ("b", 1, 17))
    ]
    options = {"virtual_workers": 2, "micro_batch_size": 3}
    base = Mixture(sources, **options, changes={4: [1, 1]})
    order = GrowingOrder(base, StepSchedule({0: 2, 3: 5, 7: 6}))
    taken = [
        row
        for step in range(1, 13)
        for v in range(order.schedule.at(step))
        for row in rows_of(order, step, v)
    ]
    steps = order.schedule.total(12) // 2
    expected = [
        row for step in range(1, steps + 1) for v in (0, 1) for row in rows_of(base, step, v)
    ]
    assert sorted(taken) == sorted(expected)
    ends = [step for step in range(1, 13) if order.ends_epoch(step)]
    assert ends and [order.epoch_of(end + 1) - order.epoch_of(end) for end in ends] == [1] * len(
        ends
    )


@pytest.mark.parametrize("tail", ["drop", "short"])
def test_packed_rows_are_taken_once_an_epoch(tail):
    base = PackedOrder(
        group_tokens=[50, 70, 31], length=4, virtual_workers=2, micro_batch_size=2, tail=tail
    )
    order = GrowingOrder(base, StepSchedule({0: 2, 3: 5}))
    tokens, per_epoch = 0, order.steps_per_epoch
    for step in range(1, per_epoch + 1):
        for v in range(order.schedule.at(step)):
            found = order.locate(step, v)
            tokens += int(found.lengths.sum())
            assert -(-int(found.lengths.sum()) // base.length) == order.rows(step, v)
    assert order.ends_epoch(per_epoch)
    assert tokens == 151 if tail == "short" else 151 - 5 * 8 - 4 * 4 < tokens <= 148
