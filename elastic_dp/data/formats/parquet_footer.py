"""Reads Parquet footers in a child process, since a crafted one can end the process that reads it.

`RowGroupMetaData.column` and `ColumnChunkMetaData.statistics` call C++ code whose exceptions are
not caught, and pyarrow ends the process at a column chunk that is encrypted. So a worker asks a
child for the numbers of the column chunks, and reads such metadata itself only of a footer with
which the child has done so. The child starts in a tenth of a second, without NumPy. One process has
one child, which leaves when nothing was asked for `IDLE_S`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from array import array
from collections.abc import Sequence
from typing import Any, cast

from elastic_dp.errors import DataError

IDLE_S = 30.0
CHUNK_NUMBERS = ("start", "end", "values", "decompressed", "compressed", "dictionary", "nulls")
_MOST = 1 << 48
_WAY_OUT = "write the data set without encryption"

# (bytes that are equal where schema and wanted leaf columns are; int64 [row groups], their rows;
# int64 [row groups, wanted leaf columns, CHUNK_NUMBERS])
Facts = tuple[bytes, Any, Any]


def refuse_encrypted(name: str, end: Any) -> None:
    """Raises DataError if the footer is encrypted. `end`: the file's last bytes."""
    if bytes(end[-4:]) == b"PARE":
        raise DataError(
            f"{name} is encrypted Parquet (its footer too), and there are no keys for it; "
            f"{_WAY_OUT}"
        )


class FooterProcess:
    """`read` asks the child. One call runs at a time; others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a process that is forked from it does not have the child

    def start(self) -> None:
        """Returns at once, before the child has imported anything."""
        if self._popen is None:  # without waiting for a footer that it reads
            with self._lock:
                self._start()

    def read(self, name: str, tail: bytes, columns: Sequence[str] | None) -> Facts:
        """`tail`: the footer. `columns`: those that are read; None: all. Raises DataError if the
        footer ends the process, and OSError if it contradicts itself."""
        with self._lock:
            try:
                answer = self._ask(tail, columns, tells=False)
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end()
                try:  # again in another child, which says what it reads; the first may have left
                    answer = self._ask(tail, columns, tells=True)
                except (EOFError, OSError, pickle.UnpicklingError) as error:
                    raise DataError(_of_death(name, *self._end())) from error
        if isinstance(answer, Exception):
            raise answer
        return cast(Facts, answer)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, tail: bytes, columns: Sequence[str] | None, *, tells: bool) -> Any:
        popen = self._start()
        assert popen.stdin is not None and popen.stdout is not None
        pickle.dump((tail, columns, tells), popen.stdin)
        popen.stdin.flush()
        return pickle.load(popen.stdout)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._popen is None or self._owner != os.getpid():
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._owner, self._errors = os.getpid(), tempfile.TemporaryFile()
            self._popen = subprocess.Popen(
                [sys.executable, "-P", __file__, str(IDLE_S)],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        return self._popen

    def _end(self) -> tuple[int, list[str]]:
        """(exit code, lines of its errors)"""
        popen, self._popen = self._popen, None
        if popen is None or self._owner != os.getpid():
            return 0, []
        with self._errors as errors:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                popen.communicate(timeout=1.0)
            popen.kill()
            errors.seek(0)
            return popen.wait(), errors.read().decode(errors="replace").splitlines()


def _of_death(name: str, code: int, lines: Sequence[str]) -> str:
    place = next((line for line in reversed(lines) if line.startswith("column ")), "")
    what = (line.partition("what():")[2].strip() for line in lines if "what():" in line)
    said = next(what, f"exit code {code}")
    if "decrypt" in said:
        return (
            f"{place.partition(' of row group')[0]} of {name} is encrypted, and there are no keys "
            f"for it; leave it out by DataConfig.columns, or {_WAY_OUT}"
        )
    return (
        f"the footer of {name} is damaged, and ends the process that reads it: {place}: {said}; "
        "write the file again, or remove it from the data set"
    )


FOOTERS = FooterProcess()
atexit.register(FOOTERS.close)


# ------------------------------------------------------------------------------------- the child


def serve(idle_s: float) -> None:
    """The main function of the child. It ends when its input closes, or nothing is asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.modules["numpy"] = None  # type: ignore[assignment]  # half of the time to start
    import pyarrow.parquet

    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    while select.select([asked], [], [], idle_s)[0]:
        try:
            tail, columns, tells = pickle.load(asked)
        except EOFError:
            return
        try:
            answer: Any = _facts(pyarrow, tail, columns, tells)
        except Exception as error:  # a decoder may raise anything for damaged content
            answer = error
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def _facts(pa: Any, tail: bytes, columns: Sequence[str] | None, tells: bool) -> Facts:
    footer = pa.parquet.read_metadata(pa.BufferReader(tail))
    every = [footer.schema.column(number) for number in range(footer.num_columns)]
    wanted = [(n, every[n]) for n in chunk_numbers([leaf.path for leaf in every], columns)]
    leaves = [
        (x.path, x.physical_type, x.length, x.max_repetition_level > 0, x.logical_type.type)
        for _, x in wanted
    ]
    schema = footer.schema.to_arrow_schema().serialize().to_pybytes()
    rows, chunks = array("q"), array("q")
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        if not 0 <= group.num_rows <= _MOST:
            raise OSError(f"row group {number} has {group.num_rows} rows")
        if group.num_columns != len(every):
            raise OSError(
                f"row group {number} has {group.num_columns} columns, and its schema {len(every)}"
            )
        rows.append(group.num_rows)
        for n, leaf in wanted:
            if tells:
                print(f"column {leaf.path!r} of row group {number}", file=sys.stderr, flush=True)
            chunks.extend(_chunk(group.column(n), leaf, group.num_rows, number))
    return pickle.dumps((schema, leaves, footer.created_by)), rows, chunks


def _chunk(chunk: Any, leaf: Any, rows: int, number: int) -> tuple[int, ...]:
    values, compressed = chunk.num_values, chunk.total_compressed_size
    decompressed, start = chunk.total_uncompressed_size, chunk.data_page_offset
    found = ""
    if chunk.physical_type != leaf.physical_type:
        found = f"the type {chunk.physical_type}, and {leaf.physical_type} in the schema"
    elif chunk.compression == "UNKNOWN":
        found = "an unknown compression"
    elif min(compressed, decompressed, start) < 0 or max(compressed, decompressed, values) > _MOST:
        found = f"{compressed} bytes at {start}, and {decompressed} decompressed"
    elif values < rows or (values > rows and not leaf.max_repetition_level):
        found = f"{values} values for {rows} rows"  # some rows would be lost
    if found:
        raise OSError(
            f"its footer contradicts itself: column {leaf.path!r} of row group {number} has {found}"
        )
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    is_text = leaf.physical_type == "BYTE_ARRAY"
    dictionary = is_text and any("DICTIONARY" in encoding for encoding in chunk.encodings)
    known = chunk.statistics
    nulls = known.null_count if known is not None and known.has_null_count else -1
    return start, start + compressed, values, decompressed, compressed, dictionary, nulls


def chunk_numbers(paths: Sequence[str], columns: Sequence[str] | None) -> list[int]:
    """The numbers of the leaf columns that belong to `columns`; None: all."""
    if columns is None:
        return list(range(len(paths)))
    wanted = tuple(columns)
    inside = tuple(name + "." for name in wanted)
    return [n for n, path in enumerate(paths) if path in wanted or path.startswith(inside)]


if __name__ == "__main__":
    serve(float(sys.argv[1]))
