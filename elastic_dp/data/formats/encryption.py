"""Encrypted and damaged Parquet footers, which are refused: no keys are known here.

An encrypted footer is told by the file's last bytes. A plain footer with encrypted columns, or with
columns that contradict its schema, must be found out before anything else is asked of it: pyarrow
ends the process (an uncaught C++ exception) when it is asked for the metadata of such a column
chunk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.errors import DataError

ENCRYPTED_MAGIC = b"PARE"
_SIZE = 1 << 50
_WAY_OUT = "write the data set without encryption"


def refuse_encrypted_footer(name: str, end: Any) -> None:
    """`end`: the file's last bytes. Raises DataError."""
    if bytes(end[-4:]) == ENCRYPTED_MAGIC:
        raise DataError(
            f"{name} is encrypted Parquet (its footer too), and no keys are known here; {_WAY_OUT}"
        )


def unreadable_chunks(footer: pq.FileMetaData, numbers: Sequence[int]) -> dict[int, Exception]:
    """What is wrong with the leaf columns `numbers` in some row group. Call this before anything is
    asked of them."""
    if not numbers or not footer.num_row_groups or _probe(footer, numbers) is None:
        return {}
    return {number: error for number in numbers if (error := _probe(footer, [number]))}


def refuse_unreadable(
    name: str, footer: pq.FileMetaData, unreadable: dict[int, Exception], wanted: Sequence[int]
) -> None:
    """`wanted`: numbers of leaf columns. Raises DataError."""
    for number in wanted:
        if number not in unreadable:
            continue
        column, error = (
            f"column {footer.schema.column(number).path!r} of {name}",
            unreadable[number],
        )
        if "decrypt" in str(error):
            raise DataError(
                f"{column} is encrypted, and no keys are known here; leave it out by "
                f"DataConfig.columns, or {_WAY_OUT}"
            )
        raise DataError(
            f"the footer of {name} is damaged: {column}: {type(error).__name__}: {error}"
        )


class _BytesAsked(Exception):
    """The reader went on from the metadata of a column to its pages."""


class _WithoutBytes(io.RawIOBase):
    """A file of any size that can be opened, but not read."""

    _at = 0

    def read(self, count: int = -1) -> bytes:
        raise _BytesAsked

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position if whence == os.SEEK_SET else _SIZE
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def codec_of(footer: pq.FileMetaData, number: int) -> str:
    """Of a leaf column in the first row group; pyarrow ends the process when it is asked for one
    that it does not know."""
    return (
        "unknown"
        if _probe_codec(footer, number)
        else footer.row_group(0).column(number).compression
    )


def _probe_codec(footer: pq.FileMetaData, number: int) -> Exception | None:
    """With a buffer the codec is looked up before the first byte is read."""
    source = pa.PythonFile(_WithoutBytes(), mode="r")
    file = pq.ParquetFile(source, metadata=footer, pre_buffer=False, buffer_size=1 << 12)
    return _raised(lambda: file.read_row_group(0, [footer.schema.column(number).path]))


def _probe(footer: pq.FileMetaData, numbers: Sequence[int]) -> Exception | None:
    """Reading columns raises what asking for their metadata does not survive, and reads no byte
    before that: with `pre_buffer` all chunks are looked at first."""
    source = pa.PythonFile(_WithoutBytes(), mode="r")
    file = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
    every = len(numbers) == footer.num_columns
    columns = None if every else [footer.schema.column(number).path for number in numbers]
    groups = range(footer.num_row_groups)
    return _raised(lambda: file.read_row_groups(groups, columns, use_threads=False))


def _raised(read: Callable[[], Any]) -> Exception | None:
    """What the footer made of it."""
    try:
        read()
    except _BytesAsked:
        return None
    except (OSError, pa.ArrowException) as error:
        return error
    return None
