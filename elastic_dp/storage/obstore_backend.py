"""s3, gs, az and http(s) through obstore: half the CPU of the fsspec file systems, and no event
loop to share.

The options are those of s3fs, gcsfs and adlfs, put into obstore's words; one that has no such word
makes `open_obstore` return None, and the fsspec file system takes over. obstore's own retries are
off: `Store` counts them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from elastic_dp.errors import StorageError
from elastic_dp.storage.backend import (
    SLOWEST_BYTES_PER_S,
    Backend,
    Entry,
    FolderListing,
    without_weakness,
)
from elastic_dp.storage.error_classes import Kind, fault_of
from elastic_dp.storage.option_names import AZURE, GOOGLE, IGNORED, KIND, S3

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LISTED_AT_ONCE = 1000
_WHOLE_OBJECT_BYTES = 1 << 30  # taken for its size where that is not known before
# Requests of up to this many bytes share one client, with its connections and its limit of time;
# those of up to _CLASS_FACTOR times as many share the next one, and so on.
_READ_CLASS_BYTES = 16 << 20
_WRITE_CLASS_BYTES = 1 << 20
_CLASS_FACTOR = 16


class ObstoreBackend:
    """`make(client_options, retry_config)` makes the obstore store; one is kept per size of
    request."""

    def __init__(self, make: Callable[..., Any], path: str, *, lists: bool, stall_s: float) -> None:
        import obstore

        self._obstore, self._make, self._stall_s = obstore, make, stall_s
        self.path, self.lists, self.creates_only = path, lists, lists
        self.other: Callable[[], Backend] | None = None  # lists what obstore cannot
        self._clients: dict[tuple[int, bool], Any] = {}
        self._client(0)  # so that a bad option is an error now

    def find(self, folder: str, deep: bool) -> list[Entry]:
        try:
            return self._find(folder, deep)
        except self._obstore.exceptions.InvalidPathError:
            return self._look_by_other(folder, deep).entries

    def look(self, folder: str, deep: bool) -> FolderListing:
        try:
            if deep:
                return FolderListing(_without_markers(self._find(folder, deep)), [], {})
            prefix = folder.strip("/") or None
            found = self._obstore.list_with_delimiter(self._client(0), prefix)
        except self._obstore.exceptions.InvalidPathError:
            return self._look_by_other(folder, deep)
        entries = [_entry(meta) for meta in found["objects"]]
        return FolderListing(entries, list(found["common_prefixes"]), {})

    def _find(self, folder: str, deep: bool) -> list[Entry]:
        prefix = folder.strip("/") or None
        if not deep:
            listed = self._obstore.list_with_delimiter(self._client(0), prefix)["objects"]
            return [_entry(meta) for meta in listed]
        stream = self._obstore.list(self._client(0), prefix, chunk_size=_LISTED_AT_ONCE)
        return [_entry(meta) for chunk in stream for meta in chunk]

    def _look_by_other(self, folder: str, deep: bool) -> FolderListing:
        """obstore lists nothing at all where one key is not a path to it ("a//b", "a/../b")."""
        assert self.other is not None
        other = self.other()
        bucket = other.path.rstrip("/").removesuffix(self.path.rstrip("/")).rstrip("/") + "/"
        found = other.look(f"{bucket}{folder}", deep)
        entries = [entry._replace(path=entry.path.removeprefix(bucket)) for entry in found.entries]
        folders = [path.removeprefix(bucket) for path in found.folders]
        unreadable = {
            reason: [path.removeprefix(bucket) for path in paths]
            for reason, paths in found.unreadable.items()
        }
        return FolderListing(entries, folders, unreadable)

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

    def local_path(self, path: str) -> str | None:
        return None

    def _client(self, size: int, writing: bool = False) -> Any:
        """With a limit on the whole request for its size, and on the time without a byte.

        The second does not fit an upload: what it waits for is the answer, which comes last.
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
) -> ObstoreBackend | None:
    """None where obstore is missing or cannot be told what the options say."""
    try:
        from obstore import store
    except ImportError:
        return None
    parts = urlsplit(url.replace("?", "%3F") if not scheme.startswith("http") else url)
    path = unquote(parts.path).lstrip("/") if scheme.startswith("http") else url.split("://", 1)[1]
    if scheme in ("http", "https"):
        if options or parts.query or "@" in parts.netloc:
            return None
        root = f"{scheme}://{parts.netloc}"
        return ObstoreBackend(
            lambda **kw: store.HTTPStore(root, **kw), path, lists=False, stall_s=stall_s
        )
    host, _, path = path.partition("/")
    config = _TRANSLATIONS[scheme](host, options)
    if config is None:
        return None
    cls = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[KIND[scheme]]
    bucket = host.partition("@")[0]
    return ObstoreBackend(
        lambda **kw: cls(bucket, config=config, **kw), path, lists=True, stall_s=stall_s
    )


