"""Folders of Delta Lake, Iceberg and Hudi are refused, and the lines that the refusal gives read
exactly the table's rows.

The tables are written by `deltalake` and `pyiceberg`, but for deletion vectors and delete files,
which they only read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.dataprep.convert import convert
from elastic_dp.dataprep.inspection.inspect_dataset import inspect
from elastic_dp.errors import DataError
from elastic_dp.storage import Store
from tests.data.values import in_place
from tests.imported_when_used import ImportedWhenUsed

catalogs = ImportedWhenUsed("pyiceberg.catalog.memory")
manifests = ImportedWhenUsed("pyiceberg.manifest")
types = ImportedWhenUsed("pyiceberg.types")


def config(url: str | Path | list[str]) -> DataConfig:
    return DataConfig(url if isinstance(url, list) else str(url), micro_batch_size=1)


def ids(url: str | Path | list[str]) -> list[int]:
    """Return the ids of all rows that a job would read, sorted; and all sources have one weight."""
    wanted = config(url)
    index = read_index(wanted)
    assert index.weights is None
    groups = ShardRowGroups(wanted, index, [Store(one) for one in wanted.urls])
    found = [groups.read(number)[0]["id"] for number in range(len(index.rows))]
    return sorted(np.concatenate(found).tolist())


def numbers(start: int, end: int, **columns: list) -> pa.Table:
    return pa.table({"id": pa.array(range(start, end), pa.int64()), **columns})


def by_id(rows: dict[str, list] | pa.Table) -> dict[str, list]:
    table = rows if isinstance(rows, pa.Table) else pa.table(rows)
    return table.sort_by("id").select(sorted(table.column_names)).to_pydict()


def refused(url: str | Path, *words: str, without: str = "no such word") -> None:
    for read in (lambda: read_index(config(url)), lambda: inspect(str(url))):
        with pytest.raises(DataError) as error:
            read()
        assert without not in str(error.value)
        for word in words:
            assert word in str(error.value)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Rows 0 to 9, of 15 that were written and 5 that were deleted."""
    table = tmp_path / "table"
    write_deltalake(table, numbers(0, 10))
    write_deltalake(table, numbers(10, 15), mode="append")
    DeltaTable(table).delete("id >= 10")
    write_deltalake(table, numbers(90, 95), mode="append")
    DeltaTable(table).delete("id in (90, 91, 92, 93, 94)")
    return table


@pytest.mark.parametrize("url", ["{}", "{}/", "{}/*.parquet", "{}/**", "{}/**/*.parquet"])
def test_delta_table_is_refused_with_the_line_that_reads_its_rows(url, delta):
    refused(url.format(delta), "Delta table", f"DeltaTable('{delta}').file_uris()")
    files = DeltaTable(delta).file_uris()
    assert ids(files) == list(range(10))
    assert len(list(delta.glob("*.parquet"))) > len(files)


def test_delta_table_of_partitions_is_read_with_their_columns_from_its_list(tmp_path):
    """A list of files as the refusal offers it is read without a warning."""
    table = tmp_path / "table"
    rows = numbers(0, 6, day=[1, 2] * 3, p=["a b", "c"] * 3)
    write_deltalake(table, rows, partition_by=["day", "p"])
    refused(table, "are read from the names of their folders, as int64 or text")
    assert by_id(in_place(config(DeltaTable(table).file_uris()))) == by_id(rows)


def test_delta_table_of_partitions_is_known_from_inside_of_them(tmp_path):
    table = tmp_path / "table"
    parts = ["a b", "x=y", "c[1]"]
    write_deltalake(table, numbers(0, 9, p=parts * 3), partition_by=["p"])
    DeltaTable(table).delete("id >= 6")
    for url in (f"{table}/*/*.parquet", f"{table}/p=*/*", f"{table}/p=a%20b", f"{table}/p=a%20b/*"):
        refused(url, f"the Delta table '{table}'")
    assert ids(DeltaTable(table).file_uris()) == list(range(6))
    (file, *_) = (table / "p=a%20b").glob("*.parquet")
    refused(file, "Delta table")
    with pytest.raises(DataError, match="Delta table"):
        convert(str(file), str(tmp_path / "out"))


