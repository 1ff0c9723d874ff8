"""Files as their real producers write them, for test_zoo.py.

Each maker writes into an empty folder. `reads`: it returns what the producer's own reader gives,
and what to read where that is not the folder. `refuses`: it may return what to read.
"""

import datetime
import decimal
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import webdataset
from deltalake import DeltaTable, write_deltalake

from elastic_dp.errors import DataError
from tests.data.shards import add
from tests.imported_when_used import ImportedWhenUsed

datasets = ImportedWhenUsed("datasets")
ROWS = 12
IDS = list(range(ROWS))
Maker = Callable[[Path], Any]


@dataclass(frozen=True)
class At:
    """What is read, where it is not the whole folder."""

    url: Any
    rows: Any = None


@dataclass(frozen=True)
class Cell:
    """`words`: of the error where it is refused. `at_read`: this comes when rows are read, and not
    yet when the data set is opened."""

    make: Maker
    error: type[Exception] | None = None
    words: str = ""
    at_read: bool = False
    options: dict[str, Any] = field(default_factory=dict)


ZOO = {}


def reads(**options):
    return _listed(options=options)


def refuses(words, error=DataError, *, at_read=False, **options):
    return _listed(options=options, error=error, words=words, at_read=at_read)


def _listed(**facts):
    def add(make):
        assert make.__name__ not in ZOO
        ZOO[make.__name__] = Cell(make, **facts)
        return make

    return add


def list_all(producer, make, cases):
    """Add what `make` writes of each case."""
    ZOO.update({f"{producer}_{n}": Cell(partial(make, case)) for n, case in cases.items()})


def write(folder, table, name="a.parquet", **options):
    """A Parquet file by pyarrow, as pyarrow reads it."""
    table = pa.table(table) if isinstance(table, dict) else table
    pq.write_table(table, folder / name, **options)
    return pq.ParquetFile(folder / name).read()


# ------------------------------------------------------------------------------------ pandas


def frame():
    return pd.DataFrame(
        {
            "id": IDS,
            "x": [i / 4 for i in IDS],
            "s": [f"é{i}" for i in IDS],
            "b": [i % 2 == 0 for i in IDS],
        }
    )


def of_pandas(found):
    return pa.Table.from_pandas(found, preserve_index=False)


PANDAS = {  # what is beside the columns of `frame`
    "parquet": {},
    "categories": {"c": pd.Categorical([f"c{i % 3}" for i in IDS])},
    "datetimes": {"t": pd.date_range("2024-01-01", periods=ROWS, freq="h")},
    "missing_text": {"s": [None if i % 3 else "a" for i in IDS]},
}


def by_pandas(added, folder):
    frame().assign(**added).to_parquet(folder / "a.parquet")
    found = pd.read_parquet(folder / "a.parquet")
    return of_pandas(found.astype({"c": str} if "c" in added else {}))


list_all("pandas", by_pandas, PANDAS)


@reads()
def pandas_index(folder):
    frame().assign(id=[7 * i % 13 for i in IDS]).set_index("id").to_parquet(folder / "a.parquet")
    return of_pandas(pd.read_parquet(folder / "a.parquet").reset_index())


@reads()
def pandas_feather(folder):
    frame().to_feather(folder / "a.feather")
    return of_pandas(pd.read_feather(folder / "a.feather"))


@refuses(".orc")
def pandas_orc(folder):
    pa.orc.write_table(of_pandas(frame()), folder / "a.orc")


@reads()
def pandas_other_categories(folder):
    for name in "ab":
        made = frame().assign(c=pd.Categorical([f"{name}{i % 3}" for i in IDS]))
        made.to_parquet(folder / f"{name}.parquet")
    parts = [pd.read_parquet(folder / f"{name}.parquet").astype({"c": str}) for name in "ab"]
    return of_pandas(pd.concat(parts))


# ------------------------------------------------------------------------------------ Polars


