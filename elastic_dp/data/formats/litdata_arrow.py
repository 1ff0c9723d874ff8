"""The Arrow file that newer versions of litdata put into a chunk, with 256 rows in a record batch.
Row groups are several of these, about 4 MiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.formats.arrow import Arrow
from elastic_dp.data.formats.arrow_messages import walked_messages
from elastic_dp.data.formats.file_format import RowGroupLocation, Scan, ShardAt


@dataclass(frozen=True)
class ArrowInside(ShardAt):
    """The Arrow file in a chunk, as if it were a shard. `start`: where it begins in the chunk.
    `part`: bytes of it that were read before, from `part_start` on."""

    start: int = 0
    part: bytes | memoryview = b""
    part_start: int = 0

    @classmethod
    def of(cls, shard: ShardAt, start: int, size: int) -> ArrowInside:
        return cls(
            store=shard.store,
            path=shard.path,
            size=size,
            version=shard.version,
            name=shard.name,
            tail=shard.tail,
            head=shard.head - start,
            start=start,
        )

    @property
    def local(self) -> None:
        """None: a file is mapped as a whole, and this is a part of one."""
        return None

    def read(self, start: int, end: int) -> Any:
        at = start - self.part_start
        if at >= 0 and end - self.part_start <= len(self.part):
            return self.part[at : end - self.part_start]
        return self.store.read(self.path, self.start + start, self.start + end, self.version)


def scan_inside(
    arrow: Arrow, inside: ArrowInside, columns: Sequence[str] | None, group_bytes: int
) -> Scan:
    scan = arrow.scan(inside, columns)
    rows, starts, ends = scan.rows, scan.starts, scan.ends
    if not len(rows):
        raise ValueError("its Arrow file has no record batch")
    first = [0]
    for batch in range(1, len(rows)):
        too_large = ends[batch] - starts[first[-1]] > group_bytes
        if too_large or starts[batch] != ends[batch - 1]:
            first.append(batch)
    last = np.array([*first[1:], len(rows)]) - 1
    return replace(
        scan,
        rows=np.add.reduceat(rows, first),
        starts=starts[first] + inside.start,
        ends=ends[last] + inside.start,
        nbytes=np.add.reduceat(scan.nbytes, first),
    )


def read_inside(
    arrow: Arrow,
    inside: ArrowInside,
    location: RowGroupLocation,
    schema: pa.Schema,
    leaves: list[str],
) -> pa.Table:
    """`location`: in the chunk."""
    start = location.start - inside.start
    content = memoryview(inside.read(start, location.end - inside.start))
    inside = replace(inside, part=content, part_start=start)
    tables = []
    for message in walked_messages(_Bytes(content)):
        at = RowGroupLocation(location.group, start + message.start, start + message.end)
        tables.append(arrow.read(inside, at, schema, leaves))
    return pa.concat_tables(tables)


@dataclass(frozen=True)
class _Bytes:
    content: memoryview

    @property
    def size(self) -> int:
        return len(self.content)

    def read(self, start: int, end: int) -> memoryview:
        return self.content[start:end]