def test_delta_table_beside_other_folders_is_found_by_a_deep_glob_and_only_there(delta):
    beside = delta.parent / "plain"
    beside.mkdir()
    pq.write_table(numbers(0, 3), beside / "a.parquet")
    refused(f"{delta.parent}/**/*.parquet", f"the Delta table '{delta}'")
    assert ids(f"{delta.parent}/pl*/*.parquet") == [0, 1, 2]
    assert ids(f"{delta.parent}/plain") == [0, 1, 2]


def test_delta_table_in_a_list_of_folders_is_refused(delta):
    with pytest.raises(DataError, match="Delta table"):
        read_index(config([str(delta), str(delta / "*.parquet")]))


def deletion_vector(rows: list[int]) -> dict:
    """Return the deletion vector of a file: an inline one, as the protocol of Delta lays it out: a
    64-bit Roaring bitmap in Z85."""
    bitmap = struct.pack("<iiHHI", 12346, 1, 0, len(rows) - 1, 16)
    bitmap += struct.pack(f"<{len(rows)}H", *rows)
    content = struct.pack("<iqi", 1681511377, 1, 0) + bitmap
    padded = content + bytes(-len(content) % 4)
    text = "".join(_z85(padded[at : at + 4]) for at in range(0, len(padded), 4))
    return {
        "storageType": "i",
        "pathOrInlineDv": text,
        "sizeInBytes": len(content),
        "cardinality": len(rows),
    }


def _z85(four: bytes) -> str:
    alphabet = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
    value, digits = int.from_bytes(four, "big"), []
    for _ in range(5):
        value, digit = divmod(value, 85)
        digits.append(alphabet[digit])
    return "".join(reversed(digits))


def mark_deleted(table: Path, rows: list[int]) -> None:
    """In the one file of a table that has one version."""
    log = table / "_delta_log"
    lines = (log / "00000000000000000000.json").read_text().splitlines()
    (add,) = [json.loads(line)["add"] for line in lines if line.startswith('{"add"')]
    commit = [
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": deletion_vector(rows)}},
    ]
    (log / "00000000000000000001.json").write_text("\n".join(map(json.dumps, commit)))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_delta_table_with_deletion_vectors_is_read_by_the_other_line(checkpoint, tmp_path):
    table = tmp_path / "table"
    write_deltalake(table, numbers(0, 10), configuration={"delta.enableDeletionVectors": "true"})
    mark_deleted(table, [7, 8, 9])
    refused(table, "write_table(pyarrow.table(DeltaTable(", ").scan())", without="file_uris")
    if checkpoint:
        DeltaTable(table).create_checkpoint()
        for commit in (table / "_delta_log").glob("*.json"):
            commit.unlink()
        refused(table, "write_table(pyarrow.table(DeltaTable(", without="file_uris")
    opened = DeltaTable(table)
    assert ids(opened.file_uris()) == list(range(10)), "the files still hold deleted rows"
    assert sum(batch.num_rows for batch in pa.table(opened.deletion_vectors()).to_batches()) == 1
    pq.write_table(pa.table(opened.scan()), tmp_path / "rows.parquet")
    assert ids(tmp_path / "rows.parquet") == list(range(7))


