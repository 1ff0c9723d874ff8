"""Several sources: exact proportions, each row once per epoch of its source, from any start."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.errors import DataError
from elastic_dp.sampling.mixture import SLOTS, Mixture, MixtureSource
from elastic_dp.sampling.order import OPEN_BYTES


def source_epochs(mixed, step):
    """How many epochs of each source have been consumed after `step`; 1.5 is one and a half."""
    everyone = np.arange(mixed.virtual_workers)
    return tuple(
        int(mixed._taken(step, everyone, source).sum()) / order.num_rows
        for source, order in enumerate(mixed._orders)
    )


def mixture(*sources, group_bytes=1, **settings):
    found = [
        MixtureSource(
            name=f"s{i}", weight=weight, group_rows=rows, group_bytes=[group_bytes] * len(rows)
        )
        for i, (weight, rows) in enumerate(sources)
    ]
    return Mixture(found, **settings)


def consumed(mixed, steps):
    """(row group, row) of all virtual workers, step by step."""
    seen = []
    for step in steps:
        for v in range(mixed.virtual_workers):
            groups, rows = mixed.locate(step, v)
            assert len(groups) == len(rows) == mixed.rows(step, v) == mixed.micro_batch_size
            seen += zip(groups.tolist(), rows.tolist(), strict=True)
    return seen


ragged = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(
    sources=st.lists(st.tuples(st.floats(0.05, 5), ragged), min_size=1, max_size=4),
    group_bytes=st.sampled_from([1, OPEN_BYTES // 9, OPEN_BYTES]),
    slots=st.sampled_from([1, 10, 64, SLOTS]),  # small: many periods in a few steps
    virtual_workers=st.integers(1, 7),
    micro_batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    shuffle=st.sampled_from(["none", "rows", "full"]),
)
def test_each_row_once_in_each_epoch_of_its_source(sources, slots, virtual_workers, **options):
    with mock.patch("elastic_dp.sampling.mixture.SLOTS", slots):
        mixed = mixture(*sources, virtual_workers=virtual_workers, **options)
    steps = 40
    times = Counter(consumed(mixed, range(1, steps + 1)))
    first = 0
    for number, (_, groups) in enumerate(sources):
        every = [(first + g, row) for g, rows in enumerate(groups) for row in range(rows)]
        counts = [times.pop(row, 0) for row in every]
        epochs = source_epochs(mixed, steps)[number]
        assert sum(counts) == pytest.approx(epochs * len(every))
        # Virtual workers differ by up to a few rows of the source, which in a tiny one are an
        # epoch.
        apart = 1 + -(-8 * virtual_workers // len(every))
        assert epochs - apart <= min(counts) and max(counts) <= epochs + apart
        first += len(groups)
    assert not times, "a row that no source has"


def epochs_end_to_end(mixed, micro_batches, sources):
    """Checks that the rows of each source, row j of virtual worker 0, of 1, …, then row j + 1, are
    its epochs, one after the other. Returns how many there are."""
    located = [
        [
            pair
            for step in range(1, 1 + micro_batches // mixed.virtual_workers)
            for pair in zip(*map(list, mixed.locate(step, v)), strict=True)
        ]
        for v in range(mixed.virtual_workers)
    ]
    found = []
    for rows, groups in sources:
        per_worker = [[pair for pair in own if pair[0] in groups] for own in located]
        in_order = [own[j] for j in range(min(map(len, per_worker))) for own in per_worker]
        for epoch in range(len(in_order) // rows):
            assert len(set(in_order[epoch * rows : (epoch + 1) * rows])) == rows, groups
        found.append(len(in_order) / rows)
    return found


@pytest.mark.parametrize(
    ("slots", "group_bytes", "virtual_workers"),
    [
        (50, 1, 8),
        (50, OPEN_BYTES // 5, 3),
        (SLOTS, 1, 3),
        (SLOTS, OPEN_BYTES // 5, 8),
        (SLOTS, 1, 1),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                *((50, 1, 1), (50, 1, 3), (50, OPEN_BYTES // 5, 1), (50, OPEN_BYTES // 5, 8)),
                *((SLOTS, 1, 8), (SLOTS, OPEN_BYTES // 5, 1), (SLOTS, OPEN_BYTES // 5, 3)),
            )
        ),
    ],
)
def test_the_rows_of_one_source_are_its_epochs_end_to_end(virtual_workers, group_bytes, slots):
    options = {"virtual_workers": virtual_workers, "group_bytes": group_bytes, "seed": 5}
    with mock.patch("elastic_dp.sampling.mixture.SLOTS", slots):
        mixed = mixture((0.7, [40, 3, 25]), (0.3, [11]), micro_batch_size=4, **options)
    epochs = epochs_end_to_end(mixed, 300, [(68, [0, 1, 2]), (11, [3])])
    assert min(epochs) >= 3, "each source must be seen more than once"


def test_weights_are_exact_in_each_period_and_close_in_each_step():
    mixed = mixture(
        (0.5, [1000] * 50), (0.3, [70] * 9), (0.2, [999]), virtual_workers=16, micro_batch_size=512
    )
    assert mixed.period == SLOTS
    assert mixed._stages[0].quotas == (32768, 19661, 13107)
    bounds = [50, 59]
    per_period = SLOTS // 512
    for v, first in (0, 1), (7, 1 + per_period):  # two periods, each from its start
        groups = [mixed.locate(step, v)[0] for step in range(first, first + per_period)]
        source = np.searchsorted(bounds, np.concatenate(groups), side="right")
        assert np.bincount(source).tolist() == list(mixed._stages[0].quotas)
    for step in (1, 64, 128, 129, 1000):
        groups = np.concatenate([mixed.locate(step, v)[0] for v in range(16)])
        count = np.bincount(np.searchsorted(bounds, groups, side="right"))
        assert np.abs(count - 16 * 512 * np.array([0.5, 0.3, 0.2])).max() <= 3


def test_virtual_workers_of_one_row_do_not_all_take_the_same_source():
    mixed = mixture((1, [10_000]), (1, [10_000]), virtual_workers=64, micro_batch_size=1)
    for step in range(1, 50):
        groups = [int(mixed.locate(step, v)[0][0]) for v in range(64)]
        assert abs(sum(groups) - 32) <= 2


def test_a_pure_function_of_step_and_virtual_worker():
    """Asked in any order, by any object: what workers do cannot show."""
    shape = [(0.9, [50] * 20), (0.1, [7, 5])]
    settings = dict(virtual_workers=4, micro_batch_size=8, seed=3)
    forward, other = mixture(*shape, **settings), mixture(*shape, **settings)
    asked = [(step, v) for step in (1, 2, 8191, 8192, 8193, 10**9) for v in range(4)]
    first = {position: str(forward.locate(*position)) for position in asked}
    assert first == {position: str(other.locate(*position)) for position in reversed(asked)}
    changed = mixture(*shape, virtual_workers=4, micro_batch_size=8, seed=4)
    assert str(changed.locate(1, 0)) != first[1, 0]


def test_quotas_of_weights_that_do_not_fit():
    tiny = mixture((1e-9, [5]), (1, [5]), (2, [5]), virtual_workers=2, micro_batch_size=100)
    assert tiny.period % 100 == 0 and tiny.period - SLOTS < 100
    assert sum(tiny._stages[0].quotas) == tiny.period and tiny._stages[0].quotas[0] == 1
    assert tiny._stages[0].quotas[2] == pytest.approx(2 * tiny._stages[0].quotas[1], abs=2)


def test_memory_is_shared_by_weight():
    size = OPEN_BYTES // 80
    mixed = mixture(
        (3, [9] * 99), (1, [9] * 99), group_bytes=size, virtual_workers=8, micro_batch_size=4
    )
    assert mixed.open_row_groups(8) == 56 + 16  # 60 and 20 fit, in multiples of 8
    assert mixed.open_row_groups(1) == 7 + 2
    assert "streams=56" in mixed.identity and "streams=16" in mixed.identity


def test_epochs_of_a_mixture_are_for_reports():
    mixed = mixture((1, [100]), (3, [100]), virtual_workers=2, micro_batch_size=10)
    assert mixed.num_rows == 200
    assert mixed.steps_per_epoch == 10
    assert [mixed.epoch_of(step) for step in (1, 10, 11)] == [0, 0, 1]
    assert mixed.ends_epoch(10) and not mixed.ends_epoch(11)
    assert source_epochs(mixed, 20) == pytest.approx((1, 3), abs=0.05)
    small = mixture((1, [3]), virtual_workers=2, micro_batch_size=10)
    assert small.steps_per_epoch == 1


def test_a_source_without_rows():
    with pytest.raises(DataError, match="s1 has no rows; leave this source out"):
        mixture((1, [5]), (1, [0]), virtual_workers=1, micro_batch_size=1)


def test_golden_mixture_is_unchanged():
    """Pinned: a change here changes the order of every run of several sources."""
    mixed = mixture((2, [6, 5]), (1, [4]), virtual_workers=2, micro_batch_size=4, seed=42)
    positions = [(1, 0), (1, 1), (2, 0), (20000, 1)]
    located = [[pair.tolist() for pair in mixed.locate(*position)] for position in positions]
    assert [list(zip(*pair, strict=True)) for pair in located] == [
        [(0, 1), (0, 2), (2, 3), (0, 3)],
        [(2, 1), (1, 1), (1, 2), (2, 2)],
        [(2, 0), (0, 4), (0, 5), (2, 2)],
        [(2, 1), (0, 3), (0, 4), (2, 3)],
    ]


CHANGES = {3: [0.1, 0.9, 0.0], 4: [0.4, 0.3, 0.3], 30: [0.0, 0.0, 1.0]}


def curriculum(slots=SLOTS, **settings):
    with mock.patch("elastic_dp.sampling.mixture.SLOTS", slots):
        return mixture(
            (1.0, [40, 3, 25]),
            (0.0, [11]),
            (0.0, [17, 6]),
            **{"virtual_workers": 3, "micro_batch_size": 4, "seed": 5, "changes": CHANGES}
            | settings,
        )


@pytest.mark.parametrize(
    ("slots", "virtual_workers"),
    [
        *((50, 8), (SLOTS, 3), (SLOTS, 1)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((50, 1), (50, 3), (SLOTS, 8))),
    ],
)
def test_rows_of_a_source_are_its_epochs_end_to_end_through_changes_of_weights(
    virtual_workers, slots
):
    mixed = curriculum(slots, virtual_workers=virtual_workers)
    sources = [(68, [0, 1, 2]), (11, [3]), (23, [4, 5])]
    assert min(epochs_end_to_end(mixed, 600, sources)[1:]) > 1


def test_weights_hold_from_the_step_after_their_number_on():
    mixed = mixture(
        (0.5, [1000] * 50),
        (0.5, [70] * 9),
        virtual_workers=16,
        micro_batch_size=512,
        changes={200: [0.25, 0.75], 201: [0.0, 1.0], 300: [1 / 3, 2 / 3]},
    )
    shares = {200: 0.5, 201: 0.25, 202: 0.0, 300: 0.0, 301: 1 / 3, 1000: 1 / 3}
    for step, share in shares.items():
        groups = np.concatenate([mixed.locate(step, v)[0] for v in range(16)])
        assert abs((groups < 50).sum() - 16 * 512 * share) <= 3, step
    per_period = SLOTS // 512
    exact = [mixed.locate(301 + step, 5)[0] for step in range(per_period)]
    assert (np.concatenate(exact) < 50).sum() == round(SLOTS / 3)


def test_any_step_is_located_without_the_steps_before():
    walked = curriculum(50)
    every = {step: walked.locate(step, 1) for step in range(1, 60)}
    for step in (59, 31, 4, 30, 3, 5):
        assert np.array_equal(curriculum(50).locate(step, 1), every[step])


def test_changes_of_weights_are_part_of_the_identity():
    plain = mixture((1.0, [9]), (1.0, [9]), virtual_workers=1, micro_batch_size=1)
    same = mixture((1.0, [9]), (1.0, [9]), virtual_workers=1, micro_batch_size=1, changes={})
    later = mixture(
        (1.0, [9]), (1.0, [9]), virtual_workers=1, micro_batch_size=1, changes={5: [1, 2]}
    )
    assert plain.identity == same.identity != later.identity


def test_golden_curriculum_is_unchanged():
    """Pinned: a change here changes the order of every run whose weights change."""
    mixed = curriculum()
    located = [[pair.tolist() for pair in mixed.locate(step, 1)] for step in (3, 4, 5, 31)]
    assert [list(zip(*pair, strict=True)) for pair in located] == [
        [(0, 27), (0, 32), (0, 34), (0, 36)],
        [(3, 9), (3, 10), (2, 1), (3, 0)],
        [(3, 1), (4, 16), (5, 0), (2, 3)],
        [(4, 1), (4, 2), (4, 3), (4, 4)],
    ]
