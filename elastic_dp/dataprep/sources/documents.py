"""Documents of text, in pieces of limited length: a tokenizer gets one piece at a time.

A piece ends at a line end if possible, since a tokenizer may merge characters across any other cut.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from elastic_dp.data.formats.lfs_pointer import refuse_pointer
from elastic_dp.dataprep.sources.row_stream import Documents, Rows
from elastic_dp.dataprep.sources.source_files import Files, reading

PIECE_CHARS = 1 << 20


def documents_of_files(files: Files) -> Documents:
    for name in files.names:
        with files.open(name) as raw:
            # pyarrow's streams are not io.BufferedIOBase, so text is decoded and cut here
            text = io.TextIOWrapper(io.BufferedReader(_Raw(raw)), encoding="utf-8", newline="")
            rest = ""
            while chunk := _read(text, name, files):
                if not rest:
                    refuse_pointer(name, chunk.encode())
                pieces = list(_pieces(rest + chunk))
                yield from ((piece, False) for piece, last in pieces if not last)
                rest = pieces[-1][0]
            yield rest, True


def documents_of_column(rows: Rows, column: str) -> Documents:
    """The documents in a column. A null is left out."""
    for batch in rows.batches():
        for text in batch.column(column):
            if text.is_valid:
                yield from _pieces(text.as_py())


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:end], False
        start = end
    yield text[start:], True


def _read(text: io.TextIOWrapper, name: str, files: Files) -> str:
    with reading(name, files.options):
        return text.read(PIECE_CHARS)


class _Raw(io.RawIOBase):
    """A raw stream of any object with `read`."""

    def __init__(self, source: object) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        got = self._source.read(len(into))  # type: ignore[attr-defined]
        into[: len(got)] = got
        return len(got)
