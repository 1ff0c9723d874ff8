"""One column that the shards of a data set spell in several ways, by the writers that do so. Nulls
of columns that have tensors: refused when a data set is opened, or when they are read."""

import itertools
import json
import re
import subprocess
import sys
import tarfile

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from elastic_dp.data import read_index
from elastic_dp.data.columns import schema as schemas
from elastic_dp.data.columns.column_types import plain
from elastic_dp.errors import DataError
from tests.data.shards import add, config, in_memory, opened, refused, rows_of, write_arrow

WORDS = ["a", "bb", "more than the twelve bytes of a view", "é"]
TAGS = [["x"], ["y", "x", None], [], ["z"]]


def frame(first=0):
    numbers = range(first, first + 4)
    return pl.DataFrame(
        {
            "id": numbers,
            "text": WORDS,
            "kind": pl.Series(["x", "y", "x", "z"], dtype=pl.Categorical),
            "level": pl.Series(["low", "high", "low", "low"], dtype=pl.Enum(["low", "high"])),
            "raw": [word.encode() for word in WORDS],
            "pair": pl.Series([[n, n + 1] for n in numbers], dtype=pl.Array(pl.Int32, 2)),
            "list": [[n, n] for n in numbers],
            "at": [{"x": n, "name": f"row {n}"} for n in numbers],
            "tags": pl.Series(TAGS, dtype=pl.List(pl.Categorical)),
            "fixed": pl.Series([["x", "y"]] * 4, dtype=pl.Array(pl.Enum(["x", "y"]), 2)),
        }
    )


def rows_of_frame(content):
    rows = content.to_dicts()
    for row in rows:
        at = row.pop("at")
        row |= {"at.x": at["x"], "at.name": at["name"]}
    return rows


POLARS = {
    "file": lambda frame, path: frame.write_ipc(path),
    "file lz4": lambda frame, path: frame.write_ipc(path, compression="lz4"),
    "file zstd": lambda frame, path: frame.write_ipc(path, compression="zstd"),
    "file old": lambda frame, path: frame.write_ipc(path, compat_level=pl.CompatLevel.oldest()),
    "file of batches": lambda frame, path: frame.write_ipc(path, record_batch_size=2),
    "file of a sink": lambda frame, path: frame.lazy().sink_ipc(path),
    "stream": lambda frame, path: frame.write_ipc_stream(path),
    "stream zstd": lambda frame, path: frame.write_ipc_stream(path, compression="zstd"),
}


@pytest.mark.parametrize("kind", POLARS)
@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_arrow_as_polars_writes_it_is_read(kind, where, tmp_path):
    frames = [frame(), frame(4)]
    for number, content in enumerate(frames):
        POLARS[kind](content, tmp_path / f"{number}.arrow")
    rows, _ = rows_of(where(tmp_path))
    assert rows == rows_of_frame(pl.concat(frames))
    some, _ = rows_of(where(tmp_path), columns=["level", "at.name"])
    assert some == [{"level": row["level"], "at.name": row["at.name"]} for row in rows]


def write_all(folder, *tables):
    """Write Parquet and Arrow files by turns, in this order by name."""
    names = []
    for number, table in enumerate(tables):
        folder.mkdir(exist_ok=True)
        names.append(str(folder / f"{number}.parquet"))
        pq.write_table(table, names[-1])
    return names


def kinds_and_rows(folder, *tables, **changes):
    """Types by name; and each row, whose numbers have one dtype in all row groups."""
    write_all(folder, *tables)
    wanted = config(folder, **changes)
    index = read_index(wanted)
    groups = opened(wanted, index)
    columns = [groups.read(number)[0] for number in range(len(index.rows))]
    for name, _ in index.columns:
        arrays = [column[name] for column in columns if isinstance(column[name], np.ndarray)]
        assert len({array.dtype for array in arrays}) <= 1
    return dict(index.columns), rows_of(folder, **changes)[0]


