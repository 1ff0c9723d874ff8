"""Shards of every format, and their rows as plain values."""

import io
import tarfile
from pathlib import Path

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import DataError
from elastic_dp.storage.obstore_backend import memory_store
from tests.data import values
from tests.patience import PATIENCE_S

V = 8  # virtual workers
ROWS = (70, 45, 1)  # of `three_shards`


def config(url, **changes):
    url = str(url) if isinstance(url, Path) else url
    return DataConfig(url, **({"micro_batch_size": 8} | changes))


def opened(wanted, index=None):
    return RowGroups(wanted, index or read_index(wanted), timeout_s=PATIENCE_S)


def refused(wanted, words):
    with pytest.raises(DataError, match=words):
        read_index(wanted)


def batches_of(config, workers, virtual_workers=V, epoch=0):
    """The micro-batches of an epoch with their steps, from data sets of as many workers, each asked
    for its own virtual workers."""
    data = [open_data(config, virtual_workers=virtual_workers) for _ in range(workers)]
    first = 1 + epoch * data[0].steps_per_epoch
    for number, one in enumerate(data):
        one.read_ahead(first, range(number, virtual_workers, workers))
    for step in range(first, first + data[0].steps_per_epoch):
        for v in range(virtual_workers):
            if data[v % workers].rows(step, v):
                yield step, data[v % workers].batch(step, v)


def rows_of(folder, **changes):
    """All rows as plain values, in file order, and the rows of each row group."""
    wanted = config(folder, **changes)
    index = read_index(wanted)
    groups = opened(wanted, index)
    rows = []
    for number, count in enumerate(index.rows.tolist()):
        columns, nbytes = groups.read(number)
        assert nbytes <= index.nbytes[number]
        plain = {name: values.plain(column) for name, column in columns.items()}
        assert {len(column) for column in plain.values()} == {count}
        rows += [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
    groups.close()
    return rows, index.rows.tolist()


def nested(first, rows):
    """A column of every kind that has a tensor or is text."""
    ids = np.arange(first, first + rows)
    pixels = (ids[:, None, None] * 100 + np.arange(6).reshape(2, 3)).astype(np.int16)
    image = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pixels.ravel(), 3), 2
    )
    plain = ids.tolist()
    return pa.table(
        {
            "id": pa.array(ids),
            "even": pa.array(ids % 2 == 0),
            "image": image,
            "same": pa.array([[i, i + 1] for i in plain], pa.list_(pa.int32())),
            "grid": pa.array([[[i, 1], [2, i]] for i in plain], pa.list_(pa.list_(pa.int32()))),
            "ragged": pa.array([list(range(i % 4)) for i in plain], pa.list_(pa.int32())),
            "text": pa.array([f"row {i}" if i % 5 else None for i in plain], pa.string()),
            "raw": pa.array([bytes([i % 256]) * (i % 3) for i in plain], pa.binary()),
            "fixed": pa.array([bytes([i % 256, 1, 2]) for i in plain], pa.binary(3)),
            "kind": pa.array(["cat" if i % 3 else "dog" for i in plain]).dictionary_encode(),
            "at": pa.array([{"x": i, "deep": {"y": i / 2}} for i in plain]),
            "weight": pa.array(ids / 7, pa.float32()),
        }
    )


def expected(table):
    rows = []
    for row in table.to_pylist():
        at = row.pop("at")
        row["fixed"] = list(row["fixed"])
        rows.append({**row, "at.x": at["x"], "at.deep.y": at["deep"]["y"]})
    return rows


def write_arrow(path, content, stream=False, chunk=16, **options):
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=not stream, **options)
    with pa.OSFile(str(path), "wb") as file, make(file, content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=chunk)


def three_shards(folder, table):
    """Shards in row groups of 16 rows, beside files that are none."""
    first = 0
    for number, rows in enumerate(ROWS):
        pq.write_table(table(first, rows), folder / f"part-{number}.parquet", row_group_size=16)
        first += rows
    for name in ("README.txt", ".part-9.parquet", "_temporary.parquet"):
        (folder / name).write_text("not a shard")
    return folder


def parquet(path, content, **options):
    pq.write_table(content, path.with_suffix(".parquet"), row_group_size=16, **options)


BINARY = {
    "parquet": parquet,
    "parquet zstd": lambda p, t: parquet(p, t, compression="zstd", use_dictionary=False),
    "parquet small pages": lambda p, t: parquet(p, t, data_page_size=64, write_page_checksum=True),
    "arrow file": lambda p, t: write_arrow(p.with_suffix(".arrow"), t, stream=False),
    "arrow stream": lambda p, t: write_arrow(p.with_suffix(".arrow"), t, stream=True),
    "arrow file lz4": lambda p, t: write_arrow(
        p.with_suffix(".feather"), t, False, compression="lz4"
    ),
    "arrow stream zstd": lambda p, t: write_arrow(
        p.with_suffix(".ipc"), t, True, compression="zstd"
    ),
}


def in_memory(folder):
    """A copy in a store whose objects are no files of this machine."""
    for shard in folder.iterdir():
        obstore.put(memory_store(), f"{folder.name}/{shard.name}", shard.read_bytes())
    return f"memory://{folder.name}"


def add(tar, name, content, **more):
    """Add a member. `more`: other attributes of it."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in more.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))


def write_tar(path, first, samples, **ending):
    rows = []
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("._hidden"))
        for number in range(first, first + samples):
            key = f"{'long/' * 30 * (number % 2)}img-{number}"
            parts = {"jpg": bytes([number % 256]) * (number * 37 % 900), "cls": b" %d\n" % number}
            parts |= {"json": b'{"n": %d}' % number, "seg.png": b"x", **ending}
            for name, content in parts.items():
                add(tar, f"{key}.{name}", content)
            rows.append({"__key__": key, **parts, "cls": number, "json": parts["json"].decode()})
    return rows


SHARDS = {
    "a.parquet": lambda p: parquet(p, nested(0, 90), compression="zstd", use_dictionary=False),
    "a.arrow": lambda p: write_arrow(p, nested(0, 90), False),
    "a.tar": lambda p: write_tar(p, 0, 40),
}


ONE = pa.table({"x": [1, 2], "s": ["a", "b"]})


def damage(config, *row_groups):
    """Overwrites these row groups of a folder's shards with garbage."""
    index = read_index(config)
    for number in row_groups:
        path = Path(str(config.url)) / index.name(index.shard_of(number))
        content = bytearray(path.read_bytes())
        start, end = int(index.starts[number]), int(index.ends[number])
        content[start:end] = b"\xff" * (end - start)
        path.write_bytes(content)
