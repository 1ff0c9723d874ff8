"""Sources of every format, and what a conversion wrote."""

import csv
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.dataprep import convert
from tests.data.values import in_place

ROWS = [
    {
        "id": i,
        "text": f'row "{i}", in\ntwo lines' if i % 3 else "",
        "x": i / 4,
        "when": "2026-01-02",
    }
    for i in range(1000)
]


def read(folder: Path) -> pa.Table:
    shards = sorted(folder.glob("part-*"))
    if shards[0].suffix == ".parquet":
        return pa.concat_tables([pq.read_table(shard) for shard in shards])
    return pa.concat_tables([pa.ipc.open_file(shard.read_bytes()).read_all() for shard in shards])


def group_rows(folder: Path) -> list[int]:
    footers = [pq.read_metadata(shard) for shard in sorted(folder.glob("part-*"))]
    return [f.row_group(i).num_rows for f in footers for i in range(f.num_row_groups)]


def write_parquet(folder: Path) -> None:
    for number in (0, 1):
        table = pa.Table.from_pylist(ROWS[number * 500 : number * 500 + 500])
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=333)
    (folder / "README.txt").write_text("no shard")
    (folder / "_old.csv").write_text("hidden")


def write_arrow(folder: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table.slice(0, 700), max_chunksize=300)
    with pa.ipc.new_stream(folder / "b.arrow", table.schema) as stream:
        stream.write_table(table.slice(700))


def write_saved_dataset(folder: Path) -> None:
    """Write like `datasets.save_to_disk`: streams, in an order that is not that of their names."""
    table = pa.Table.from_pylist(ROWS)
    for name, part in (("data-b.arrow", table.slice(0, 600)), ("data-a.arrow", table.slice(600))):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part)
    files = [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def write_jsonl(folder: Path) -> None:
    said = [json.dumps(row) + "\n" for row in ROWS]
    (folder / "a.jsonl").write_text("".join(said[:400]))
    with fsspec.open(str(folder / "b.jsonl.gz"), "wt", compression="gzip") as file:
        file.write("".join(said[400:]))


def write_csv(folder: Path) -> None:
    with open(folder / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def by_convert(folder, **options):
    """Each file's columns by name; what `convert` makes of it, and what training reads."""
    to = folder.parent / f"{folder.name}-to"
    convert(str(folder), str(to), **options)
    done = pq.read_table(to)
    read = in_place(DataConfig(str(folder), micro_batch_size=1, **options))
    return done.schema, done.to_pydict(), read
