"""s3, gs, az, http(s) and memory through obstore. The options are obstore's.

obstore's own retries are off: `Store` counts them.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from elastic_dp.errors import StorageError
from elastic_dp.storage.backend import (
    SCHEMES,
    SLOWEST_BYTES_PER_S,
    Backend,
    Entry,
    FolderListing,
    without_weakness,
)
from elastic_dp.storage.error_classes import Kind, fault_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LISTED_AT_ONCE = 1000
_CREDENTIALS_LAST = timedelta(minutes=5)  # then botocore is asked again
_WHOLE_OBJECT_BYTES = 1 << 30  # the assumed size of an object of unknown size
# Requests of up to this many bytes share one client, with its connections and its limit of time;
# those of up to _CLASS_FACTOR times as many share the next one, and so on.
_READ_CLASS_BYTES = 16 << 20
_WRITE_CLASS_BYTES = 1 << 20
_CLASS_FACTOR = 16
_CLIENT_OPTIONS = {
    *("allow_invalid_certificates", "default_headers", "http1_only", "http2_only", "user_agent"),
    *("pool_idle_timeout", "pool_max_idle_per_host", "randomize_addresses"),
    *("proxy_url", "proxy_ca_certificate", "proxy_excludes"),
}
_OURS = {"allow_http", "aws_allow_http", "azure_allow_http", "google_allow_http"}  # always so
# Names of s3fs, gcsfs, adlfs and aiohttp, and what to write instead.
_REPLACED = {
    "s3": {
        **{"key": "access_key_id", "secret": "secret_access_key", "region_name": "region"},
        **{"access_key": "access_key_id", "secret_key": "secret_access_key"},
        **{"anon": "skip_signature", "client_kwargs": "endpoint and region", "profile": ""},
        **{"username": "access_key_id", "password": "secret_access_key"},
        "requester_pays": "request_payer",
    },
    "gs": {
        **{"token": "service_account, service_account_key or skip_signature", "project": ""},
        **{"anon": "skip_signature", "credentials": "service_account"},
    },
    "az": {
        "connection_string": "account_name, account_key and endpoint",
        **{"anon": "skip_signature", "key": "account_key", "account_url": "endpoint"},
    },
    "http": {"headers": "default_headers", "client_kwargs": "default_headers or proxy_url"},
    "memory": {},
}


class ObstoreBackend(Backend):
    """`make(client_options, retry_config)` makes the obstore store; one is kept per size of
    request."""

    def __init__(self, make: Callable[..., Any], path: str, *, lists: bool, stall_s: float) -> None:
        import obstore

        self._obstore, self._make, self._stall_s = obstore, make, stall_s
        self.path, self.lists, self.creates_only = path, lists, lists
        self._clients: dict[tuple[int, bool], Any] = {}
        self._client(0)  # so that a bad option is an error now

    def look(self, folder: str, deep: bool) -> FolderListing:
        prefix, client = folder.strip("/") or None, self._client(0)
        try:
            if not deep:
                found = self._obstore.list_with_delimiter(client, prefix)
                entries = [_entry(meta) for meta in found["objects"]]
                entries = [entry for entry in entries if entry.path != prefix]  # its own marker
                return FolderListing(entries, list(found["common_prefixes"]), {})
            stream = self._obstore.list(client, prefix, chunk_size=_LISTED_AT_ONCE)
            entries = [_entry(meta) for chunk in stream for meta in chunk]
            return FolderListing(_without_markers(entries), [], {})
        except self._obstore.exceptions.InvalidPathError as error:
            said = str(error).partition("\n")[0]
        raise StorageError(
            f"{folder or 'the bucket'} cannot be listed, since a key in it has an empty, '.' or "
            f"'..' part ({said}); rename that object"
        )

    def stat(self, path: str) -> Entry:
        client = self._client(0)
        try:
            return _entry(self._obstore.head(client, path))
        except Exception as error:
            refused = None if self.lists else error
            if refused is None or fault_of(error).kind is not Kind.PERMANENT:
                raise
        try:  # a presigned URL, or a server without HEAD
            return _entry(self._obstore.get(client, path, options={"range": (0, 1)}).meta)
        except Exception as error:
            if fault_of(error).kind is not Kind.PERMANENT:
                raise
            said = f"{fault_of(refused).words}; and to GET: {fault_of(error).words}"
        raise StorageError(f"the server refuses HEAD: {said}")

    def read(
        self, path: str, start: int, end: int | None, versioned: bool
    ) -> tuple[Buffer, Entry | None]:
        size = _WHOLE_OBJECT_BYTES if end is None else end - start
        span: Any = {"offset": start} if end is None else (start, end)
        options: Any = {"range": span} if start or end is not None else None
        result = self._obstore.get(self._client(size), path, options=options)
        meta = result.meta
        if (meta["e_tag"] or "").startswith("W/"):
            _check_encoding(path, result.attributes.get("Content-Encoding", "identity"))
        return result.bytes(), _entry(meta)

    def write(self, path: str, content: Buffer, create_only: bool) -> None:
        client = self._client(memoryview(content).nbytes, writing=True)
        if not create_only:
            self._obstore.put(client, path, content)
            return
        try:
            self._obstore.put(client, path, content, mode="create")
        except self._obstore.exceptions.NotSupportedError as error:
            raise StorageError(f"this store cannot create {path} only if there is none") from error

    def delete(self, path: str) -> None:
        self._obstore.delete(self._client(0), path)

    def _client(self, size: int, writing: bool = False) -> Any:
        """Return the client whose limits of time fit a request of this size: one for the whole
        request, and one for the time without a byte.

        The second does not fit an upload: it would wait for the answer, the last thing to come.
        """
        limit = _WRITE_CLASS_BYTES if writing else _READ_CLASS_BYTES
        while limit < size:
            limit *= _CLASS_FACTOR
        if (limit, writing) not in self._clients:
            whole_s = self._stall_s + limit / SLOWEST_BYTES_PER_S
            options = {
                "connect_timeout": timedelta(seconds=self._stall_s),
                "timeout": timedelta(seconds=whole_s),
                "allow_http": True,
            }
            if not writing:
                options["read_timeout"] = timedelta(seconds=self._stall_s)
            retry = {"max_retries": 0, "retry_timeout": timedelta(seconds=whole_s)}
            self._clients[limit, writing] = self._make(client_options=options, retry_config=retry)
        return self._clients[limit, writing]


def open_obstore(
    scheme: str, url: str, options: Mapping[str, Any], stall_s: float
) -> ObstoreBackend:
    """Raises ImportError where obstore is missing, StorageError for an option that it does not
    have."""
    from obstore import store
    from obstore.exceptions import UnknownConfigurationKeyError

    kind = SCHEMES[scheme]
    named = {str(name).lower(): value for name, value in options.items() if value is not None}
    client = {name: value for name, value in named.items() if name in _CLIENT_OPTIONS}
    config = {n: v for n, v in named.items() if n not in _CLIENT_OPTIONS and n not in _OURS}
    for name in config:
        if name in _REPLACED[kind]:
            _refuse(name, scheme, _REPLACED[kind][name])
    if kind in ("http", "memory"):
        for name in config:
            _refuse(name, scheme, " or ".join(sorted(_CLIENT_OPTIONS)) if kind == "http" else "")
    if kind == "http":
        return _open_http(scheme, url, client, stall_s)
    if kind == "memory":
        path = url.split("://", 1)[1].strip("/")
        return ObstoreBackend(lambda **_: memory_store(), path, lists=True, stall_s=stall_s)
    host, _, path = url.split("://", 1)[1].partition("/")
    more: dict[str, Any] = {}
    if kind == "s3":
        endpoint = next((v for n, v in config.items() if "endpoint" in n), _endpoint_variable())
        _check_endpoint(endpoint)
        if not any("access_key_id" in n or "skip_signature" in n for n in config):
            more = _credentials_of_botocore()
    root = f"{scheme if kind == 'az' else kind}://{host}"

    def make(*, client_options: dict[str, Any], **limits: Any) -> Any:
        from_url: Any = store.from_url  # each kind of store has a type of its own
        together = {**client, **client_options}
        return from_url(root, config=config, client_options=together, **limits, **more)

    try:
        return ObstoreBackend(make, path, lists=True, stall_s=stall_s)
    except UnknownConfigurationKeyError as error:
        said = re.search(r"key: '([^']*)'", str(error))
    _refuse(said[1] if said else "an option", scheme, "a name that obstore has for this store")
    raise AssertionError


@cache
def memory_store() -> Any:
    """The one store of memory:// in this process."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _refuse(name: str, scheme: str, instead: str) -> None:
    way_out = f"write {instead}" if instead else "leave it out, or set the variable of its tool"
    raise StorageError(f"storage_options has {name!r}, which {scheme}:// does not know; {way_out}")


