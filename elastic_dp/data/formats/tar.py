"""WebDataset tar: a sample is a run of members with one key, its columns are their endings.

`images/7.jpg` and `images/7.cls` are the sample `images/7`, with the columns `__key__`, `jpg` and `cls`. A key goes
up to the first dot of the file's name. Columns are bytes, but `txt` and `json` are text, and `cls` is a whole number.
Samples are cut into row groups of about 4 MiB in the order of the tar; one range of it is one row group.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.formats.format import Place, Scan, ShardAt
from elastic_dp.data.kinds import lossless

GROUP_BYTES = 4 << 20
_BLOCK = 512
_READ_BYTES = 1 << 20  # while it is scanned; members longer than this are skipped over
_KEY = "__key__"
_KINDS = {
    _KEY: pa.large_string(),
    "txt": pa.large_string(),
    "json": pa.large_string(),
    "cls": pa.int64(),
}


class Tar:
    name = "tar"
    endings: tuple[str, ...] = (".tar",)
    scans_content = True
    growth = 1.0
    merge = staticmethod(lossless)

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        names = Counter({_KEY: 0})  # in how many samples
        here: set[str] = set()  # in this sample
        groups: list[list[int]] = []
        check, last_key = 0, None
        for member in _members(_Scanned(shard)):
            key, ending = _split(member.name)
            end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            if member.offset_data + member.size > shard.size:
                raise tarfile.ReadError(f"{member.name} goes past the end; the shard was cut off")
            if key != last_key:
                if not groups or groups[-1][2] - groups[-1][1] >= GROUP_BYTES:
                    groups.append([0, member.offset, end])
                groups[-1][0] += 1
                here = {_KEY}
                names[_KEY] += 1
            groups[-1][2] = min(end, shard.size)
            names[ending] += ending not in here
            here.add(ending)
            last_key = key
            check = zlib.crc32(f"{member.name} {member.size} {member.mtime}".encode(), check)
        rows, starts, ends = np.array(groups, dtype=np.int64).reshape(-1, 3).T.copy()
        schema = pa.schema([(name, _KINDS.get(name, pa.large_binary())) for name in names])
        nbytes = 2 * (ends - starts) + rows * 16 * len(names)
        nulls = {name: names[_KEY] - count for name, count in names.items()}
        return Scan(schema, rows, starts, ends, nbytes, check, nulls=nulls)

    def read(self, shard: ShardAt, place: Place, schema: pa.Schema, leaves: list[str]) -> pa.Table:
        content = memoryview(shard.read(place.start, place.end))
        samples: list[dict[str, Any]] = []
        for member in _members(io.BytesIO(content)):
            key, ending = _split(member.name)
            if not samples or samples[-1][_KEY] != key:
                samples.append({_KEY: key})
            end = member.offset_data + member.size
            if end > len(content):
                raise tarfile.ReadError(f"{member.name} was cut off")
            if ending in schema.names:
                samples[-1][ending] = _value(
                    schema.field(ending).type, content[member.offset_data : end]
                )
        return pa.table(
            {f.name: pa.array([s.get(f.name) for s in samples], f.type) for f in schema}
        )

    def close(self) -> None:
        pass


class _Scanned(io.RawIOBase):
    """A shard read from front to back; what is skipped is not read."""

    def __init__(self, shard: ShardAt) -> None:
        self._shard, self._at = shard, 0
        self._start, self._content = 0, memoryview(b"")

    def readinto(self, into: Any) -> int:
        count = min(len(into), self._shard.size - self._at)
        if count <= 0:
            return 0
        if not self._start <= self._at < self._start + len(self._content):
            end = min(self._at + _READ_BYTES, self._shard.size)
            self._start, self._content = self._at, memoryview(self._shard.read(self._at, end))
        found = self._content[self._at - self._start :][:count]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._shard.size}[whence]
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _members(file: Any) -> Iterator[tarfile.TarInfo]:
    """The files in it, without hidden ones. Long names and extended headers are tarfile's business.

    tarfile takes a broken header for the end, so what it stopped at is looked at again.
    """
    buffered = io.BufferedReader(file, _BLOCK) if isinstance(file, io.RawIOBase) else file
    with tarfile.open(fileobj=buffered, mode="r:") as members:
        for member in members:
            members.members = []  # type: ignore[attr-defined]  # else it keeps them all
            if member.isfile() and not member.name.rsplit("/", 1)[-1].startswith("."):
                yield member
        buffered.seek(members.offset)
        if buffered.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"no member begins at byte {members.offset}")


def _split(name: str) -> tuple[str, str]:
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return folder + slash + key, ending.lower()


def _value(kind: pa.DataType, content: memoryview) -> Any:
    if pa.types.is_integer(kind):
        return int(bytes(content))
    return str(content, "utf-8") if pa.types.is_large_string(kind) else content