def polars_frame():
    return pl.DataFrame(
        {
            "id": IDS,
            "x": [i / 4 for i in IDS],
            "s": [f"a text that is no short one, {i}" for i in IDS],
        }
    )


POLARS = {
    "parquet": polars_frame(),
    "nested": polars_frame().with_columns(
        pl.Series("l", [[i] * (i % 3) for i in IDS]),
        pl.Series("v", [[i, 1] for i in IDS], dtype=pl.Array(pl.Float32, 2)),
        pl.Series("p", [{"a": i, "b": str(i)} for i in IDS]),
    ),
    "kinds": pl.DataFrame(
        {
            "d": [decimal.Decimal(f"{i}.5") for i in IDS],
            "u": [datetime.timedelta(i) for i in IDS],
            "t": [datetime.time(1, i) for i in IDS],
            "b": [bytes([i]) * i for i in IDS],
            "h": pl.Series([2**63 + i for i in IDS], dtype=pl.UInt64),
        }
    ),
}


def by_polars(made, folder):
    made.write_parquet(folder / "a.parquet")
    return pl.read_parquet(folder / "a.parquet").to_arrow()


list_all("polars", by_polars, POLARS)


@reads()
def polars_ipc(folder):
    polars_frame().write_ipc(folder / "a.arrow")
    return pl.read_ipc(folder / "a.arrow").to_arrow()


@refuses("more than 64 bits")
def polars_int128(folder):
    made = pl.DataFrame({"h": [2**70]}, schema={"h": pl.Int128})
    made.write_parquet(folder / "a.parquet")


@reads()
def polars_beside_pandas(folder):
    frame().drop(columns="b").to_parquet(folder / "a.parquet")
    polars_frame().write_parquet(folder / "b.parquet")
    both = [
        of_pandas(pd.read_parquet(folder / "a.parquet")),
        pl.read_parquet(folder / "b.parquet").to_arrow(),
    ]
    return pa.concat_tables(both, promote_options="permissive")


# ------------------------------------------------------------------------------------ DuckDB


def of_duckdb(query):
    with duckdb.connect() as connection:
        found = connection.sql(query)
        return None if found is None else found.to_arrow_table()


def duckdb_copy(folder, columns, name, options=""):
    of_duckdb(f"COPY (SELECT {columns} FROM range({ROWS}) t(i)) TO '{folder / name}' ({options})")


DUCKDB = {  # the columns that are written, and how they are read
    "parquet": ("i AS id, i / 4 AS x, 'é' || i AS s, i % 2 = 0 AS b", "*"),
    "json": ("i AS id, json_object('a', i) AS j", "id, j::VARCHAR AS j"),
    "nested": (
        "i AS id, range(i % 3) AS l, {'a': i, 'b': i / 2} AS p, TIMESTAMP '2024-01-01' + "
        "INTERVAL (i) HOUR AS t",
        "*",
    ),
}


def by_duckdb(columns, folder):
    duckdb_copy(folder, columns[0], "a.parquet", "FORMAT parquet")
    return of_duckdb(f"SELECT {columns[1]} FROM '{folder}/a.parquet'")


list_all("duckdb", by_duckdb, DUCKDB)


@refuses("**")
def duckdb_partitions(folder):
    duckdb_copy(folder, "i AS id, i % 2 AS k", "t", "FORMAT parquet, PARTITION_BY (k)")
    return At(folder / "t")


@reads()
def duckdb_kinds(folder):
    columns = (
        "i::HUGEINT AS h, ('00000000-0000-0000-0000-0000000000' || (10 + i))::UUID AS u, "
        "'a'::ENUM('a', 'b') AS e, "
        "'\\xAA'::BLOB AS b, TIMETZ '12:00:00+01' AS z, [i, 1]::INT[2] AS v"
    )
    duckdb_copy(folder, columns, "a.parquet", "FORMAT parquet")
    found = pq.read_table(folder / "a.parquet")
    kinds = {"u": pa.binary(16)}
    fields = [field.with_type(kinds.get(field.name, field.type)) for field in found.schema]
    return found.cast(pa.schema(fields))