TEXTS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "dictionary of views": pa.dictionary(pa.uint32(), pa.string_view()),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(TEXTS, 2)))
def test_texts_of_any_two_kinds_are_one_column(one, other, tmp_path):
    def table(kind):
        if pa.types.is_dictionary(kind):
            words = pa.array(WORDS, kind.value_type)
            indices = pa.array(range(len(WORDS)), kind.index_type)
            return pa.table({"s": pa.DictionaryArray.from_arrays(indices, words)})
        return pa.table({"s": pa.array(WORDS, kind)})

    for number, kind in enumerate((one, other)):
        write_arrow(tmp_path / f"{number}.arrow", table(TEXTS[kind]))
    assert rows_of(tmp_path)[0] == [{"s": word} for word in WORDS * 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("int32", "int64"), ("float", "double"), ("int64", "double"), ("uint64", "int64")),
        *(("bool", "int8"), ("timestamp[us]", "timestamp[ns]"), ("string", "binary")),
        ("string", "int64"),
    ],
)
def test_values_of_two_types_are_refused_at_open(one, other, tmp_path):
    for name, kind in (("0", one), ("1", other)):
        table = pa.table({"x": pa.nulls(2, pa.type_for_alias(kind))})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    said = (
        rf"'x' is {re.escape(one)} in 0\.parquet and {re.escape(other)} in 1\.parquet; write them"
    )
    refused(config(tmp_path), said)


def test_shards_whose_types_differ_are_those_that_are_named(tmp_path):
    write_all(tmp_path, *(pa.table({"x": x}) for x in (pa.nulls(1), ["a"], [1])))
    refused(config(tmp_path), r"'x' is string in 1\.parquet and int64 in 2\.parquet")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.list_(pa.int32()), pa.large_list(pa.int32()), "list<int32>"),
        (pa.list_(pa.int32(), 2), pa.list_(pa.int32()), "list<int32>"),
        (pa.list_(pa.int32(), 2), pa.large_list(pa.int32()), "list<int32>"),
        (pa.list_(pa.list_(pa.int8())), pa.large_list(pa.list_(pa.int8(), 1)), None),
    ],
)
def test_lists_of_any_layout_are_one_column(one, other, both, tmp_path):
    values = [[1, 2], [3, 4]] if both else [[[1], [2]], [[3], [4]]]
    both = both or "list<list<int8>>"
    for number, order in enumerate(itertools.permutations((one, other))):
        tables = [pa.table({"x": pa.array(values, kind)}) for kind in order]
        kinds, rows = kinds_and_rows(tmp_path / str(number), *tables)
        assert kinds == {"x": both}
        assert rows == [{"x": value} for value in values * 2]


def test_fixed_lists_of_two_sizes_are_refused(tmp_path):
    tables = [pa.table({"x": pa.array([[1] * n], pa.list_(pa.int32(), n))}) for n in (2, 3)]
    write_all(tmp_path, *tables)
    refused(config(tmp_path), r"'x' is list<int32>\[2\] in 0.* and list<int32>\[3\]")


def test_order_of_columns_nullability_and_metadata_do_not_matter(tmp_path):
    one = pa.table({"x": [1], "at": [{"lat": 1.0, "name": "n"}]})
    at = pa.array(
        [{"name": "m", "lat": 2.0}], pa.struct({"name": pa.string(), "lat": pa.float64()})
    )
    fields = [
        pa.field("at", at.type),
        pa.field("x", pa.int64(), nullable=False, metadata={"a": "b"}),
    ]
    other = pa.table([at, pa.array([2])], schema=pa.schema(fields, metadata={"made": "by"}))
    kinds, rows = kinds_and_rows(tmp_path, one, other)
    assert kinds == {"x": "int64", "at.lat": "double", "at.name": "string"}
    assert rows[1] == {"x": 2, "at.lat": 2.0, "at.name": "m"}


def test_a_text_that_some_shards_lack_is_none_there(tmp_path):
    whole = pa.table({"x": [1], "s": ["a"], "at": [{"y": 1, "t": "b"}]})
    lacks = pa.table({"x": [2], "at": [{"y": 2}]})
    null = pa.table({"x": [3], "s": pa.nulls(1), "at": [{"y": 3, "t": None}]})
    for number, order in enumerate(itertools.permutations((whole, lacks, null))):
        kinds, rows = kinds_and_rows(tmp_path / str(number), *order)
        assert kinds == {"x": "int64", "s": "string", "at.y": "int64", "at.t": "string"}
        assert sorted(row["x"] for row in rows) == [1, 2, 3]
        for row in rows:
            told = ("a", "b") if row["x"] == 1 else (None, None)
            assert (row["s"], row["at.t"]) == told
        some, rows = kinds_and_rows(tmp_path / str(number), *order, columns=["s"])
        assert some == {"s": "string"} and len(rows) == 3