def _open_http(scheme: str, url: str, client: Mapping[str, Any], stall_s: float) -> ObstoreBackend:
    """The query of a presigned URL is sent with each request, as a URL's user and password are."""
    from obstore import store

    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    headers = dict(client.get("default_headers") or {})
    if at:
        credentials = base64.b64encode(unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {credentials}"
    root = f"{scheme}://{host}/" + (f"?{parts.query}" if parts.query else "")

    def make(*, client_options: dict[str, Any], **limits: Any) -> Any:
        given: Any = {**client, **client_options}
        if headers:
            given["default_headers"] = headers
        return store.HTTPStore(root, client_options=given, **limits)

    path = unquote(parts.path).lstrip("/")
    return ObstoreBackend(make, path, lists=False, stall_s=stall_s)


def _endpoint_variable() -> str | None:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if name in os.environ), None)


def _check_endpoint(endpoint: Any) -> None:
    """obstore panics at an endpoint without a scheme, in whatever thread reads first."""
    if endpoint is None or re.fullmatch(r"https?://[^\s/]\S*", str(endpoint), re.IGNORECASE):
        return
    shown = str(endpoint).rpartition("@")[2]  # what is before it may be secret
    raise StorageError(
        f"the endpoint is {shown!r}, must be a URL with its scheme, as 'http://minio:9000'"
    )


