"""Encrypted Parquet files, which are refused: no keys are known here.

An encrypted footer is told by the file's last bytes. A plain footer with encrypted columns must be found out before
anything else is asked of it: pyarrow ends the process (an uncaught C++ exception) when it is asked for the metadata of
an encrypted column chunk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
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


def encrypted_chunks(footer: pq.FileMetaData, end: Any) -> frozenset[int]:
    """The numbers of the leaf columns that are encrypted. `end`: the file's last 8 bytes or more."""
    if int.from_bytes(end[-8:-4], "little") == footer.serialized_size or not footer.num_row_groups:
        return (
            frozenset()
        )  # a plain footer with encryption is signed, and the signature comes after it
    return frozenset(n for n in range(footer.num_columns) if _is_encrypted(footer, n))


def refuse_encrypted_columns(
    name: str, footer: pq.FileMetaData, encrypted: frozenset[int], wanted: Sequence[int]
) -> None:
    """`wanted`: numbers of leaf columns. Raises DataError."""
    both = [footer.schema.column(number).path for number in wanted if number in encrypted]
    if both:
        raise DataError(
            f"column {both[0]!r} of {name} is encrypted, and no keys are known here; leave it out by "
            f"DataConfig.columns, or {_WAY_OUT}"
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


def _is_encrypted(footer: pq.FileMetaData, number: int) -> bool:
    """Reading a column raises what asking for its metadata does not survive, and reads no byte before it."""
    file = pq.ParquetFile(pa.PythonFile(_WithoutBytes(), mode="r"), metadata=footer)
    try:
        file.read_row_group(0, columns=[footer.schema.column(number).path], use_threads=False)
    except _BytesAsked:
        return False
    except (OSError, pa.ArrowException):
        return True
    return False
    return False
