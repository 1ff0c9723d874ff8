"""Probes a store before training: checkpoints rely on it refusing to create an object twice.

Some stores and adapters ignore the condition and overwrite silently (obstore's fsspec adapter
does). The second create therefore has other content, and the probe checks that the first is still
there.
"""

from __future__ import annotations

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import path_in


def probe(store: Store, token: str) -> None:
    """Writes, lists, reads and deletes an object, and checks that it cannot be created twice.

    `token` must never have been used before. Raises StorageError if the store cannot be trusted.
    """
    path = path_in(store, f"checkpoints/trial-{token}")
    first, second = f"first {token}".encode(), f"second {token}".encode()
    store.write(path, first, create_only=True)
    try:
        _refuses(store, path, second)
        if bytes(store.read_all(path)) != first:
            raise StorageError(
                f"{store.url} refused to overwrite an object, but overwrote it. {_WAY_OUT}"
            )
        if path not in {entry.path for entry in store.find(path.rpartition("/")[0] + "/")}:
            raise StorageError(
                f"{store.url} does not list an object that was just written. {_WAY_OUT}"
            )
    finally:
        store.delete(path)


def _refuses(store: Store, path: str, content: bytes) -> None:
    try:
        store.write(path, content, create_only=True)
    except FileExistsError:
        return
    raise StorageError(
        f"{store.url} overwrites an object that was to be created only if there is none. {_WAY_OUT}"
    )


_WAY_OUT = (
    "Two controllers could commit one checkpoint there; use a folder, s3, gs or az as storage_path"
)