# ------------------------------------------------------------------------------------ datasets


def dataset(**more):
    return datasets.Dataset.from_dict({"id": IDS, "text": [f"text {i}" for i in IDS], **more})


def of_datasets(made):
    return made.with_format("arrow")[:]


@reads()
def datasets_saved(folder):
    dataset().save_to_disk(folder / "d", num_shards=2)
    return At(folder / "d", of_datasets(datasets.load_from_disk(folder / "d")))


@reads()
def datasets_parquet(folder):
    made = dataset(label=[i % 3 for i in IDS], ids=[[i] * (i % 4) for i in IDS])
    made = made.cast_column("label", datasets.ClassLabel(names=["a", "b", "c"]))
    made.to_parquet(folder / "a.parquet")
    return of_datasets(made)


@reads()
def datasets_array2d(folder):
    features = datasets.Features(
        {"id": datasets.Value("int64"), "image": datasets.Array2D((2, 3), "float32")}
    )
    made = datasets.Dataset.from_dict(
        {"id": IDS, "image": [[[i, 1, 2], [3, 4, i]] for i in IDS]}, features=features
    )
    made.to_parquet(folder / "a.parquet")
    return {"id": IDS, "image": [[[i, 1, 2], [3, 4, i]] for i in IDS]}


@reads()
def datasets_messages(folder):
    messages = [[{"role": "user", "content": f"{n}"} for n in range(i % 3)] for i in IDS]
    dataset(messages=messages).to_parquet(folder / "a.parquet")
    return {"id": IDS, "text": [f"text {i}" for i in IDS], "messages": messages}


# ------------------------------------------------------------------------------------ tables of a
# lake


def delta_with_deletes(folder):
    write_deltalake(folder / "t", pa.table({"id": IDS}))
    write_deltalake(folder / "t", pa.table({"id": [90, 91]}), mode="append")
    DeltaTable(folder / "t").delete("id >= 90 or id < 3")
    return DeltaTable(folder / "t")


@refuses("file_uris()")
def delta_folder(folder):
    delta_with_deletes(folder)
    return At(folder / "t")


@reads()
def delta_files(folder):
    table = delta_with_deletes(folder)
    return At(table.file_uris(), {"id": IDS[3:]})


def iceberg_with_deletes(folder):
    from pyiceberg.catalog.memory import InMemoryCatalog  # which takes a second

    catalog = InMemoryCatalog("catalog", warehouse=f"file://{folder}")
    catalog.create_namespace("space")
    made = catalog.create_table("space.name", schema=pa.table({"id": IDS}).schema)
    made.append(pa.table({"id": IDS}))
    made.delete("id < 3")
    return catalog.load_table("space.name")


@refuses("plan_files()")
def iceberg_folder(folder):
    iceberg_with_deletes(folder)
    return At(folder / "space" / "name")


@reads()
def iceberg_files(folder):
    scan = iceberg_with_deletes(folder).scan()
    return At([task.file.file_path for task in scan.plan_files()], scan.to_arrow())


# ------------------------------------------------------------------------------------ WebDataset


def samples(path, **more):
    with webdataset.TarWriter(str(path)) as tar:
        for i in IDS:
            tar.write(
                {"__key__": f"{i:03}", "txt": f"é{i}", "cls": i % 3, "json": {"a": i}, **more}
            )
    with path.open("rb") as stream:
        members = webdataset.tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
        rows = list(webdataset.tariterators.group_by_keys(members))
    names = [name for name in rows[0] if not name.startswith("__") or name == "__key__"]
    return {name: [_value(name, row[name]) for row in rows] for name in names}


def _value(name, content):
    if name == "cls":
        return int(content)
    return content.decode() if name in ("txt", "json") else content


@reads()
def webdataset_tar(folder):
    return samples(folder / "a.tar", bin=b"\0\1")


