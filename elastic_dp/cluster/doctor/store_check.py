"""Tries a store as a run uses it: objects are written, listed, read and deleted, and created by one
writer only.

A run needs no compare-and-swap: its lease and its checkpoints are committed by objects that may be
created once (`create_only`). Readers need that a version (an ETag, or a time and size) changes with
the content, so that a file which was rewritten meanwhile is noticed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic_dp.checkpoint.storage_probe import probe
from elastic_dp.cluster.doctor.check_result import CheckResult, fails, ok, warning
from elastic_dp.errors import ElasticError, StorageError
from elastic_dp.storage import ObjectRewritten, StorageURL, Store, redact_url
from elastic_dp.storage.json_files import path_in

LARGE_BYTES = 32 << 20
_SMALL_WRITES = 5
_WRITERS = 8
_TIMEOUT_S = 30.0
SLOW_WRITE_S = 1.0  # of a few bytes; a commit takes several of them
SLOW_BYTES_PER_S = 10e6
_OTHER = "use a folder that all nodes share, or s3://, gs://, az://, as storage_path"


def check_store(url: StorageURL, token: str) -> list[CheckResult]:
    """Return the checks of a storage path. Objects are written below `doctor-TOKEN/` there, and
    deleted again.
    """
    where = redact_url(url)
    folder = StorageURL(f"{url.rstrip('/')}/doctor-{token}", url.options)
    try:
        store = Store(folder, timeout_s=_TIMEOUT_S)
        return _check(store, token)
    except (ElasticError, OSError) as error:
        text = f"{where} cannot be used: {error}"
        return [fails("store", text, "see that the path exists and that the credentials may write")]


def read_by_another(url: StorageURL, path_of_token: str) -> str:
    """Return the text of an object that another machine has written, or "" if it is not there."""
    store = Store(url, timeout_s=_TIMEOUT_S)
    found = path_in(store, path_of_token)
    return "" if store.look_up(found) is None else bytes(store.read_all(found)).decode()


# ---------------------------------------------------------------------------------- private


def _check(store: Store, token: str) -> list[CheckResult]:
    try:
        return [
            _conditional_writes(store, token),
            _object_versions(store),
            *_speed(store),
            _deletes(store),
        ]
    finally:
        with contextlib.suppress(ElasticError, OSError):
            _delete_all(store)
        _remove_empty_folders(store)


def _conditional_writes(store: Store, token: str) -> CheckResult:
    """One of several writers at once creates an object, and all others are refused."""
    check = "conditional writes"
    try:
        probe(store, token)
    except StorageError as error:
        return fails(check, str(error), _OTHER)
    path = path_in(store, "race")
    contents = [f"{token} {number}".encode() for number in range(_WRITERS)]
    with ThreadPoolExecutor(_WRITERS) as pool:
        created = list(pool.map(lambda content: _creates(store, path, content), contents))
    winners = [content for content, won in zip(contents, created, strict=True) if won]
    if len(winners) != 1 or bytes(store.read_all(path)) != winners[0]:
        text = f"{len(winners)} of {_WRITERS} writers at once created one object"
        return fails(check, text, _OTHER)
    return ok(check, f"of {_WRITERS} writers at once, one created the object")


def _creates(store: Store, path: str, content: bytes) -> bool:
    try:
        store.write(path, content, create_only=True)
    except FileExistsError:
        return False
    return True


def _object_versions(store: Store) -> CheckResult:
    check, path = "object versions", path_in(store, "version")
    store.write(path, b"first")
    (before,) = store.find(path)
    store.write(path, b"the second")
    (after,) = store.find(path)
    if not before.version:
        text = "objects have no version: a file that is rewritten while it is read is not noticed"
        return warning(check, text, _OTHER)
    try:
        store.read(path, 0, 5, before.version)
    except ObjectRewritten:
        return ok(check, "an object that was rewritten is noticed")
    return fails(check, f"{before.version} and {after.version} were not told apart", _OTHER)


def _speed(store: Store) -> list[CheckResult]:
    took = sorted(
        _seconds(lambda i=i: store.write(path_in(store, f"small-{i}"), b"x" * 100))  # type: ignore[misc]
        for i in range(_SMALL_WRITES)
    )
    median_s = took[len(took) // 2]
    text = f"a write of 100 bytes takes {1e3 * median_s:.0f} ms"
    way_out = "a store in the region of the nodes"
    if median_s > SLOW_WRITE_S:
        results = [warning("store latency", f"{text}; a commit takes several", way_out)]
    else:
        results = [ok("store latency", text)]
    content, path = os.urandom(LARGE_BYTES), path_in(store, "large")
    wrote_s = _seconds(lambda: store.write(path, content))
    began = time.monotonic()
    back = bytes(store.read_all(path))
    read_s = time.monotonic() - began
    if back != content:
        return [*results, fails("store speed", "other bytes were read than written", _OTHER)]
    speeds = [LARGE_BYTES / max(seconds, 1e-6) for seconds in (wrote_s, read_s)]
    text = f"{speeds[0] / 1e6:.0f} MB/s written, {speeds[1] / 1e6:.0f} MB/s read, by one worker"
    if min(speeds) < SLOW_BYTES_PER_S:
        return [*results, warning("store speed", f"{text}: checkpoints will be late", way_out)]
    return [*results, ok("store speed", text)]


def _deletes(store: Store) -> CheckResult:
    took_s = _seconds(lambda: _delete_all(store))
    left = store.find(f"{store.path.rstrip('/')}/")
    if left:
        text = f"{len(left)} objects are still listed after they were deleted"
        return warning("deletes", text, "old checkpoints would stay; look at the store's policies")
    return ok("deletes", f"objects are gone when they were deleted ({took_s:.1f} s)")


def _delete_all(store: Store) -> None:
    for entry in store.find(f"{store.path.rstrip('/')}/"):
        store.delete(entry.path)


def _remove_empty_folders(store: Store) -> None:
    """A local folder stays when its files are deleted; an object store has none."""
    local = store.local_path(store.path)
    if local is not None:
        for folder, _, _ in sorted(os.walk(local), reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began