def test_a_column_that_no_shard_has_is_refused_with_those_there_are(tmp_path):
    write_all(tmp_path, pa.table({"x": [1]}), pa.table({"x": [1], "s": ["a"]}))
    for columns in (["t"], ["s", "t"]):
        words = "DataConfig.columns: no column 't' in 0.parquet, which"
        refused(config(tmp_path, columns=columns), words)


def test_spark_pandas_polars_and_duckdb_write_one_data_set(tmp_path):
    """Spark's files say "optional" of all columns, and no Arrow schema."""
    values = {"id": [1, 2], "text": ["a", "b"], "kind": ["x", "y"]}
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("kind", pa.string())])
    pq.write_table(
        pa.table(values, schema), tmp_path / "part-00000.snappy.parquet", store_schema=False
    )
    pd.DataFrame(values).astype({"kind": "category"}).to_parquet(tmp_path / "pandas.parquet")
    pl.DataFrame(values).cast({"kind": pl.Categorical}).write_parquet(tmp_path / "polars.parquet")
    query = "select 1::bigint as id, 'a' as text, 'x' as kind union all select 2, 'b', 'y'"
    with duckdb.connect() as connection:
        connection.execute(f"copy ({query}) to '{tmp_path}/duckdb.parquet' (format parquet)")
    rows, counts = rows_of(tmp_path)
    assert len(counts) == 4
    by_id = sorted(rows, key=lambda row: row["id"])
    assert by_id == [
        dict(zip(values, row, strict=True))
        for row in zip(*values.values(), strict=True)
        for _ in range(4)
    ]


def test_a_delta_table_whose_schema_has_grown(tmp_path):
    url = str(tmp_path / "table")
    write_deltalake(url, pa.table({"id": pa.array([1], pa.int32()), "text": ["a"]}))
    new = pl.DataFrame({"id": [2], "text": ["b"], "note": ["n"]}, schema_overrides={"id": pl.Int32})
    write_deltalake(url, new.to_arrow(), mode="append", schema_mode="merge")
    rows, _ = rows_of(DeltaTable(url).file_uris())
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "text": "a", "note": None},
        {"id": 2, "text": "b", "note": "n"},
    ]


def test_extensions_of_pyarrow_are_read_as_their_storage(tmp_path):
    made = pa.ExtensionArray.from_storage
    words = pa.array(["{}", "[1]"])
    table = pa.table(
        {
            "json": made(pa.json_(), words),
            "uuid": made(pa.uuid(), pa.array([b"x" * 16] * 2, pa.binary(16))),
            "bool8": made(pa.bool8(), pa.array([0, 1], pa.int8())),
            "opaque": made(pa.opaque(pa.string(), "t", "v"), words),
            "lists": made(
                pa.opaque(pa.list_(pa.int8()), "t", "v"), pa.array([[1], [2]], pa.list_(pa.int8()))
            ),
            "in": pa.ListArray.from_arrays(
                [0, 1, 2], made(pa.bool8(), pa.array([0, 1], pa.int8()))
            ),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)),
        }
    )
    values = {
        "json": ("{}", "[1]"),
        "uuid": ([120] * 16, [120] * 16),
        "bool8": (0, 1),
        "opaque": ("{}", "[1]"),
        "lists": ([1], [2]),
        "in": ([0], [1]),
        "tensor": ([[0, 1], [2, 3]], [[4, 5], [6, 7]]),
    }
    expected = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path)[0] == expected
    write_arrow(tmp_path / "a.arrow", table)
    assert rows_of(f"{tmp_path}/a.arrow")[0] == expected
    stored = table.drop(["tensor"])
    storage = [plain(field.type) for field in stored.schema]
    storage = [kind.storage_type if hasattr(kind, "storage_type") else kind for kind in storage]
    pq.write_table(
        pa.table(
            [column.cast(kind) for column, kind in zip(stored.columns, storage, strict=True)],
            stored.column_names,
        ),
        tmp_path / "b.parquet",
    )
    columns = stored.column_names
    both = [{name: row[name] for name in columns} for row in expected * 2]
    assert rows_of(f"{tmp_path}/*.parquet", columns=columns)[0] == both