@reads()
def webdataset_shards(folder):
    with webdataset.ShardWriter(str(folder / "%03d.tar"), maxcount=5, verbose=0) as tar:
        for i in IDS:
            tar.write({"__key__": f"{i:03}", "cls": i})
    return {"__key__": [f"{i:03}" for i in IDS], "cls": IDS}


def add_member(path, *members):
    with tarfile.open(path, "a") as tar:
        for name, content in members:
            add(tar, name, content)


@refuses("011.txt")
def webdataset_twice(folder):
    samples(folder / "a.tar")
    add_member(folder / "a.tar", ("011.txt", b"another"))


@reads()
def webdataset_license(folder):
    rows = samples(folder / "a.tar")
    add_member(folder / "a.tar", ("LICENSE", b"do what you like"))
    return rows


# ------------------------------------------------------------------------------------ Spark's
# layout


def spark(folder, parts):
    """Write a folder as Spark's committer leaves it; the files are pyarrow's."""
    for number, ids in enumerate(parts):
        name = f"part-{number:05}-9d4e1e0c-c000.snappy.parquet"
        write(
            folder,
            {
                "id": pa.array(ids, pa.int64()),
                "s": [str(i) for i in ids] or pa.array([], pa.string()),
            },
            name,
            compression="snappy",
        )
        (folder / f".{name}.crc").write_bytes(b"crc\0")
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / "._SUCCESS.crc").write_bytes(b"crc\0")


@reads()
def spark_folder(folder):
    spark(folder, [IDS[:5], IDS[5:]])
    return {"id": IDS, "s": [str(i) for i in IDS]}


@reads()
def spark_empty_parts(folder):
    spark(folder, [[], IDS[:5], [], IDS[5:]])
    return {"id": IDS, "s": [str(i) for i in IDS]}


@reads()
def spark_temporary(folder):
    spark(folder, [IDS])
    (folder / "_temporary" / "0").mkdir(parents=True)
    write(folder / "_temporary" / "0", {"id": [99], "s": ["late"]}, "part-00001.parquet")
    return {"id": IDS, "s": [str(i) for i in IDS]}


@refuses("part-00001")
def spark_cut(folder):
    spark(folder, [IDS, IDS])
    part = sorted(folder.glob("part-*"))[1]
    part.write_bytes(part.read_bytes()[:-20])


# ------------------------------------------------------------------------------------ pyarrow,
# Parquet


KINDS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
KINDS += [pa.float16(), pa.float32(), pa.float64()]
PAIRS = pa.list_(pa.list_(pa.float32(), 2), 3)
PARQUET = {
    "numbers": {str(kind): pa.array(np.array(IDS), kind) for kind in KINDS}
    | {"bool": [i % 2 == 0 for i in IDS]},
    "bytes": {
        "b": [bytes([i]) * i for i in IDS],
        "f": pa.array([bytes([i, 1]) for i in IDS], pa.binary(2)),
    },
    "times": {
        "t": pa.array(IDS, pa.timestamp("us", "UTC")),
        "d": pa.array([datetime.date(2024, 1, 1) + datetime.timedelta(i) for i in IDS]),
        "c": pa.array(IDS, pa.time32("ms")),
        "e": pa.array(IDS, pa.duration("us")),
    },
    "decimals": {"id": IDS, "price": [decimal.Decimal(f"{i}.25") for i in IDS]},
    "lists": {"one": [[i, 1] for i in IDS], "several": [[i] * (i % 3) for i in IDS]},
    "fixed_lists": {"id": IDS, "v": pa.array([[[i, 1]] * 3 for i in IDS], PAIRS)},
    "ragged": {"id": IDS, "v": [[[n] * n for n in range(i % 4)] for i in IDS]},
    "texts": {"id": IDS, "v": [[f"{n}" for n in range(i % 4)] for i in IDS]},
    "structs": {"id": IDS, "p": [{"a": i, "q": {"b": i / 2}} for i in IDS]},
    "dots": {"id": IDS, "a.b": IDS, "a": [f"{i}" for i in IDS]},
    "names": pa.table([IDS] * 5, names=["a b", "ü", "", "a,b", 'q"']),
    "case": pa.table([IDS, IDS[::-1]], names=["Id", "id"]),
}
list_all("parquet", lambda columns, folder: write(folder, columns), PARQUET)


