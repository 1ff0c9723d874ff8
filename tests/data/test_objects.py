"""Columns that are no arrays of numbers, as user code gets them: messages, maps, lists of text,
ragged lists, times."""

from collections import Counter
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather

from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.columns.arrow_arrays import decode_column
from elastic_dp.data.pipeline.collation import nbytes_of
from elastic_dp.errors import DataError
from tests.data.shards import BINARY, config, in_memory, opened, refused
from tests.data.test_batch_assembler import gathered

ROWS = 37
AT = datetime(2026, 1, 2, 3, 4, 5, 6000, UTC)
MESSAGE = pa.struct(
    [("role", pa.string()), ("parts", pa.list_(pa.string())), ("at", pa.timestamp("ns", "UTC"))]
)


def message(i):
    return {
        "role": "user" if i % 2 else "tool",
        "parts": ["é"] * (i % 3),
        "at": AT if i % 3 else None,
    }


OBJECTS = {
    "words": pa.array([[f"w{i}", None][: i % 3] for i in range(ROWS)], pa.list_(pa.string())),
    "pair": pa.array([[f"a{i}", "b"] for i in range(ROWS)], pa.list_(pa.large_string(), 2)),
    "raws": pa.array([[b"\xff" * i] for i in range(ROWS)], pa.large_list(pa.binary())),
    "chat": pa.array(
        [None if i == 5 else [message(j) for j in range(i % 4)] for i in range(ROWS)],
        pa.list_(MESSAGE),
    ),
    "map": pa.array(
        [[("k", i), (f"k{i}", None)] for i in range(ROWS)], pa.map_(pa.string(), pa.int16())
    ),
    "maps": pa.array(
        [[[("t", [i])]] * (i % 2) for i in range(ROWS)],
        pa.list_(pa.map_(pa.string(), pa.list_(pa.int8()))),
    ),
    "price": pa.array([Decimal(i) / 4 for i in range(ROWS)], pa.decimal128(9, 2)),
    "prices": pa.array(
        [[Decimal(i)] * (i % 2) for i in range(ROWS)], pa.list_(pa.decimal128(9, 2))
    ),
}
RAGGED = {
    "deep": pa.array(
        [[[j] * (j % 3) for j in range(i % 5)] for i in range(ROWS)], pa.list_(pa.list_(pa.int16()))
    ),
    "wide": pa.array(
        [[[i] * (i % 3), [1]] for i in range(ROWS)], pa.list_(pa.list_(pa.float32()), 2)
    ),
    "deeper": pa.array(
        [[[[1], [i, 2]], []][: i % 3] for i in range(ROWS)],
        pa.list_(pa.list_(pa.list_(pa.uint8()))),
    ),
}
TIMES = {
    "ns": (pa.array([AT + timedelta(i) for i in range(ROWS)], pa.timestamp("ns", "UTC")), 10**9),
    "us": (pa.array([AT + timedelta(i) for i in range(ROWS)], pa.timestamp("us")), 10**6),
    "day": (pa.array([date(2026, 1, 1)] * ROWS, pa.date32()), None),
    "date64": (pa.array([date(2026, 1, 1)] * ROWS, pa.date64()), None),
    "clock": (pa.array([time(1, 2)] * ROWS, pa.time32("ms")), None),
    "clock64": (pa.array([time(1, 2)] * ROWS, pa.time64("us")), None),
    "took": (pa.array([timedelta(seconds=i) for i in range(ROWS)], pa.duration("ms")), None),
}
TABLE = pa.table(OBJECTS | RAGGED | {name: column for name, (column, _) in TIMES.items()})