# Arrow shows `datasets`' extension types as such only once that is imported; a struct's as well.
READ = """
import sys
url, who = sys.argv[1:]
if who == "imports":
    import datasets, pyarrow as pa
    class Point(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.struct({"x": pa.int32(), "s": pa.string()}), "test.point")
        def __arrow_ext_serialize__(self):
            return b""
        @classmethod
        def __arrow_ext_deserialize__(cls, storage, serialized):
            return cls()
    pa.register_extension_type(Point())
from elastic_dp.data import read_index
from tests.data.shards import config, rows_of
for form in ("parquet", "arrow"):
    for columns in (None, ["m"], ["p.s"]):
        index = read_index(config(f"{url}/a.{form}", columns=columns))
        print(index.digest, index.columns, rows_of(f"{url}/a.{form}", columns=columns))
"""


def test_array2d_of_datasets_is_the_same_whoever_has_imported_it(tmp_path):
    metadata = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([[2, 2], "float32"]),
    }
    matrices = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32())))
    points = pa.array(
        [{"x": 1, "s": "a"}, {"x": 2, "s": "b"}], pa.struct({"x": pa.int32(), "s": pa.string()})
    )
    named = {"ARROW:extension:name": "test.point", "ARROW:extension:metadata": ""}
    fields = [
        pa.field("m", matrices.type, metadata=metadata),
        pa.field("p", points.type, metadata=named),
    ]
    table = pa.table([matrices, points], schema=pa.schema(fields))
    pq.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table)
    said = [
        subprocess.run(
            [sys.executable, "-c", READ, str(tmp_path), who], capture_output=True, text=True
        )
        for who in ("imports", "imports nothing")
    ]
    assert said[0].returncode == 0, said[0].stderr
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.count("'m': [[1.0, 2.0], [3.0, 4.0]]") == 4


@pytest.mark.parametrize("missing", ["number", "list", "in a struct", "text of the filter"])
def test_a_column_that_a_shard_lacks_is_refused_unless_it_is_text(missing, tmp_path):
    name = {"number": "y", "list": "l", "in a struct": "at", "text of the filter": "t"}[missing]
    whole = pa.table({"x": [1], "y": [0.5], "l": [[1]], "at": [{"z": 1}], "t": ["a"]})
    one = {"filter": pc.field("t") != "b"} if name == "t" else {}
    said = rf"^column '{name}(\.z)?' \(.*\) is not in 1.parquet; write it in all shards, or leave"
    write_all(tmp_path, whole, whole.drop_columns([name]))
    refused(config(tmp_path, **one), said)
    if name in ("y", "l"):
        at = whole.column_names.index(name)
        write_all(tmp_path, whole, whole.set_column(at, name, pa.nulls(1)))
        refused(config(tmp_path), rf"'{name}' .* holds 1 null, the first in 1.parquet")


def test_messages_whose_fields_differ_are_one_column(tmp_path):
    """The structs in a list are handed out as dicts, all with the same keys."""
    texts = pa.large_string()
    one = pa.array([[{"role": "user", "content": "a"}]])
    kind = pa.list_(
        pa.struct({"content": texts, "role": pa.dictionary(pa.int8(), texts), "n": pa.int8()})
    )
    other = pa.array([[{"content": "b", "role": "system", "n": 1}]], kind)
    rows = kinds_and_rows(tmp_path, pa.table({"m": one}), pa.table({"m": other}))[1]
    assert rows == [
        {"m": [{"role": "user", "content": "a", "n": None}]},
        {"m": [{"role": "system", "content": "b", "n": 1}]},
    ]


def test_a_name_that_means_two_columns_in_two_shards_is_refused(tmp_path):
    write_all(tmp_path, pa.table({"a.b": [1]}), pa.table({"a": [{"b": 2}]}))
    refused(config(tmp_path), r"'a.b' names 2 things in the shards together")