def _credentials_of_botocore() -> dict[str, Any]:
    """Those of ~/.aws and AWS_PROFILE, which obstore does not read."""
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    in_files = "AWS_PROFILE" in os.environ or file.exists()
    if not in_files or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    try:
        from botocore.session import Session  # type: ignore[import-untyped]
    except ImportError:
        return {}
    found = Session().get_credentials()

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }

    return {} if found is None else {"credential_provider": provide}


def _check_encoding(path: str, encoding: str) -> None:
    """Check an answer with a weak ETag. If a proxy encoded it, its bytes are not the object's. An
    object that was stored with an encoding has a strong ETag, and its bytes are right."""
    if encoding != "identity":
        raise StorageError(
            f"{path} came as {encoding}, with a weak ETag: a proxy compresses what the store "
            "sends, though nobody asked for it; turn compression off in the proxy for this URL"
        )


def _without_markers(entries: list[Entry]) -> list[Entry]:
    """Without the objects "folder/" of 0 bytes that consoles and Hadoop create for folders. obstore
    drops their "/"."""
    if all(entry.size for entry in entries):
        return entries
    folders = set()
    for entry in entries:
        folder = entry.path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return [entry for entry in entries if entry.size or entry.path not in folders]


def _entry(meta: Any) -> Entry:
    tag = without_weakness(meta["e_tag"] or "")
    if tag and not tag.startswith('"'):
        tag = f'"{tag}"'  # some listings (Azure's) leave out the quotes that answers to a read have
    version = tag or f"{meta['last_modified'].timestamp()}-{meta['size']}"
    return Entry(meta["path"], meta["size"], version)
