"""File systems of fsspec, for what needs a file object: pyarrow's readers and writers while data is
converted.

Training reads and writes through `Store`. Errors of these file systems are foreign; whoever uses
one wraps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from elastic_dp.storage.backend import Entry, FolderListing
from elastic_dp.storage.fsspec_backend import entry_of, look_in
from elastic_dp.storage.local_backend import LocalBackend
from elastic_dp.storage.option_names import fsspec_options


def open_file_system(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The file system and the path in it. Raises StorageError for an unknown option, else what
    fsspec raises."""
    scheme = "" if "::" in url else split_protocol(url)[0] or "file"
    found: tuple[Any, str] = url_to_fs(url, **fsspec_options(scheme, options or {}))
    return found


def look_up(system: Any, path: str) -> Entry:
    """The file as it is now, whatever was listed before. Raises FileNotFoundError, or what fsspec
    raises."""
    if is_local(system):
        return LocalBackend(path).stat(path)
    system.invalidate_cache()
    return entry_of(path, system.info(path))


def list_folder(system: Any, folder: str, *, deep: bool) -> FolderListing:
    """Lists a folder, or everything below it, by the rules of `Store.look`, sorted by path. Names
    have no wildcards. Raises what fsspec raises."""
    if is_local(system):
        found = LocalBackend(folder).look(folder, deep)
    else:
        found = look_in(system, folder, deep)
    return FolderListing(sorted(found.entries), sorted(found.folders), found.unreadable)


def is_local(system: Any) -> bool:
    return isinstance(system, LocalFileSystem)
