"""The destination of new shards, which nothing reads as a data set before it is complete.

On a local disk, shards are written to a hidden folder next to the destination, which is renamed at
the end. An object store has no such rename. There, each shard appears complete, by one put, and an
object `_incomplete` exists from before the first shard until after the last one; neither training
nor another conversion reads a folder that has it. An exception removes everything that was written.
After a kill, the hidden folder, or `_incomplete` with the shards so far, remains, and another
conversion to that destination is refused until they are removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from elastic_dp.data.discovery.incomplete import INCOMPLETE
from elastic_dp.errors import DataError, ElasticError, StorageError
from elastic_dp.storage import is_local, open_file_system, redact


class Destination:
    """An empty or absent folder at `url`. Use `shard(name)` for one shard after the other, within
    `writing()`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url, self._options = url, dict(options or {})
        try:
            self._system, path = open_file_system(url, options)
        except ElasticError:
            raise
        except (ImportError, ValueError, TypeError) as error:
            raise DataError(redact(f"cannot open {url!r}: {error}", self._options)) from None
        self._is_local = is_local(self._system)
        self._path = os.path.realpath(path) if self._is_local else str(path).rstrip("/")
        folder, _, name = self._path.rpartition("/")
        self._written_to = f"{folder}/.{name}.incomplete" if self._is_local else self._path
        self._names: list[str] = []

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All shards appear at the end of the `with` block, or none. Raises DataError if the
        destination is not empty."""
        with _store_errors(self._url, self._options):
            self._refuse_what_is_there()
            self._begin()
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._discard()
            raise
        with _store_errors(self._url, self._options):
            self._publish()

    @contextmanager
    def shard(self, name: str) -> Iterator[Any]:
        """A file to write to. It does not appear if writing fails."""
        self._names.append(name)
        with _store_errors(self._url, self._options, OSError):
            file = self._system.open(f"{self._written_to}/{name}", "wb")
            try:
                yield file
            except BaseException:
                _abandon(file)
                raise
            if self._is_local:  # a power cut must not leave the rename without the bytes
                file.flush()
                os.fsync(file.fileno())
            file.close()

    def _refuse_what_is_there(self) -> None:
        self._system.invalidate_cache()
        for path in dict.fromkeys((self._path, self._written_to)):
            there = self._system.find(path) if self._system.exists(path) else []
            if there:
                unfinished = path != self._path or any(f.endswith(f"/{INCOMPLETE}") for f in there)
                raise DataError(
                    f"{path!r} is not empty: {len(there)} files, such as {there[0]}"
                    + (", of a conversion that still runs or was killed" if unfinished else "")
                    + "; name another destination, or remove it first"
                )
        if self._is_local and os.path.ismount(self._path):
            raise DataError(f"{self._path!r} is a mount point; name a folder in it")

    def _begin(self) -> None:
        if self._is_local:
            self._system.makedirs(self._written_to)
        else:
            self._system.pipe_file(f"{self._path}/{INCOMPLETE}", b"not all shards are here yet\n")

    def _publish(self) -> None:
        if self._is_local:
            os.rename(self._written_to, self._path)  # replaces an empty folder
        else:
            self._system.rm_file(f"{self._path}/{INCOMPLETE}")

    def _discard(self) -> None:
        """Removes `_incomplete` last: until then nothing reads the other objects."""
        for name in [*self._names, INCOMPLETE]:
            with suppress(FileNotFoundError):
                self._system.rm_file(f"{self._written_to}/{name}")
        if self._is_local:
            os.rmdir(self._written_to)


def _abandon(file: Any) -> None:
    """Drops a file without publishing it: an upload that is closed becomes an object."""
    if hasattr(file, "discard") and hasattr(file, "buffer"):
        file.discard()
        file.closed = True
    else:
        file.close()


@contextmanager
def _store_errors(
    url: str, options: Mapping[str, Any], kinds: type[Exception] = Exception
) -> Iterator[None]:
    """Raises StorageError for errors of the store. A file system may raise anything. Around other
    code, only an OSError (`kinds`) comes from the store."""
    try:
        yield
    except ElasticError:
        raise
    except kinds as error:
        message = redact(f"cannot write to {url!r}: {type(error).__name__}: {error}", options)
        raise StorageError(message) from None