ROWS = pa.table(
    {
        "x": [None if i % 7 == 3 else i / 2 for i in range(40)],
        "n": [None if i == 30 else i for i in range(40)],
        "t": pa.nulls(40, pa.string()),
        "b": [i % 2 == 0 for i in range(40)],
        "l": [None if i < 2 else [i] for i in range(40)],
        "s": pa.array([{"m": [i]} if i else None for i in range(40)]),
    }
)
WRITERS = {
    "parquet": lambda path, rows: pq.write_table(rows, path, row_group_size=16),
    "stream.arrow": lambda path, rows: write_arrow(path, rows, stream=True),
    "file.arrow": lambda path, rows: write_arrow(path, rows, stream=False, compression="lz4"),
}


@pytest.mark.parametrize("ending", WRITERS)
def test_nulls_are_refused_at_open_with_column_count_and_shard(ending, tmp_path):
    without = ROWS.filter(pc.field("x").is_valid() & pc.field("n").is_valid())
    WRITERS[ending](tmp_path / f"a.{ending}", without)
    WRITERS[ending](tmp_path / f"z.{ending}", ROWS)
    for columns, said in {
        ("x", "n", "b"): rf"'x' \(double\) holds 6 nulls, the first in z\.{ending}; leave these ro",
        ("n",): r"'n' \(int64\) holds 1 null, .*DataConfig\.filter, .*DataConfig\.columns",
    }.items():
        refused(config(tmp_path, columns=list(columns)), rf"^column {said}")
    read_index(config(tmp_path, columns=["b", "t"]))


def test_null_lists_are_counted_with_those_of_the_struct_around_them(tmp_path):
    write_arrow(tmp_path / "a.arrow", ROWS, stream=False)
    for column, said in {"l": r"'l' \(list<int64>\) holds 2", "s": r"'s\.m' .* holds 1"}.items():
        refused(config(tmp_path, columns=[column]), said)


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("columns", [["x", "b"], ["b"]])
def test_rows_that_are_null_in_a_column_of_the_filter_are_left_out(ending, columns, tmp_path):
    WRITERS[ending](tmp_path / f"a.{ending}", ROWS)
    wanted = ROWS.filter(pc.field("x").is_valid()).select(columns).to_pylist()
    for one in (pc.field("x").is_valid(), pc.field("x") >= 0):
        assert rows_of(tmp_path, columns=columns, filter=one)[0] == wanted
    kept = read_index(config(tmp_path, columns=["x"], filter=pc.field("x").is_null()))
    with pytest.raises(
        DataError, match=r"column 'x' of row group \d of a.* holds \d nulls?; leave"
    ):
        opened(config(tmp_path, columns=["x"], filter=pc.field("x").is_null()), kept).read(0)


def test_samples_of_tar_without_a_class_are_counted(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(6):
            for ending in ("txt", "cls", "bin")[: 1 + number % 3]:
                add(tar, f"{number}.{ending}", b"7")
    refused(config(tmp_path), r"'cls' \(int64\) holds 2 nulls, the first in a\.tar")
    columns, _ = opened(config(tmp_path, filter=pc.field("cls").is_valid())).read(0)
    assert columns["cls"].tolist() == [7, 7, 7, 7]


def test_nulls_that_no_statistics_count_are_refused_with_shard_and_row_group(tmp_path):
    """Also those in lists, of which Parquet's count includes empty ones."""
    table = pa.table(
        {"x": [1.0] * 20 + [None], "l": [[1], []] * 10 + [[None]], "m": [[1]] * 20 + [None]}
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8, write_statistics=False)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=8)
    for file, column in (("a", "x"), ("b", "l"), ("b", "m")):
        groups = opened(config(tmp_path / f"{file}.parquet", columns=[column]))
        groups.read(1)
        where = rf"column '{column}' of row group 2 of {file}\.parquet holds 1 null; leave these"
        with pytest.raises(DataError, match=where):
            groups.read(2)


def test_types_of_a_shard_are_listed_as_often_for_many_columns_as_for_one(tmp_path, monkeypatch):
    """The index of 2,000 columns took 14 s."""
    listed, leaf_types = [], schemas._leaf_types
    monkeypatch.setattr(schemas, "_leaf_types", lambda types: listed.append(1) or leaf_types(types))
    counts = []
    for columns in (1, 50):
        table = pa.table({f"x{n}": [1] for n in range(columns)})
        pq.write_table(table, tmp_path / f"{columns}.parquet")
        listed.clear()
        read_index(config(tmp_path / f"{columns}.parquet"))
        counts.append(len(listed))
    assert counts[0] == counts[1] > 0