def plain(value):
    """Times as whole numbers of nanoseconds, which is what MESSAGE says."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, datetime):
        return int(value.timestamp()) * 10**9 + value.microsecond * 1000
    return value


def listed(value):
    return [listed(one) for one in value] if isinstance(value, list | np.ndarray) else value


def collect(batch):
    return batch


def read(url, **changes):
    data = open_evaluation(config(url, micro_batch_size=5, collate_fn=collect, **changes))
    batches = [data.batch(number) for number in range(data.num_batches)]
    return {name: [row for batch in batches for row in batch[name]] for name in batches[0]}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_objects_are_what_arrow_calls_them_in_every_format(kind, where, tmp_path):
    BINARY[kind](tmp_path / "a", TABLE)
    found = read(where(tmp_path), columns=[*OBJECTS])
    assert {name: plain(column.to_pylist()) for name, column in OBJECTS.items()} == found
    assert found["chat"][3][1] == {"role": "user", "parts": ["é"], "at": plain(AT)}
    assert found["map"][2] == [("k", 2), ("k2", None)] and found["price"][3] == Decimal("0.75")


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("name", [*OBJECTS, *RAGGED, *TIMES])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_row_groups_of_objects_and_times_hold_no_more_than_was_estimated(
    name, codec, form, tmp_path
):
    """Memory is planned by it. Long enough that what does not grow with the rows does not count.

    Of lists of lists in Arrow the offsets, 8 bytes an item, are left out: see
    `arrow._widened_bytes`.
    """
    table = pa.concat_tables([TABLE.select([name])] * 300).combine_chunks()
    if form == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression=codec)
    else:
        codec = "uncompressed" if codec == "none" else codec
        feather.write_feather(table, tmp_path / "a.arrow", codec, chunksize=1 << 20)
    groups = opened(config(tmp_path))
    held, planned = groups.read(0)[1], groups.reading_bytes[0]
    assert held <= (2.1 * planned if name in RAGGED and form == "arrow" else planned)


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream zstd"])
def test_times_are_int64_of_the_unit_stored(kind, tmp_path):
    BINARY[kind](tmp_path / "a", TABLE)
    data = open_evaluation(config(tmp_path, micro_batch_size=ROWS, columns=[*TIMES]))
    batch = data.batch(0)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    for name, (column, per_second) in TIMES.items():
        if kind == "parquet" and name == "date64":  # which Parquet stores as days
            column = column.cast(pa.date32())
        stored = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
        assert batch[name].tolist() == stored.to_pylist()
        if per_second:
            assert int(batch[name][0]) == int(AT.timestamp() * 1000) * per_second // 1000
    assert batch["day"][0] == (date(2026, 1, 1) - date(1970, 1, 1)).days
    assert batch["clock"][0] == 3_720_000 and batch["took"][3] == 3000


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_ragged_lists_of_lists_are_lists_of_arrays(kind, tmp_path):
    BINARY[kind](tmp_path / "a", TABLE)
    found = read(tmp_path, columns=[*RAGGED])
    for name, column in RAGGED.items():
        assert listed(found[name]) == column.to_pylist()
    deep = found["deep"]
    assert [type(row) for row in deep[:4]] == [np.ndarray, np.ndarray, list, list]
    assert {item.dtype for row in deep for item in row} == {np.dtype(np.int16)}
    data = open_evaluation(config(tmp_path, micro_batch_size=5, columns=["deep"]))
    with pytest.raises(DataError, match=r"'deep' holds lists of different lengths .*collate_fn"):
        data.batch(0)


def test_a_row_of_lists_is_the_same_beside_ragged_ones_and_beside_none():
    """The form of a list depends on its row alone, not on the row group."""
    kind = pa.list_(pa.list_(pa.int32()))
    whole, ragged, empty = [[[1, 2], [3, 4]]], [[[1, 2], [3, 4]], [[1], []], []], [[], []]
    columns = [
        decode_column(pa.chunked_array([pa.array(v, kind)]), "x") for v in (whole, ragged, empty)
    ]
    rows = gathered(columns, [0, 1, 1, 1, 2], [0, 0, 1, 2, 0]).cut(0, 5)["x"]
    assert listed(rows) == [whole[0], *ragged, []]
    assert rows[0].shape == rows[1].shape == (2, 2) and rows[3].shape == rows[4].shape == (0, 0)


def test_objects_without_user_code_are_lists_as_text_is(tmp_path):
    BINARY["parquet"](tmp_path / "a", TABLE)
    data = open_data(
        config(tmp_path, micro_batch_size=3, columns=["chat", "us"], shuffle="none"),
        virtual_workers=1,
    )
    batch = data.batch(1, 0)
    assert batch["chat"] == plain(OBJECTS["chat"].to_pylist()[:3])
    assert batch["us"].dtype == torch.int64


def with_draws(batch):
    return {name: list(column) for name, column in batch.items()} | {"noise": torch.rand(2)}


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (0, {}),
        (0, {"transform": with_draws}),
        pytest.param(1, {"transform": with_draws}, marks=pytest.mark.slow),
    ],
    ids=["plain", "transform", "process"],
)
def test_objects_are_the_same_for_any_number_of_workers(workers, options, tmp_path):
    """One that runs all virtual workers ahead in chunks, and one that is asked for single
    micro-batches."""
    BINARY["parquet"](tmp_path / "a", TABLE)
    shape = {"micro_batch_size": 3, "epochs": 2, "tail": "short", "collate_fn": collect, **options}
    columns = [*OBJECTS, *RAGGED]
    one, three = (
        open_data(config(tmp_path, columns=columns, workers=w, **shape), virtual_workers=3)
        for w in (workers, 0)
    )
    one.read_ahead(1, [0, 1, 2])
    seen = Counter[Decimal]()
    for step in range(1, 2 * one.steps_per_epoch + 1):
        if step == 4:
            one.read_ahead(step, [1])
        for v in (2, 0, 1):
            if one.rows(step, v):
                torch.manual_seed(0)
                here = one.batch(step, v)
                again = three.batch(step, v)
                here.pop("noise", None), again.pop("noise", None)
                assert repr(here) == repr(again)
                seen.update(here["price"])
    assert seen == Counter(OBJECTS["price"].to_pylist() * 2)


def test_objects_made_ahead_count_towards_memory(tmp_path):
    """Text counted as nothing: as much of it was made ahead as there were chunks for."""
    chats = [[{"role": "user", "content": "x" * 1000}] * 4] * 64
    column = decode_column(pa.chunked_array([pa.array(chats)]), "x")
    assembler = gathered([column], [0] * 64, range(64))
    assert 64 * 4000 < assembler.nbytes < 64 * 8000
    assert 64 * 4000 < nbytes_of(assembler.cut(0, 64)) < 64 * 8000
    texts = decode_column(pa.chunked_array([pa.array(["y" * 1000] * 64)]), "x")
    assert 64_000 < gathered([texts], [0] * 64, range(64)).nbytes < 128_000
    ragged = decode_column(pa.chunked_array([pa.array([[1] * n for n in range(64)])]), "x")
    assert 8 * 63 * 32 < gathered([ragged], [0] * 64, range(64)).nbytes < 16 * 63 * 32 + 64 * 512


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.nulls(3), r"'x' is null \(every value is null\), which has no tensor"),
        (pa.array([[], [None], []]), r"'x' is list<null> \(every value is null\), which has no"),
        (pa.nulls(3, pa.list_view(pa.int64())), r"'x' is list_view<.*which has no tensor"),
    ],
)
def test_column_without_a_tensor_or_objects_is_refused_at_open(column, said, tmp_path):
    BINARY["arrow file"](tmp_path / "a", pa.table({"x": column}))
    refused(config(tmp_path), said)
