"""Times, dates and decimals at the extremes of their types: the value that is stored, or an error
that names the column."""

from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.errors import BadShard, DataError
from tests.data.shards import refused, write_arrow
from tests.data.values import in_place

INT32, INT64 = (-(2**31), -1, 0, 2**31 - 1), (-(2**63), -1, 0, 2**63 - 1)
DAY_MS = 86_400_000
TIMES = {
    **{
        f"timestamp[{unit}{', ' + zone if zone else ''}]": (pa.timestamp(unit, zone), INT64)
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Asia/Tokyo")
    },
    **{f"duration[{unit}]": (pa.duration(unit), INT64) for unit in ("s", "ms", "us", "ns")},
    "date32": (pa.date32(), INT32),
    "date64": (pa.date64(), (-(2**31) * DAY_MS, 0, (2**31 - 1) * DAY_MS)),
    "time32[s]": (pa.time32("s"), (0, 86_399)),
    "time32[ms]": (pa.time32("ms"), (0, DAY_MS - 1)),
    "time64[us]": (pa.time64("us"), (0, DAY_MS * 1000 - 1)),
    "time64[ns]": (pa.time64("ns"), (0, DAY_MS * 10**6 - 1)),
}
DECIMALS = {
    f"decimal{bits}({digits}, {scale})": (make(digits, scale), digits, scale)
    for bits, make, digits in (
        (32, pa.decimal32, 9),
        (64, pa.decimal64, 18),
        (128, pa.decimal128, 38),
        (256, pa.decimal256, 76),
    )
    for scale in (0, 3, digits)
}


def stored(kind, values):
    ints = pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64())
    return ints.view(kind)


def write(path, table, how):
    if how == "arrow":
        write_arrow(path / "a.arrow", table)
    else:
        pq.write_table(table, path / "a.parquet", store_schema=how == "parquet")


def read(path):
    return in_place(DataConfig(str(path), micro_batch_size=1))["x"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how)
        for name in TIMES
        for how in ("arrow", "parquet", "parquet without the schema of Arrow")
        if how in ("arrow", "parquet") or not name.startswith("duration")  # which is a number there
    ],
)
def test_times_at_extremes_are_their_stored_numbers(name, how, tmp_path):
    kind, values = TIMES[name]
    if how != "arrow" and name.startswith("timestamp[s"):  # which Parquet stores as milliseconds
        values = tuple(value // 1000 + (value < 0) for value in values)
    write(tmp_path, pa.table({"x": stored(kind, values)}), how)
    there = kind if how == "arrow" else pq.read_schema(tmp_path / "a.parquet").field("x").type
    # Equal times, whatever the unit in which they are stored.
    found = [value * nanoseconds(there) for value in read(tmp_path)]
    assert found == [value * nanoseconds(kind) for value in values]


def nanoseconds(kind):
    """Of the unit. A duration without the schema of Arrow is a number of the unit that is lost."""
    if pa.types.is_date(kind):
        return (DAY_MS if pa.types.is_date32(kind) else 1) * 10**6
    return {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}.get(getattr(kind, "unit", ""), 1)


@pytest.mark.parametrize("how", ["arrow", "parquet", "parquet as integers"])
@pytest.mark.parametrize("name", DECIMALS)
def test_decimals_at_extremes_are_exact(name, how, tmp_path):
    kind, digits, scale = DECIMALS[name]
    values = [Decimal(f"{sign}{'9' * digits}e-{scale}") for sign in ("", "-")] + [Decimal(0)]
    table = pa.table({"x": pa.array(values, kind)})
    if how == "parquet as integers":
        pq.write_table(table, tmp_path / "a.parquet", store_decimal_as_integer=True)
    else:
        write(tmp_path, table, how)
    assert read(tmp_path) == values


def test_int96_is_refused_by_name_unless_it_is_left_out(tmp_path):
    times = pa.array([0, 1], pa.timestamp("us"))
    nested = pa.array([[{"t": 0}], []], pa.list_(pa.struct([("t", pa.timestamp("us"))])))
    table, old = pa.table({"x": times, "n": nested, "y": [1, 2]}), tmp_path / "a.parquet"
    pq.write_table(table, old, use_deprecated_int96_timestamps=True)
    for name, path in (("x", "x"), ("n", r"n\.list\.element\.t")):
        named = DataConfig(str(tmp_path), micro_batch_size=1, columns=[name])
        refused(named, rf"'{path}' of a\.parquet holds .* INT96")
    found = in_place(DataConfig(str(tmp_path), micro_batch_size=1, columns=["y"]))
    assert found["y"] == [1, 2]


def test_lists_of_more_text_than_arrow_reads_are_refused_at_open_and_are_no_bad_shard(
    tmp_path, monkeypatch
):
    table = pa.table({"x": [["a" * 500] * 3] * 4, "s": ["a" * 5000] * 4, "y": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    config = DataConfig(str(tmp_path), micro_batch_size=1, max_bad_fraction=0.01)
    words = r"row group 0 of a\.parquet holds lists with more than 2 GiB of text"
    with monkeypatch.context() as small:
        small.setattr("elastic_dp.data.formats.parquet._NESTED_BYTES", 4000)
        with pytest.raises(DataError, match=r"column 'x\.list\.element' of " + words):
            read(tmp_path)

    def fail(*_):
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented")

    monkeypatch.setattr("elastic_dp.data.formats.parquet._read_group", fail)
    with pytest.raises(DataError, match=words) as refused:
        in_place(config)
    assert not isinstance(refused.value, BadShard)
