"""MDS shards of MosaicML Streaming: samples of named columns, in binary.

A shard describes itself: the number of samples, the offset of each sample and of the end (all
uint32), a JSON object with the names, encodings and sizes of the columns, then the samples. A
sample begins with the lengths (uint32) of its columns of variable length. Row groups are ranges of
about 4 MiB of a shard. A compressed shard (`.mds.zstd`) cannot be cut, and is one row group.

mds_encodings.py says which encodings are read. `index.json`, which names the shards of a folder, is
compared with the files there when the data set is opened (discovery/streaming_index.py).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.column_types import lossless
from elastic_dp.data.formats.file_format import Ints, RowGroupLocation, Scan, ShardAt
from elastic_dp.data.formats.mds_encodings import Encoding, encoding_of
from elastic_dp.data.formats.row_group_headers import RowGroupHeaders
from elastic_dp.data.formats.sample_values import Values, group_bounds, values_of
from elastic_dp.data.formats.text import decompress, is_compressed
from elastic_dp.errors import DataError

GROUP_BYTES = 4 << 20
_HEAD_BYTES = 64 << 10  # of the first request for a header
_LENGTH = np.dtype("<u4")
_VERSION = 2
_ARRAY_BYTES = 256  # of an array in NumPy, beside its numbers


class Mds:
    name = "mds"
    endings: tuple[str, ...] = (".mds", ".mds.zstd", ".mds.zst", ".mds.gz", ".mds.bz2", ".mds.br")
    scans_content = False
    growth = 1.0
    merge = staticmethod(lossless)

    def __init__(self) -> None:
        self._headers = RowGroupHeaders()

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        packed = is_compressed(shard)
        content = _unpack(shard, bytes(shard.read(0, shard.size))) if packed else b""
        size = len(content) if packed else shard.size
        head = content if packed else _read_header(shard)
        header = _Header.of(head)
        header.check(size)
        first = slice(int(header.offsets[0]), int(header.offsets[1]) if header.samples else 0)
        sample = b""
        if header.samples and any(encoding.needs_sample for encoding in header.encodings):
            sample = content[first] if packed else bytes(shard.read(first.start, first.stop))
        kinds = header.types(shard.name, columns, sample)
        schema = pa.schema(zip(header.names, kinds, strict=True))
        bounds = group_bounds(header.offsets, size if packed else GROUP_BYTES)
        starts, ends = header.offsets[bounds[:-1]], header.offsets[bounds[1:]]
        rows = np.diff(bounds)
        row_bytes = 16 * len(header.names)  # where its values begin and end
        row_bytes += _ARRAY_BYTES * sum(encoding.needs_sample for encoding in header.encodings)
        nbytes = 2 * (ends - starts) + rows * row_bytes
        check = zlib.crc32(head[: header.offsets[0]])
        if packed:
            starts, ends = np.zeros_like(starts), np.full_like(ends, shard.size)
            nbytes += shard.size + size
        return Scan(schema, rows, starts, ends, nbytes, check)

    def first_columns(self, shard: ShardAt, columns: Sequence[str] | None) -> None:
        return None

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        content = bytes(shard.read(location.start, location.end))
        if is_compressed(shard):
            content = _unpack(shard, content)
            header, start = _Header.of(content), 0
            header.check(len(content))
            samples = header.offsets
        else:
            header, start = _Header.of(self._headers.read(shard, shard.head)), location.start
            bounds = np.searchsorted(header.offsets, [location.start, location.end])
            samples = header.offsets[bounds[0] : bounds[1] + 1]
        return header.decode(content, samples - start, schema)

    def close(self) -> None:
        self._headers.clear()


@dataclass(frozen=True)
class _Header:
    """What precedes the samples of a shard. `offsets`: int64 [samples + 1]."""

    offsets: Ints
    names: tuple[str, ...]
    encodings: tuple[Encoding, ...]

    @property
    def samples(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, content: bytes) -> _Header:
        """`content`: the first bytes of a shard, at least its header."""
        samples = int(np.frombuffer(content, _LENGTH, 1)[0])
        offsets = np.frombuffer(content, _LENGTH, samples + 1, offset=4).astype(np.int64)
        config = json.loads(content[4 * (samples + 2) : offsets[0]])
        if config["format"] != "mds" or config["version"] != _VERSION:
            raise ValueError(f"it is {config['format']!r} of version {config['version']!r}")
        names, given = config["column_names"], config["column_encodings"]
        encodings = tuple(encoding_of(name) for name in given)
        if config["column_sizes"] != [encoding.size for encoding in encodings] or len(
            set(names)
        ) != len(given):
            raise ValueError("the names, encodings and sizes of its columns do not fit")
        return cls(offsets, tuple(names), encodings)

    def check(self, size: int) -> None:
        """`size`: of the shard, decompressed."""
        if self.offsets[-1] != size:
            raise ValueError(
                f"it has {size:,} bytes, and its header says {self.offsets[-1]:,}: it was cut off"
            )
        if (np.diff(self.offsets) < 0).any():
            raise ValueError("the offsets of its samples do not increase")

    def types(self, shard: str, columns: Sequence[str] | None, sample: bytes) -> list[pa.DataType]:
        """The types of all columns. `columns`: those that the job reads; None: all. `sample`: the
        first one, if an encoding needs it."""
        values = self._values(sample, np.array([0, len(sample)])) if sample else {}
        found = []
        for name, encoding in zip(self.names, self.encodings, strict=True):
            is_read = columns is None or name in columns
            if is_read and not encoding.is_read:
                raise DataError(
                    f"{shard}: column {name!r} has the MDS encoding {encoding.name!r}, which is "
                    "not read; leave it out by DataConfig.columns, or write it in another encoding"
                )
            found.append(encoding.type_of(values[name].joined() if name in values else b""))
        return found

    def decode(self, content: bytes, samples: Ints, schema: pa.Schema) -> pa.Table:
        """The columns of `schema`. `samples` [rows + 1]: where they begin and end in `content`."""
        found = {}
        values = self._values(content, samples)
        for name, encoding in zip(self.names, self.encodings, strict=True):
            if name in schema.names:
                try:
                    found[name] = encoding.decode(values[name], schema.field(name).type)
                except (ValueError, pa.ArrowInvalid) as error:
                    raise ValueError(f"column {name!r} ({encoding.name}): {error}") from error
        return pa.table(found)

    def _values(self, content: bytes, samples: Ints) -> dict[str, Values]:
        sizes = [encoding.size for encoding in self.encodings]
        return dict(zip(self.names, values_of(content, samples, sizes), strict=True))


def _read_header(shard: ShardAt) -> bytes:
    """The first bytes of a shard, at least its header."""
    head = bytes(shard.read(0, min(_HEAD_BYTES, shard.size)))
    samples = int(np.frombuffer(head, _LENGTH, 1)[0])
    for end in (4 * (samples + 2), 8):  # the offsets, and then the columns
        if end == 8:
            end = int(np.frombuffer(head, _LENGTH, 1, offset=4)[0])
        if end > shard.size:
            raise ValueError(f"its header has {end:,} bytes, and it {shard.size:,}: it was cut off")
        if end > len(head):
            head += bytes(shard.read(len(head), end))
    return head


def _unpack(shard: ShardAt, content: bytes) -> bytes:
    return decompress(shard, content, " (MDSWriter: size_limit)")
