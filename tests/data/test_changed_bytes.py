"""Files in which bytes were changed give the rows that their own library reads, or a typed error,
and end no process. Each input is a function of its kind and a number.

`python -m tests.data.test_changed_bytes KIND FIRST COUNT` is the process that reads them.
"""

import io
import os
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.errors import ElasticError
from tests.data.values import columns_of, in_place, same

ROWS = 40
TIMEOUT_S = 600
ADDRESS_SPACE_BYTES = 4 << 30  # above what the libraries take
EDGES = (0, 1, -1, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1)
PARQUET = (
    {"compression": "none", "use_dictionary": False},
    {"compression": "none", "data_page_version": "2.0", "data_page_size": 64},
    {"compression": "zstd", "row_group_size": 15, "write_page_index": True},
    {"compression": "snappy", "row_group_size": 15, "write_page_checksum": True},
)


def table():
    ids = range(ROWS)
    texts = [f"text {i} é" * (i % 3) for i in ids]
    return pa.table(
        {
            "id": ids,
            "s": texts,
            "word": pa.array([texts[i % 5] for i in ids]).dictionary_encode(),
            "maybe": [None if i % 4 == 0 else f"m{i}" for i in ids],
            "tokens": pa.array([[i] * (i % 4) for i in ids], pa.list_(pa.int32())),
            "pair": [{"a": i, "b": float(i)} for i in ids],
            "vector": pa.array([[i, 1.0] for i in ids], pa.list_(pa.float32(), 2)),
            "raw": pa.array([bytes([i]) * 3 for i in ids], pa.binary(3)),
        }
    )


@cache
def whole(kind, number):
    sink = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table(), sink, **PARQUET[number % len(PARQUET)])
    elif kind == "arrow":
        options = pa.ipc.IpcWriteOptions(compression=(None, "zstd", "lz4")[number % 3])
        make = pa.ipc.new_stream if number % 2 else pa.ipc.new_file
        with make(sink, table().schema, options=options) as writer:
            writer.write_table(table(), max_chunksize=15)
    else:
        form = (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)[number % 3]
        with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
            long = "" if form == tarfile.USTAR_FORMAT else 150 * "l"
            for i in range(8):
                for ending, content in (("txt", b"a text"), ("cls", b"3"), ("bin", b"x" * 600)):
                    member = tarfile.TarInfo(f"{long * (i % 2)}{i}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return sink.getvalue()


def places(kind, content):
    """Where metadata is: (first byte, last byte + 1)."""
    if kind == "parquet":
        return [(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content))]
    if kind == "tar":
        return [(at, at + 345) for at in headers(content)]
    found, at = [(max(0, len(content) - 600), len(content))], content.find(b"\xff" * 4)
    while at >= 0:
        found.append((at, at + 8 + int.from_bytes(content[at + 4 : at + 6], "little")))
        at = content.find(b"\xff" * 4, at + 8)
    return found


def headers(content):
    return [a for a in range(0, len(content) - 511, 512) if content[a + 257 : a + 262] == b"ustar"]


def changed(kind, seed):
    rng = random.Random(f"{kind} {seed}")
    content = bytearray(whole(kind, rng.randrange(12)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        first, end = rng.choice([*places(kind, content), (0, len(content))])
        wide = rng.choice((1, 1, 2, 4, 8))
        at = rng.randrange(max(first, 0), max(first + 1, min(end, len(content)) - wide))
        old = int.from_bytes(content[at : at + wide], "little")
        new = rng.choice((*EDGES, old + 1, old - 1, 2 * old, old ^ 1 << rng.randrange(8 * wide)))
        content[at : at + wide] = (new & (1 << 8 * wide) - 1).to_bytes(wide, "little")
    for at in headers(content) if kind == "tar" and rng.randrange(4) else ():
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    return bytes(content[: rng.randrange(len(content))] if not rng.randrange(20) else content)


def by_its_library(kind, content):
    if kind == "parquet":  # pyarrow moves what a damaged page has too much into the next group
        file = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        groups = [file.read_row_group(n) for n in range(file.num_row_groups)]
        return columns_of(pa.concat_tables(groups))
    if kind == "arrow":
        is_file = content[:6] == b"ARROW1"
        return columns_of((pa.ipc.open_file if is_file else pa.ipc.open_stream)(content).read_all())
    samples = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as members:
        for member in (m for m in members if m.isfile()):
            folder, slash, file = member.name.rpartition("/")
            if file.startswith(".") or "." not in file:  # no sample, as "././@PaxHeader"
                continue
            stem, _, ending = file.partition(".")
            ending, key = ending.lower(), folder + slash + stem
            value = members.extractfile(member).read()
            samples.setdefault(key, {"__key__": key})[ending] = (
                int(value) if ending == "cls" else value.decode() if ending == "txt" else value
            )
    names = {name for sample in samples.values() for name in sample}
    return {name: [sample.get(name) for sample in samples.values()] for name in names}


def main(kind, first, count):
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        for seed in range(first, first + count):
            print(seed, "is read", flush=True)
            path.write_bytes(content := changed(kind, seed))
            try:
                ours = in_place(DataConfig(str(path), micro_batch_size=4))
            except ElasticError as error:
                print(seed, type(error).__name__)
                continue
            print(seed, "is compared", flush=True)
            try:
                theirs = by_its_library(kind, content)
            except Exception:  # the library may raise anything
                continue
            assert ours.keys() == theirs.keys(), (seed, sorted(ours), sorted(theirs))
            for name, values in ours.items():
                assert len(values) == len(theirs[name]), (seed, name)
                assert all(map(same, values, theirs[name])), (seed, name)
            print(seed, "rows", flush=True)
    os._exit(0)  # without freeing what the inputs left in memory


def read_in_a_process(kind, first, count):
    """What it has printed. A library that ends the process itself is no fault of ours."""
    said, end = "", first + count
    while first < end:
        done = subprocess.run(
            [sys.executable, "-m", "tests.data.test_changed_bytes", kind, str(first), str(count)],
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        said += done.stdout
        if not done.returncode:
            return said
        *_, last = done.stdout.splitlines()
        assert last.endswith("is compared") and done.returncode < 0, last + done.stderr[-2000:]
        first = int(last.split()[0]) + 1
        count = end - first
    return said


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tar"])
@pytest.mark.parametrize("count", [25, pytest.param(4000, marks=pytest.mark.slow)])
def test_files_with_changed_bytes_give_their_rows_or_a_typed_error(kind, count):
    said = read_in_a_process(kind, 0, count)
    assert said.count(" rows\n") > count // 20 and said.count("Error\n") > count // 20, said


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
