"""Which backend serves a URL, and what to install where none does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from elastic_dp.errors import StorageError
from elastic_dp.storage.backend import Backend
from elastic_dp.storage.fsspec_backend import FsspecBackend
from elastic_dp.storage.local_backend import LocalBackend
from elastic_dp.storage.obstore_backend import SCHEMES, open_obstore
from elastic_dp.storage.option_names import known_options
from elastic_dp.urls import redact_url

_EXTRAS = {
    **{"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"},
    **{"http": "http", "https": "http"},
}


def open_backend(url: str, options: Mapping[str, Any], stall_s: float) -> Backend:
    """Sends nothing. Raises StorageError, not yet redacted."""
    backend = _choose(url, options, stall_s)
    if redact_url(f"x://x/{backend.path}") != f"x://x/{backend.path}":
        raise StorageError(
            "it has credentials in a place where they would become part of names; give them "
            "in storage_options"
        )
    return backend


def _choose(url: str, options: Mapping[str, Any], stall_s: float) -> Backend:
    scheme = split_protocol(url)[0] or "file"
    if "::" in url:
        return FsspecBackend("", url, options, stall_s)
    if scheme in ("file", "local"):
        return LocalBackend(str(LocalFileSystem._strip_protocol(url)))
    options = known_options(scheme, options)
    found = open_obstore(scheme, url, options, stall_s) if scheme in SCHEMES else None
    if found:
        if found.lists:
            found.other = lambda: FsspecBackend(scheme, url, options, stall_s)
        return found
    try:
        return FsspecBackend(scheme, url, options, stall_s)
    except (ImportError, ValueError) as error:
        missing = isinstance(error, ImportError) or "Protocol not known" in str(error)
        if scheme not in _EXTRAS or not missing:
            raise
        raise StorageError(f"{error}; pip install 'elastic_dp[{_EXTRAS[scheme]}]'") from None
