"""Rows gathered out of row groups against plain indexing."""

import dataclasses
import itertools
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.data.columns.arrow_arrays import Lists
from elastic_dp.data.pipeline.array_memory import BlockPool, aligned_copy, is_aligned
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler
from tests.data.test_columns import decoded


def gathered(columns, groups, rows, bounds=()):
    assembler = BatchAssembler(np.array(groups), np.array(rows), BlockPool(4), bounds)
    for group in reversed(assembler.row_groups):  # they come in any order
        assembler.copy(group, {"x": columns[group]})
    return assembler


@st.composite
def choices(draw, shape):
    """Several columns, and for each row of the result which row of which column."""
    dtype = draw(st.sampled_from([np.int32, np.bool_, np.float64, np.uint8]))
    columns = [
        (np.arange(rows * int(np.prod(shape))) * (number + 3) % 251)
        .astype(dtype)
        .reshape(rows, *shape)
        for number, rows in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    ]
    numbers = st.integers(0, len(columns) - 1)
    groups = np.array(draw(st.lists(numbers, min_size=1, max_size=60)), dtype=np.int64)
    if draw(st.booleans()):
        groups.sort()
    start = draw(st.integers(0, 8))
    rows = [(start + place) % len(columns[group]) for place, group in enumerate(groups)]
    return columns, groups, np.array(rows, dtype=np.int64)


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (1024,)], ids=str)
@settings(max_examples=100)
@given(data=st.data())
def test_micro_batches_share_nothing_whether_they_were_copied_or_not(shape, data):
    columns, groups, rows = data.draw(choices(shape))
    cuts = data.draw(st.sets(st.integers(1, len(rows))))
    bounds = sorted({0, len(rows)} | cuts)
    may_be_kept = data.draw(st.sets(st.sampled_from(range(len(columns)))))
    layouts = st.sampled_from([np.asarray, np.asfortranarray, aligned_copy])
    columns = [data.draw(layouts)(column) for column in columns]
    for column in columns:
        column.flags.writeable = data.draw(st.booleans())
    expected = [columns[g][r].copy() for g, r in zip(groups, rows, strict=True)]
    assembler = BatchAssembler(groups, rows, BlockPool(4), bounds)
    kept = [
        group
        for group in reversed(assembler.row_groups)
        if assembler.copy(group, {"x": columns[group]}, 7 * (group in may_be_kept))
    ]
    cut = [assembler.cut(start, stop)["x"] for start, stop in itertools.pairwise(bounds)]
    assert all(is_aligned(out) for out in cut if out.nbytes)
    assert assembler.nbytes == sum(out.nbytes for out in assembler._out.values()) + 7 * len(kept)
    for (start, stop), out in zip(itertools.pairwise(bounds), cut, strict=True):
        assert np.array_equal(out, expected[start:stop]) and out.dtype == columns[0].dtype
        assert out.flags.writeable and out.flags.c_contiguous
        out.fill(1)  # and nobody else sees it
        expected[start:stop] = np.ones_like(out)
    held = [group for group, c in enumerate(columns) if any(np.shares_memory(c, o) for o in cut)]
    assert set(held) <= set(kept) <= may_be_kept


def test_rows_between_the_first_and_the_last_come_in_any_order():
    rows = [0, 2, 1, 3]
    assert gathered([np.arange(4)], [0] * 4, rows).cut(0, 4)["x"].tolist() == rows


def test_lists_are_an_array_where_a_micro_batch_has_one_length():
    regular, ragged = decoded([[1, 2], [3, 4]]), decoded([[5], [6, 7], [8, 9]])
    assert isinstance(regular, np.ndarray) and isinstance(ragged, Lists)
    for columns, ragged_at in (([regular, ragged], 1), ([ragged, regular], 0)):
        groups = [ragged_at, 1 - ragged_at, ragged_at, ragged_at]
        assembler = gathered(columns, groups, [2, 0, 1, 0])
        assert assembler.cut(0, 3)["x"].tolist() == [[8, 9], [1, 2], [6, 7]]
        assert [row.tolist() for row in assembler.cut(1, 4)["x"]] == [[1, 2], [6, 7], [5]]


def test_texts_are_lists_of_objects():
    columns = [decoded(["a", "b", None]), decoded(["c"])]
    assert gathered(columns, [0, 1, 0, 0], [2, 0, 0, 1]).cut(0, 3)["x"] == [None, "c", "a"]


def test_assembler_leaves_out_rows_of_a_bad_row_group():
    columns = [np.arange(4), np.arange(4) + 10, np.arange(4) + 20]
    assembler = BatchAssembler(np.array([0, 1, 2, 1, 1]), np.array([3, 2, 1, 0, 1]), BlockPool(4))
    for group in (0, 2):
        assembler.copy(group, {"x": columns[group], "text": decoded(list("abcd"))})
    assembler.left_out = [1]
    assert assembler.cut(0, 3)["x"].tolist() == [3, 21]
    assert assembler.cut(0, 3)["text"] == ["d", "b"]
    assert assembler.cut(3, 5) is None


def test_rows_that_make_no_array_begin_where_arrays_do():
    """The rows are lists that are regular in one row group and not in the other, in either order,
    and of ragged ones."""
    regular, ragged = decoded([[1.0] * 5] * 9), decoded([[2.0] * (n % 4 + 1) for n in range(9)])
    groups, rows = [0] * 7 + [1] * 7, [*range(7), *range(7)]
    for columns in ((regular, ragged), (ragged, regular)):
        for order in (lambda groups: groups, reversed):
            assembler = BatchAssembler(np.array(groups), np.array(rows), BlockPool(4))
            for group in order(assembler.row_groups):
                assembler.copy(group, {"x": columns[group]})
            handed_out = assembler.cut(0, 14)["x"]
            assert len(handed_out) == 14 and all(map(is_aligned, handed_out))


PLACE = ("elastic_dp.config", "elastic_dp.sampling", "elastic_dp.data.pipeline.planner")


def test_a_row_meets_few_objects(tmp_path):
    for number in range(3):
        table = pa.table({"x": [float(number)] * 100})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=20)
    config = DataConfig(str(tmp_path), micro_batch_size=4)
    index, met = read_index(config), set[type]()

    def note(frame, event, argument):
        if event == "call":
            met.add(type(frame.f_locals.get("self")))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        data = open_data(config, virtual_workers=2, index=index)
        data.read_ahead(1, range(2))
        for step in range(1, data.steps_per_epoch + 1):
            data.batch(step, 0)
            data.batch(step, 1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {
        one
        for one in met
        if one.__module__.startswith("elastic_dp.") and not one.__module__.startswith(PLACE)
    }
    behave = {one for one in ours if not (issubclass(one, tuple) or dataclasses.is_dataclass(one))}
    names = sorted(one.__name__ for one in behave)
    assert {"Store", "Parquet", "Pipeline", "Collator", "RowStream"} <= set(names)
    assert len(names) <= 15, names
