"""`Store`: the objects under one URL, over any backend, with everything that backends have in
common.

- A read returns exactly the requested length and version.
- Transient faults are retried (retry.py); the backends send one request each.
- No error contains a credential, in its text, cause or context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from elastic_dp.errors import StorageError
from elastic_dp.storage.backend import SCHEMES, Backend, Entry, FolderListing
from elastic_dp.storage.error_classes import ObjectMissing, OtherVersion, ShortBody, fault_of
from elastic_dp.storage.redact import redact, url_credentials
from elastic_dp.storage.retry import STALE_TRIES, Retry, StoreCounts, is_panic
from elastic_dp.urls import StorageURL, redact_url

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from elastic_dp.storage.disk_cache import DiskCache


class Store:
    """The objects under one URL. Threads may share it. Paths are those of its `Entry`s and of
    `path`.

    `url`: of a file or a folder. `options`: those of obstore for s3, gs, az and http, else of the
    scheme's fsspec file system; None: those of a `StorageURL`. `on_wait(message)`: called, from
    whatever thread meets it, when a call has gone `timeout_s` without success, and when all such
    calls are through; it must not call the store. `cache`: keeps what `read` returns of a version,
    unless the store is a folder of this machine. Raises StorageError if the URL cannot be opened.

    A pickled Store holds its options, credentials included, since it reopens with them: keep it in
    memory and on the wire, never in a file. `repr` shows none.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
        cache: DiskCache | None = None,
    ) -> None:
        self.url = redact_url(url)  # for people
        if options is None and isinstance(url, StorageURL):
            options = url.options
        self._url, self._options = str(url), dict(options or {})
        self._timeout_s, self._on_wait = timeout_s, on_wait
        self._retry = Retry(self.url, self._clean, timeout_s, on_wait)
        self._backend = self._open()
        self.path = self._backend.path
        self._cache = cache if self.local_path(self.path) is None else None

    @property
    def counts(self) -> StoreCounts:
        """Returns a copy of the present counts."""
        return self._retry.counts

    @property
    def lists(self) -> bool:
        """Whether the store can list its content; over http it cannot."""
        return self._backend.lists

    def look(self, folder: str, *, deep: bool) -> FolderListing:
        """Lists a folder, or everything below it, in one listing sorted by path. Names have no
        wildcards."""
        found = self._retry.run(
            f"list {folder}", lambda: self._backend.look(folder.rstrip("/"), deep)
        )
        return FolderListing(sorted(found.entries), sorted(found.folders), found.unreadable)

    def look_up(self, path: str) -> Entry | None:
        """Returns the one file of this name, or None. The name has no wildcards."""
        try:
            return self._retry.run(f"look up {path}", lambda: self._backend.stat(path))
        except ObjectMissing:
            return None

    def find(self, path: str) -> list[Entry]:
        """The files below a folder, or the one file, by path; [] if there is nothing. One listing,
        without a request per file. Names have no wildcards. Over http only single files are found.
        """
        if not self._backend.lists:
            return [self._find_unlisted(path)]
        found = self.look(path, deep=True).entries
        if not found and not path.endswith("/") and path:
            entry = self.look_up(path)
            return [entry] if entry else []
        return found

    def read(self, path: str, start: int, end: int, version: str = "") -> Buffer:
        """Returns the bytes start ≤ i < end, all of them, of this `version` (of an Entry; "": any).

        Raises ObjectRewritten if the object has another version, or ends before `end`.
        """
        assert 0 <= start <= end, (start, end)
        if start == end:
            return b""
        if self._cache is None or not version:
            return self._read(path, start, end, version)
        return self._cache.read(
            f"{self.url} {path} {version} {start} {end}",
            end - start,
            lambda: self._read(path, start, end, version),
        )

    def read_all(self, path: str, version: str = "") -> Buffer:
        return self._read(path, 0, None, version)

    def local_path(self, path: str) -> str | None:
        """Returns the path of a file of this machine, for memory mapping; None for other stores."""
        return self._backend.local_path(path)

    def write(self, path: str, content: Buffer, *, create_only: bool = False) -> None:
        """Writes an object atomically. With `create_only`, raises FileExistsError if it exists.

        A create whose answer was lost is repeated. If it then meets an object with exactly these
        bytes, that counts as its own, so write content that no other writer would.
        """
        if create_only and not self._backend.creates_only:
            raise StorageError(
                f"{self.url}: this kind of store cannot create an object only if there is none; "
                "use s3, gs, az, or a folder"
            )
        attempts = 0
        view = memoryview(content).cast("B")

        def once() -> None:
            nonlocal attempts
            attempts += 1
            self._backend.write(path, view, create_only)

        try:
            self._retry.run(f"write {path}", once)
        except FileExistsError:
            if attempts < 2 or memoryview(self.read_all(path)) != view:
                raise

    def delete(self, path: str) -> None:
        """Deletes an object. It is not an error if there is none, since a delete may be
        repeated."""
        try:
            self._retry.run(f"delete {path}", lambda: self._backend.delete(path))
        except ObjectMissing:
            return

    def raise_when_late(self) -> None:
        """From now on a call without success for `timeout_s` raises StorageError, also one that
        waits with `on_wait`."""
        self._retry.raise_when_late()

    def close(self) -> None:
        """Makes calls that wait for the store raise StorageError. Later calls are tried once."""
        self._retry.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._url, self._options, self._timeout_s, self._on_wait)

    def _open(self) -> Backend:
        stall_s = min(10.0, max(1.0, self._timeout_s / 4))
        try:
            return _open_backend(self._url, self._options, stall_s)
        except Exception as error:  # a foreign file system may raise anything at its options
            said = fault_of(error).words
        except BaseException as error:
            if not is_panic(error):
                raise
            said = f"the store's library refuses the options: {error}"
        raise StorageError(self._clean(f"cannot open {self._url}: {said}"))

    def _clean(self, text: str) -> str:
        return redact(text, {**self._options, "url_token": url_credentials(self._url)})

    def _find_unlisted(self, path: str) -> Entry:
        found = None if path.endswith("/") or "*" in path else self.look_up(path)
        if found is not None:
            return found
        raise StorageError(
            f"{self.url}: no file {path!r} there, and http has no listing, so folders and globs "
            "cannot be read from it; name each file by its URL"
        )

    def _read(self, path: str, start: int, end: int | None, version: str) -> Buffer:
        return self._retry.run(
            f"read {path}",
            lambda: self._read_once(path, start, end, version),
            stale_tries=STALE_TRIES if version else 0,
        )

    def _read_once(self, path: str, start: int, end: int | None, version: str) -> Buffer:
        content, entry = self._backend.read(path, start, end, bool(version))
        if version and entry and entry.version and entry.version != version:
            raise OtherVersion(
                f"it was rewritten: its version is {entry.version}, no longer {version}"
            )
        if end is None:
            end = entry.size if entry else len(memoryview(content))
        got = memoryview(content).nbytes
        if entry and end > entry.size:
            raise OtherVersion(f"bytes {start} to {end} were asked for, but it has {entry.size}")
        if got > end - start:
            raise StorageError(f"the server of {path} sends whole files, and ignores ranges")
        if got < end - start:
            raise ShortBody(f"{got} of {end - start} bytes came")
        self._retry.came(got)
        return content


