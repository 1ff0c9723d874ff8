"""Where new shards go so that nothing reads as a data set before it is whole.

On this machine they are written to a hidden folder beside the destination, which takes its name in
one rename. An object store has no such rename: there each shard appears whole, by its put, and
`_incomplete` lies beside them from before the first until after the last; neither training nor
another conversion reads a folder that holds it. Whatever ends a conversion by an exception removes
what it wrote. A kill leaves the hidden folder, or `_incomplete` with the shards so far, and the
next conversion to that place is refused until they are removed.
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
    """An empty or absent folder at `url`. Use `writing()`, and in it `shard(name)` for one after
    the other."""

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
        """All shards appear at its end, or none. Raises DataError where there is something
        already."""
        with _store_errors(self._url, self._options):
            self._refuse_what_is_there()
            self._begin()
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self._discard()
            raise
        with _store_errors(self._url, self._options):
            self._publish()

    @contextmanager
    def shard(self, name: str) -> Iterator[Any]:
        """A file to write to; where writing fails it does not appear."""
        self._names.append(name)
        with _store_errors(self._url, self._options, OSError):
            file = self._system.open(f"{self._written_to}/{name}", "wb")
            try:
                yield file
            except BaseException:
                _abandon(file)
                raise
            if self._is_local:  # the rename must not outlive a power cut that the bytes do not
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
            os.rename(self._written_to, self._path)  # takes the place of an empty folder
        else:
            self._system.rm_file(f"{self._path}/{INCOMPLETE}")

    def _discard(self) -> None:
        """`_incomplete` goes last: until then the rest is not to be read."""
        for name in [*self._names, INCOMPLETE]:
            with suppress(FileNotFoundError):
                self._system.rm_file(f"{self._written_to}/{name}")
        if self._is_local:
            os.rmdir(self._written_to)


def _abandon(file: Any) -> None:
    """An upload that is closed becomes an object; one that is discarded does not."""
    if hasattr(file, "discard") and hasattr(file, "buffer"):
        file.discard()
        file.closed = True
    else:
        file.close()


@contextmanager
def _store_errors(
    url: str, options: Mapping[str, Any], kinds: type[Exception] = Exception
) -> Iterator[None]:
    """A foreign file system may raise anything; around code that is not its own, only an OSError is
    the store's."""
    try:
        yield
    except ElasticError:
        raise
    except kinds as error:
        said = redact(f"cannot write to {url!r}: {type(error).__name__}: {error}", options)
        raise StorageError(said) from None
