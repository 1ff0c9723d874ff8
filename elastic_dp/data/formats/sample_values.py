"""Samples of named columns in binary, as MDS shards and chunks of litdata have them, end to end.

A sample begins with the lengths (uint32) of its columns of variable length; their values follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from elastic_dp.data.formats.file_format import Ints

LENGTH = np.dtype("<u4")
_AT_ONCE = 4096  # values that are sliced together: a slice takes more memory than a short value


@dataclass(frozen=True)
class Values:
    """The bytes of a column's values in `content`: value i is at `starts[i]` up to `ends[i]`."""

    content: memoryview
    starts: Ints
    ends: Ints

    def __iter__(self) -> Iterator[memoryview]:
        for first in range(0, len(self.starts), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            for start, end in zip(
                self.starts[some].tolist(), self.ends[some].tolist(), strict=True
            ):
                yield self.content[start:end]

    def joined(self) -> bytes:
        if len(self.starts) and (self.starts[1:] == self.ends[:-1]).all():
            return bytes(self.content[self.starts[0] : self.ends[-1]])
        pieces, each = [], iter(self)
        while some := list(itertools.islice(each, _AT_ONCE)):
            pieces.append(b"".join(some))
        return b"".join(pieces)

    def as_arrow(self, kind: pa.DataType) -> pa.Array:
        """`kind`: large_binary or large_string."""
        offsets = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(self.joined())]
        array = pa.Array.from_buffers(kind, len(self.starts), buffers)
        array.validate(full=True)  # text that is not UTF-8
        return array


def values_of(content: bytes, samples: Ints, sizes: Sequence[int | None]) -> list[Values]:
    """Where the values of each column are. `samples` [rows + 1]: where they begin and end in
    `content`. `sizes`: bytes of each value of a column; None: they vary. Raises ValueError if the
    lengths of a sample's columns do not add up to the sample."""
    starts = samples[:-1]
    head = LENGTH.itemsize * sum(size is None for size in sizes)
    if (np.diff(samples) < head).any() or samples[-1] > len(content):
        raise ValueError("a sample is shorter than the lengths of its columns")
    data = np.frombuffer(content, np.uint8)
    heads = data[starts[:, None] + np.arange(head)]
    lengths = iter(np.ascontiguousarray(heads).view(LENGTH).T.astype(np.int64))
    at, found = starts + head, []
    for size in sizes:
        end = at + (next(lengths) if size is None else size)
        found.append(Values(memoryview(content), at, end))
        at = end
    if (at != samples[1:]).any():
        row = int(np.argmax(at != samples[1:]))
        raise ValueError(f"the columns of sample {row} do not add up to its length")
    return found


def group_bounds(offsets: Ints, group_bytes: int) -> Ints:
    """The bounds of row groups of about `group_bytes`, in samples. `offsets` [samples + 1]."""
    bounds, samples = [0], len(offsets) - 1
    while bounds[-1] < samples:
        end = int(offsets[bounds[-1]]) + group_bytes
        after = int(np.searchsorted(offsets, end, side="left"))
        bounds.append(min(max(after, bounds[-1] + 1), samples))
    return np.array(bounds, dtype=np.int64)
