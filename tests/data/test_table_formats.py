"""Folders of Delta Lake, Iceberg and Hudi are refused, and the lines that the refusal gives read
exactly the table's rows.

The tables are written by `deltalake` and `pyiceberg`, but for deletion vectors and delete files,
which they only read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestWriter,
    ManifestWriterV2,
)
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import ShardRowGroups
from elastic_dp.dataprep.convert import convert
from elastic_dp.dataprep.inspection.inspect_dataset import inspect
from elastic_dp.errors import DataError
from elastic_dp.storage import Store


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
    refused(url.format(delta), "Delta table", f"DeltaTable('{delta}').file_uris()", "partition")
    files = DeltaTable(delta).file_uris()
    assert ids(files) == list(range(10))
    assert len(list(delta.glob("*.parquet"))) > len(files)


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


@pytest.mark.parametrize("checkpoint", [False, True])
def test_delta_table_with_deletion_vectors_is_read_by_the_other_line(checkpoint, tmp_path):
    table = tmp_path / "table"
    write_deltalake(table, numbers(0, 10), configuration={"delta.enableDeletionVectors": "true"})
    log = table / "_delta_log"
    lines = (log / "00000000000000000000.json").read_text().splitlines()
    (add,) = [json.loads(line)["add"] for line in lines if line.startswith('{"add"')]
    commit = [
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": deletion_vector([7, 8, 9])}},
    ]
    (log / "00000000000000000001.json").write_text("\n".join(map(json.dumps, commit)))
    refused(table, "write_table(pyarrow.table(DeltaTable(", ").scan())", without="file_uris")
    if checkpoint:
        DeltaTable(table).create_checkpoint()
        for commit in log.glob("*.json"):
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
    catalog = InMemoryCatalog("catalog", warehouse=f"file://{tmp_path}")
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


class AddDeleteFiles(_FastAppendFiles):
    """Which pyiceberg reads and does not write."""

    def new_manifest_writer(self, spec):
        class Writer(ManifestWriterV2):
            def content(self):
                return ManifestContent.DELETES

            _meta = property(lambda self: {**ManifestWriter._meta.fget(self), "content": "deletes"})

        return Writer(spec, self.schema(), self.new_manifest_output(), self._snapshot_id, "null")


def iceberg_with(content: DataFileContent, folder: Path) -> InMemoryCatalog:
    """Rows 0 to 9, and a file that deletes 2 and 5 by their places, or by their ids."""
    catalog = InMemoryCatalog("catalog", warehouse=f"file://{folder}")
    catalog.create_namespace("space")
    made = catalog.create_table(
        "space.name", schema=numbers(0, 1).schema, properties={"format-version": "2"}
    )
    made.append(numbers(0, 10))
    (task,) = made.scan().plan_files()
    path = folder / "space" / "name" / "data" / "deletes.parquet"
    if content == DataFileContent.POSITION_DELETES:
        pq.write_table(pa.table({"file_path": [task.file.file_path] * 2, "pos": [2, 5]}), path)
    else:
        pq.write_table(pa.table({"id": [2, 5]}), path)
    with (
        made.transaction() as transaction,
        AddDeleteFiles(Operation.APPEND, transaction, made.io) as update,
    ):
        deletes = DataFile.from_args(
            content=content,
            file_path=f"file://{path}",
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=2,
            file_size_in_bytes=path.stat().st_size,
            column_sizes={},
            value_counts={},
            null_value_counts={},
            nan_value_counts={},
            lower_bounds={},
            upper_bounds={},
            equality_ids=[1] if content == DataFileContent.EQUALITY_DELETES else None,
        )
        deletes.spec_id = made.metadata.default_spec_id
        update.append_data_file(deletes)
    return catalog


@pytest.mark.parametrize("url", ["{}", "{}/data", "{}/data/*.parquet", "{}/**/*.parquet"])
def test_iceberg_table_with_delete_files_is_read_by_the_line_that_writes_its_rows(url, tmp_path):
    catalog = iceberg_with(DataFileContent.POSITION_DELETES, tmp_path)
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
    catalog = iceberg_with(DataFileContent.EQUALITY_DELETES, tmp_path)
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
    import fsspec

    system = fsspec.filesystem("memory")
    for file in delta.rglob("*"):
        if file.is_file():
            system.pipe_file(f"/lake/{file.relative_to(delta)}", file.read_bytes())
    refused("memory://lake", "the Delta table")
    refused("memory://lake/*.parquet", "the Delta table")


def test_folder_of_metadata_that_is_no_tables_is_read(tmp_path):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "notes.json").write_text("{}")
    pq.write_table(numbers(0, 3), tmp_path / "a.parquet")
    assert ids(tmp_path) == [0, 1, 2]
