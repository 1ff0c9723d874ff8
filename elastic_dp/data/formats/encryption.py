"""Refuses encrypted Parquet, since there are no keys here, and Parquet with damaged column
metadata.

The last bytes of a file say whether its footer is encrypted. A plain footer may have encrypted
columns, or columns that contradict its schema. These must be found first: pyarrow ends the process
(by an uncaught C++ exception) when it reads the metadata of such a column chunk.
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
    """Raises DataError if the footer is encrypted. `end`: the file's last bytes."""
    if bytes(end[-4:]) == ENCRYPTED_MAGIC:
        raise DataError(
            f"{name} is encrypted Parquet (its footer too), and there are no keys for it; "
            f"{_WAY_OUT}"
        )


def unreadable_chunks(footer: pq.FileMetaData, numbers: Sequence[int]) -> dict[int, Exception]:
    """Which of the leaf columns `numbers` cannot be read in some row group, and why. Call this
    before any of their metadata is read."""
    if not numbers or not footer.num_row_groups or _probe(footer, numbers) is None:
        return {}
    return {number: error for number in numbers if (error := _probe(footer, [number]))}


def refuse_unreadable(
    name: str, footer: pq.FileMetaData, unreadable: dict[int, Exception], wanted: Sequence[int]
) -> None:
    """Raises DataError if a leaf column in `wanted` is in `unreadable`."""
    for number in wanted:
        if number not in unreadable:
            continue
        column, error = (
            f"column {footer.schema.column(number).path!r} of {name}",
            unreadable[number],
        )
        if "decrypt" in str(error):
            raise DataError(
                f"{column} is encrypted, and there are no keys for it; leave it out by "
                f"DataConfig.columns, or {_WAY_OUT}"
            )
        raise DataError(
            f"the footer of {name} is damaged: {column}: {type(error).__name__}: {error}"
        )


class _WithoutBytes(io.RawIOBase):
    """A file of any size that has no bytes. Whoever reads them has accepted the metadata.

    An exception would say so, too, but pyarrow formats its traceback, which takes as long as all
    the rest.
    """

    is_read = False
    _at = 0

    def read(self, count: int = -1) -> bytes:
        self.is_read = True
        return b""

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position if whence == os.SEEK_SET else _SIZE
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _probe(footer: pq.FileMetaData, numbers: Sequence[int]) -> Exception | None:
    """What is wrong with the columns; None if nothing is. Reading columns raises an exception where
    accessing their metadata would end the process. With `pre_buffer` the reader checks all chunks
    before it reads the first byte."""
    source = _WithoutBytes()
    file = pq.ParquetFile(pa.PythonFile(source, mode="r"), metadata=footer, pre_buffer=True)
    every = len(numbers) == footer.num_columns
    columns = None if every else [footer.schema.column(number).path for number in numbers]
    groups = range(footer.num_row_groups)
    return _refusal(source, lambda: file.read_row_groups(groups, columns, use_threads=False))


def _refusal(source: _WithoutBytes, read: Callable[[], Any]) -> Exception | None:
    """The exception with which `read` refuses the metadata; None if it was accepted."""
    try:
        read()
    except (OSError, pa.ArrowException) as error:
        return None if source.is_read else error
    return None