@pytest.mark.parametrize(
    "url", ["{}", "{}/data", "{}/data/*.parquet", "{}/**/*.parquet", "{}/data/"]
)
def test_iceberg_table_is_refused_with_the_line_that_reads_its_rows(url, tmp_path):
    catalog = catalogs.InMemoryCatalog("catalog", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("space")
    made = catalog.create_table("space.name", schema=numbers(0, 1).schema)
    made.append(numbers(0, 10))
    made.append(numbers(10, 15))
    made.delete("id < 3")
    folder = tmp_path / "space" / "name"
    assert (folder / "metadata").is_dir()
    refused(url.format(folder), f"the Iceberg table '{folder}'", "scan().plan_files()")
    tasks = list(catalog.load_table("space.name").scan().plan_files())
    assert not any(task.delete_files for task in tasks)
    assert ids([task.file.file_path for task in tasks]) == list(range(3, 15))


def of_delete_files(transaction, io):
    """An update that adds delete files, which pyiceberg reads and does not write."""
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    class Writer(manifests.ManifestWriterV2):
        def content(self):
            return manifests.ManifestContent.DELETES

        @property
        def _meta(self):
            return {**manifests.ManifestWriter._meta.fget(self), "content": "deletes"}

    class AddDeleteFiles(_FastAppendFiles):
        def new_manifest_writer(self, spec):
            output = self.new_manifest_output()
            return Writer(spec, self.schema(), output, self._snapshot_id, "null")

    return AddDeleteFiles(Operation.APPEND, transaction, io)


def iceberg_with(kind: str, folder: Path) -> Any:
    """Rows 0 to 9, and a file that deletes 2 and 5 by their places, or by their ids."""
    from pyiceberg.typedef import Record

    catalog = catalogs.InMemoryCatalog("catalog", warehouse=f"file://{folder}")
    catalog.create_namespace("space")
    made = catalog.create_table(
        "space.name", schema=numbers(0, 1).schema, properties={"format-version": "2"}
    )
    made.append(numbers(0, 10))
    (task,) = made.scan().plan_files()
    path = folder / "space" / "name" / "data" / "deletes.parquet"
    if kind == "POSITION_DELETES":
        pq.write_table(pa.table({"file_path": [task.file.file_path] * 2, "pos": [2, 5]}), path)
    else:
        pq.write_table(pa.table({"id": [2, 5]}), path)
    with (
        made.transaction() as transaction,
        of_delete_files(transaction, made.io) as update,
    ):
        deletes = manifests.DataFile.from_args(
            content=manifests.DataFileContent[kind],
            file_path=f"file://{path}",
            file_format=manifests.FileFormat.PARQUET,
            partition=Record(),
            record_count=2,
            file_size_in_bytes=path.stat().st_size,
            column_sizes={},
            value_counts={},
            null_value_counts={},
            nan_value_counts={},
            lower_bounds={},
            upper_bounds={},
            equality_ids=[1] if kind == "EQUALITY_DELETES" else None,
        )
        deletes.spec_id = made.metadata.default_spec_id
        update.append_data_file(deletes)
    return catalog


@pytest.mark.parametrize("url", ["{}", "{}/data", "{}/data/*.parquet", "{}/**/*.parquet"])
def test_iceberg_table_with_delete_files_is_read_by_the_line_that_writes_its_rows(url, tmp_path):
    catalog = iceberg_with("POSITION_DELETES", tmp_path)
    folder = tmp_path / "space" / "name"
    refused(url.format(folder), "Iceberg table", "scan().to_arrow()", without="plan_files")
    with pytest.raises(DataError) as error:
        convert(url.format(folder), str(tmp_path / "out"))
    assert "to_arrow()" in str(error.value) and "plan_files" not in str(error.value)
    (task,) = catalog.load_table("space.name").scan().plan_files()
    assert task.delete_files and ids([task.file.file_path]) == list(range(10)), "the file has them"
    pq.write_table(catalog.load_table("space.name").scan().to_arrow(), tmp_path / "rows.parquet")
    assert ids(tmp_path / "rows.parquet") == [0, 1, 3, 4, 6, 7, 8, 9]


def test_iceberg_table_with_equality_deletes_is_refused_with_the_line_of_spark(tmp_path):
    catalog = iceberg_with("EQUALITY_DELETES", tmp_path)
    folder = tmp_path / "space" / "name"
    refused(
        folder, "equality deletes", "spark.table(", "write.parquet('rows')", without="plan_files"
    )
    with pytest.raises(ValueError, match="does not yet support equality deletes"):
        catalog.load_table("space.name").scan().to_arrow()


def test_table_whose_log_cannot_be_read_has_no_line_that_names_files(tmp_path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "v2.metadata.json").write_text("{")
    pq.write_table(numbers(0, 3), tmp_path / "a.parquet")
    refused(tmp_path, "Iceberg table", "to_arrow()", without="plan_files")


def test_hudi_table_is_refused(tmp_path):
    (tmp_path / ".hoodie").mkdir()
    (tmp_path / ".hoodie" / "hoodie.properties").write_text("hoodie.table.name=t")
    (tmp_path / "day=1").mkdir()
    for folder in (tmp_path, tmp_path / "day=1"):
        pq.write_table(numbers(0, 3), folder / "a.parquet")
        refused(folder, f"the Hudi table '{tmp_path}'", "spark.read.format('hudi')")


def test_table_on_a_store_is_refused(delta):
    system = fsspec.filesystem("memory")
    for file in delta.rglob("*"):
        if file.is_file():
            system.pipe_file(f"/lake/{file.relative_to(delta)}", file.read_bytes())
    refused("memory://lake", "the Delta table")
    refused("memory://lake/*.parquet", "the Delta table")


# ------------------------------------------------------------------------------ after a rename


def iceberg(folder: Path, change) -> Any:
    """Two rows before a change of the schema, and one after it."""
    catalog = catalogs.InMemoryCatalog("catalog", warehouse=f"file://{folder}")
    catalog.create_namespace("space")
    schema = pa.schema({"id": pa.int64(), "text": pa.string(), "old": pa.string()})
    made = catalog.create_table("space.name", schema=schema)
    made.append(pa.table({"id": [1, 2], "text": ["a", "b"], "old": ["x", "y"]}))
    with made.update_schema(allow_incompatible_changes=True) as update:
        change(update)
    row = {"id": [3], "text": ["c"], "body": ["c"], "old": ["z"], "new": ["n"]}
    made.append(pa.table({n: v for n, v in row.items() if n in made.schema().column_names}))
    return catalog


def replaced(update) -> None:
    update.delete_column("old")
    update.rename_column("text", "old")


@pytest.mark.parametrize(
    ("change", "is_offered"),
    [
        (lambda update: update.rename_column("text", "body"), False),
        (lambda update: update.delete_column("old"), False),
        (replaced, False),
        (lambda update: update.add_column("new", types.StringType()), True),
    ],
    ids=["rename", "drop", "replace", "add"],
)
def test_iceberg_table_after_a_change_of_its_columns_offers_its_files_only_if_names_hold(
    change, is_offered, tmp_path, caplog
):
    catalog = iceberg(tmp_path, change)
    folder = tmp_path / "space" / "name"
    scan = catalog.load_table("space.name").scan()
    files = [task.file.file_path for task in scan.plan_files()]
    wanted = scan.to_arrow()
    if is_offered:
        refused(folder, "scan().plan_files()")
        assert by_id(in_place(config(files))) == by_id(wanted)
        assert not caplog.records
    else:
        refused(folder, "renamed or dropped", "scan().to_arrow()", without="plan_files")
        caplog.clear()
        read_index(config(files))
        (record,) = caplog.records
        assert "2 files (such as file:///" in record.message
        assert "names that were changed or dropped later" in record.message
        pq.write_table(wanted, tmp_path / "rows.parquet")
        assert by_id(in_place(config(tmp_path / "rows.parquet"))) == by_id(wanted)


def test_delta_table_with_column_mapping_offers_no_list_of_files(tmp_path, caplog):
    table = tmp_path / "table"
    write_deltalake(table, numbers(0, 3))
    log = table / "_delta_log" / "00000000000000000000.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            line["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"
    log.write_text("\n".join(map(json.dumps, lines)))
    refused(table, "column mapping", without="file_uris")
    read_index(config([str(path) for path in table.glob("*.parquet")]))
    (record,) = caplog.records
    assert "may have columns under other names" in record.message


# -------------------------------------------------------------------------- lists of single files


def warned(urls: list[str], caplog) -> list[str]:
    caplog.clear()
    read_index(config(urls))
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("where", ["folder", "partitions", "memory"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_list_of_a_delta_tables_files_is_warned_of_if_it_is_not_the_newest_version(
    where, checkpoint, tmp_path, caplog
):
    table = tmp_path / "table"
    by = {"partition_by": ["p"]} if where == "partitions" else {}
    write_deltalake(table, numbers(0, 6, p=["a b", "c[1]"] * 3), **by)
    write_deltalake(table, numbers(6, 8, p=["d", "e"]), mode="append", **by)
    first = DeltaTable(table).file_uris()
    DeltaTable(table).delete("id < 4")
    newest = DeltaTable(table)
    if checkpoint:
        newest.create_checkpoint()
    write_deltalake(table, numbers(8, 10, p=["c[1]", "e"]), mode="append", **by)
    live, listed = DeltaTable(table).file_uris(), sorted(map(str, table.rglob("[0-9a-z]*.parquet")))
    listed = [path for path in listed if "_delta_log" not in path]
    assert set(live) < set(listed)
    if where == "memory":
        system = fsspec.filesystem("memory")
        for file in table.rglob("*"):
            if file.is_file():
                system.pipe_file(f"{file}", file.read_bytes())
        first, live, listed = (
            [f"memory://{one}" for one in some] for some in (first, live, listed)
        )
    assert warned(live, caplog) == []
    assert warned(live[:2], caplog) == []
    dead = sorted(set(listed) - set(live))
    (line,) = warned(listed, caplog)
    count = "1 file" if len(dead) == 1 else f"{len(dead)} files"
    assert f"{count} (such as {dead[0]}) of the list hold{'s' * (len(dead) == 1)} rows that" in line
    assert f"DeltaTable('{'memory://' * (where == 'memory')}{table}').file_uris()" in line
    (line,) = warned(first, caplog)
    assert "if the list is one of an older version on purpose, nothing is wrong" in line


def test_brace_list_and_mixture_of_a_delta_tables_files_are_warned_of(delta, caplog):
    names = ",".join(sorted(path.name for path in delta.glob("*.parquet")))
    (line,) = warned([f"{delta}/{{{names}}}"], caplog)
    assert "hold rows that were deleted" in line
    live = DeltaTable(delta).file_uris()
    (dead, *_) = sorted({*map(str, delta.glob("*.parquet"))} - {*live})
    caplog.clear()
    read_index(DataConfig({live[0]: 1, dead: 1}, micro_batch_size=1))
    assert f"1 file (such as {dead}) of the list hold" in caplog.text


def test_list_with_rows_marked_as_deleted_is_warned_of(tmp_path, caplog):
    table = tmp_path / "table"
    write_deltalake(table, numbers(0, 10))
    mark_deleted(table, [7, 8, 9])
    (line,) = warned(DeltaTable(table).file_uris(), caplog)
    assert "1 file (such as" in line and "marked as deleted (deletion vectors of the" in line
    assert f"DeltaTable('{table}').scan()" in line


def test_list_of_a_table_whose_log_cannot_be_compared_is_warned_of(delta, caplog):
    (delta / "_delta_log" / "00000000000000000001.json").unlink()
    (line,) = warned([str(path) for path in delta.glob("*.parquet")], caplog)
    assert "whose log could not be compared with the list" in line


@pytest.mark.parametrize("hashed", ["false", "true"])
@pytest.mark.parametrize("deletes", [False, True])
def test_list_of_an_iceberg_tables_files_is_warned_of_if_it_is_not_the_newest_snapshot(
    deletes, hashed, tmp_path, caplog
):
    catalog = catalogs.InMemoryCatalog("catalog", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("space")
    made = catalog.create_table(
        "space.name",
        schema=numbers(0, 1).schema,
        properties={"write.object-storage.enabled": hashed},
    )
    made.append(numbers(0, 10))
    made.append(numbers(10, 15))
    if deletes:
        made.delete("id < 3")
    live = [task.file.file_path for task in made.scan().plan_files()]
    listed = sorted(map(str, (tmp_path / "space" / "name" / "data").glob("**/*.parquet")))
    assert (Path(listed[0]).parent.name != "data") == (hashed == "true")
    assert warned(live, caplog) == []
    assert len(listed) == len(live) + deletes
    lines = warned(listed, caplog)
    assert len(lines) == deletes
    if deletes:
        assert "3 files (such as" in lines[0] and "not exactly the 2 data files" in lines[0]
    assert len(warned(live[:1], caplog)) == deletes, "a part may be stale"


def test_list_of_an_iceberg_tables_files_with_delete_files_is_warned_of(tmp_path, caplog):
    catalog = iceberg_with("POSITION_DELETES", tmp_path)
    (task,) = catalog.load_table("space.name").scan().plan_files()
    (line, *_) = warned([task.file.file_path], caplog)
    assert "may hold rows that are marked as deleted" in line and "to_arrow()" in line


def test_list_of_a_hudi_tables_files_is_warned_of(tmp_path, caplog):
    (tmp_path / ".hoodie").mkdir()
    (tmp_path / ".hoodie" / "hoodie.properties").write_text("hoodie.table.name=t")
    pq.write_table(numbers(0, 3), tmp_path / "a.parquet")
    (line,) = warned([str(tmp_path / "a.parquet")], caplog)
    assert f"of the Hudi table '{tmp_path}', whose log could not be compared" in line


def test_list_of_files_of_no_table_is_read_without_a_word(tmp_path, caplog):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(numbers(0, 3), tmp_path / f"day={day}" / f"{day}.parquet")
    assert warned([str(path) for path in tmp_path.rglob("*.parquet")], caplog) == []


def test_folder_of_metadata_that_is_no_tables_is_read(tmp_path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "notes.json").write_text("{}")
    pq.write_table(numbers(0, 3), tmp_path / "a.parquet")
    assert ids(tmp_path) == [0, 1, 2]