def _reopen(url: str, options: dict[str, Any], timeout_s: float, on_wait: Any) -> Store:
    return Store(url, options, timeout_s=timeout_s, on_wait=on_wait)


def _open_backend(url: str, options: Mapping[str, Any], stall_s: float) -> Backend:
    """Sends nothing. Raises what a library raises, not yet redacted."""
    scheme = split_protocol(url)[0] or "file"
    backend: Backend
    if scheme in SCHEMES and "::" not in url:
        from elastic_dp.storage.obstore_backend import open_obstore

        try:
            backend = open_obstore(scheme, url, options, stall_s)
        except ImportError as error:
            extra = SCHEMES[scheme].replace("memory", "http")
            raise StorageError(f"{error}; pip install 'elastic_dp[{extra}]'") from None
    elif scheme in ("file", "local") and "::" not in url:
        from elastic_dp.storage.local_backend import LocalBackend

        backend = LocalBackend(str(LocalFileSystem._strip_protocol(url)))
    else:
        from elastic_dp.storage.fsspec_backend import FsspecBackend

        backend = FsspecBackend(url, options, stall_s)
    if redact_url(f"x://x/{backend.path}") != f"x://x/{backend.path}":
        raise StorageError(
            "it has credentials in a place where they would become part of names; give them "
            "in storage_options"
        )
    return backend
