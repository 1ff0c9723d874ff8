"""The files of a committed checkpoint: which ones there are to be, and ranges of their bytes with
digests.

A missing, truncated, swapped or changed object raises CheckpointDamaged, which names it.
"""

from __future__ import annotations

import os

from elastic_dp.checkpoint.catalog import Catalog, blob_path, step_folder
from elastic_dp.checkpoint.commit_record import CommitRecord, block_digest, block_digester
from elastic_dp.errors import CheckpointDamaged, StorageError
from elastic_dp.storage import ObjectMissing

IN_FLIGHT = 32  # concurrent requests
_CACHED_BYTES = 1 << 20  # bytes per read; smaller reads make threads wait for the GIL


def missing_files(catalog: Catalog, commit: CommitRecord) -> list[str]:
    """Returns what is wrong with the names and sizes of the files in a listing.

    It reads no file, so it is cheap enough to choose a checkpoint by.
    """
    entries = catalog.store.find(f"{step_folder(catalog.folder, commit.step)}/")
    sizes = {entry.path: entry.size for entry in entries}
    wrong = []
    for name, (_, nbytes) in commit.manifest.headers.items():
        path = blob_path(catalog.folder, commit.step, name)
        if path not in sizes:
            wrong.append(f"{short(path)} is missing")
        elif sizes[path] != nbytes:
            wrong.append(f"{short(path)} has {sizes[path]} bytes, not {nbytes}")
    return wrong


def read_range(
    catalog: Catalog, commit: CommitRecord, path: str, at: int, target: memoryview, digest: str
) -> None:
    """Reads the bytes from `at` on into `target`, and compares their digest. Raises
    CheckpointDamaged."""
    local = catalog.store.local_path(path)
    if local is not None and _read_file(local, at, target) == digest:
        return
    try:
        content = catalog.store.read(path, at, at + len(target))
    except ObjectMissing:
        raise CheckpointDamaged(commit.step, f"{short(path)} is missing") from None
    except StorageError:
        wrong = missing_files(catalog, commit)
        if not wrong:
            raise
        raise CheckpointDamaged(commit.step, "; ".join(wrong)) from None
    target[:] = memoryview(content).cast("B")
    if block_digest(target) != digest:
        raise CheckpointDamaged(
            commit.step,
            f"{short(path)}: bytes {at} to {at + len(target)} are not those that were committed",
        )


def _read_file(path: str, at: int, target: memoryview) -> str:
    """Reads a range straight into `target` and returns its digest, computed while the data is in
    the cache.

    Returns "" if that fails. Then the caller reads through the store, which retries and reports
    errors.
    """
    digest = block_digester()
    try:
        with open(path, "rb", buffering=0, opener=_without_waiting) as file:
            file.seek(at)
            for i in range(0, len(target), _CACHED_BYTES):
                piece = target[i : i + _CACHED_BYTES]
                if file.readinto(piece) != len(piece):
                    return ""
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without waiting for the other end, in case it is a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def threads(catalog: Catalog) -> int:
    """Returns the number of threads: reading local files is CPU-bound, everything else waits for
    answers."""
    local = catalog.store.local_path(catalog.folder) is not None
    return min(IN_FLIGHT, (os.cpu_count() or 1)) if local else IN_FLIGHT


def short(path: str) -> str:
    """Returns the end of a path: the step and the file."""
    return "/".join(path.rsplit("/", 2)[1:])