def _s3(host: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if only botocore finds the credentials: obstore does not read its files."""
    flat = {**options, **(options.get("client_kwargs") or {})}
    flat.pop("client_kwargs", None)
    config = _translate(S3, flat)
    if config is not None:
        _check_endpoint(config.get("endpoint", _endpoint_of_environment()))
    named = config and ("access_key_id" in config or config.get("skip_signature"))
    if not named and "AWS_ACCESS_KEY_ID" not in os.environ and _botocore_files():
        return None
    return config


def _endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")


def _check_endpoint(endpoint: Any) -> None:
    if endpoint is None or re.fullmatch(r"https?://[^\s/]\S*", str(endpoint), re.IGNORECASE):
        return
    shown = str(endpoint).rpartition("@")[2]  # what is before it may be secret
    raise StorageError(
        f"endpoint_url is {shown!r}, must be a URL with its scheme, as 'http://minio:9000'"
    )


def _gs(host: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    token = options.get("token")
    rest = _translate(GOOGLE, {name: value for name, value in options.items() if name != "token"})
    if rest is None or token in (None, "google_default"):
        return rest
    if token == "anon":
        return {**rest, "skip_signature": True}
    if isinstance(token, Mapping):
        return {**rest, "service_account_key": json.dumps(dict(token))}
    if isinstance(token, str) and token.endswith(".json"):
        return {**rest, "service_account": token}
    return None


def _az(host: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    options = dict(options)
    said = _connection_string(options.pop("connection_string", None))
    config = None if said is None else _translate(AZURE, {**said, **options})
    account = host.partition("@")[2].partition(".")[0]
    return {"account_name": account, **config} if account and config is not None else config


def _connection_string(text: str | None) -> dict[str, str] | None:
    """ "AccountName=…;AccountKey=…;BlobEndpoint=…" as options; None if it names no account."""
    if text is None:
        return {}
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    suffix = parts.get("EndpointSuffix", "")
    protocol = parts.get("DefaultEndpointsProtocol", "https")
    if suffix and "BlobEndpoint" not in parts and "AccountName" in parts:
        parts["BlobEndpoint"] = f"{protocol}://{parts['AccountName']}.blob.{suffix}"
    words = {
        **{"AccountName": "account_name", "AccountKey": "account_key"},
        **{"BlobEndpoint": "endpoint", "SharedAccessSignature": "sas_token"},
    }
    if not parts.keys() & {"AccountName", "BlobEndpoint"}:
        return None
    return {word: parts[name].rstrip("/") for name, word in words.items() if name in parts}


def _translate(words: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any] | None:
    wanted = {k: v for k, v in options.items() if v is not None and k not in IGNORED}
    if any(name not in words for name in wanted):
        return None
    return {words[name]: value for name, value in wanted.items()}


def _botocore_files() -> bool:
    named = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return "AWS_PROFILE" in os.environ or Path(named).expanduser().exists()


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


_TRANSLATIONS = {scheme: {"s3": _s3, "gs": _gs, "az": _az}[kind] for scheme, kind in KIND.items()}
SCHEMES = {*KIND, "http", "https"}