@reads()
def parquet_codecs(folder):
    codecs = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
    return pa.concat_tables(
        write(folder, {"id": IDS, "s": list("abcdefghijkl")}, f"{n}.parquet", compression=codec)
        for n, codec in enumerate(codecs)
    )


@reads()
def parquet_pages(folder):
    one = write(folder, {"id": IDS}, "1.parquet", data_page_version="1.0", write_page_checksum=True)
    return pa.concat_tables(
        [
            one,
            write(
                folder, {"id": IDS}, "2.parquet", data_page_version="2.0", write_page_checksum=True
            ),
        ]
    )


@reads()
def parquet_encodings(folder):
    encodings = {"id": "DELTA_BINARY_PACKED", "s": "DELTA_BYTE_ARRAY", "x": "BYTE_STREAM_SPLIT"}
    columns = {"id": IDS, "s": [f"prefix {i}" for i in IDS], "x": [i / 4 for i in IDS]}
    return write(folder, columns, use_dictionary=False, column_encoding=encodings)


@reads()
def parquet_row_groups(folder):
    large = write(folder, {"id": range(50_000)}, "1.parquet", row_group_size=50_000)
    return pa.concat_tables([large, write(folder, {"id": IDS}, "2.parquet", row_group_size=1)])


@reads()
def parquet_tensors(folder):
    values = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
    write(folder, {"id": IDS, "v": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    return {"id": IDS, "v": values.tolist()}


@reads()
def parquet_dictionaries(folder):
    table = write(folder, {"c": pa.array([f"c{i % 3}" for i in IDS]).dictionary_encode()})
    return table.cast(pa.schema({"c": pa.string()}))


@reads()
def parquet_empty_row_groups(folder):
    with pq.ParquetWriter(
        folder / "a.parquet", pa.schema({"id": pa.int64()}), write_page_index=True
    ) as file:
        for ids in ([], IDS, [], IDS, []):
            file.write_table(pa.table({"id": pa.array(ids, pa.int64())}))
    return {"id": IDS + IDS}


@refuses("differ only in case")
def parquet_other_case(folder):
    write(folder, {"n": IDS, "Id": ["a"] * ROWS}, "1.parquet")
    write(folder, {"n": IDS, "id": ["b"] * ROWS}, "2.parquet")


@refuses("schemas differ")
def parquet_scales(folder):
    write(folder, {"p": [decimal.Decimal("1.25")]}, "1.parquet")
    write(folder, {"p": [decimal.Decimal("1.255")]}, "2.parquet")


@reads()
def parquet_null_structs(folder):
    write(folder, {"p": [{"s": "x"}, None, {"s": None}]})
    return At(folder, {"p.s": ["x", None, None]})


# ------------------------------------------------------------------------------------ pyarrow,
# others


def ipc(path, table, make, codec=None):
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=5)
    return table


@reads()
def arrow_kinds(folder):
    table = pa.table({"id": IDS, "s": [f"é{i}" for i in IDS], "v": [[i, 1] for i in IDS]})
    for make in (pa.ipc.new_file, pa.ipc.new_stream):
        for codec in (None, "lz4", "zstd"):
            ipc(folder / f"{make.__name__} {codec}.arrow", table, make, codec)
    return pa.concat_tables([table] * 6)


@reads()
def arrow_feather(folder):
    pa.feather.write_feather(pa.table({"id": IDS}), str(folder / "a.feather"))
    return pa.feather.read_table(folder / "a.feather")


@refuses("Feather")
def arrow_old_feather(folder):
    (folder / "a.feather").write_bytes(b"FEA1" + bytes(64) + b"FEA1")
