"""Writes the rows of an iterable as shards, once, and finds them again.

    FOLDER/rows-0f3a…/part-00000.parquet, …    the shards of one attempt
    FOLDER/rows.json                           names the attempt that is complete

`rows.json` is only ever created. So of two drivers that write at once one wins, and the other uses
what that one has written. An attempt that it does not name is not read; it is deleted after another
one has won, when it can no longer do so. A crash leaves an attempt behind until then.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_dp.config import DataConfig, IterableData
from elastic_dp.data.discovery.listing import INCOMPLETE
from elastic_dp.dataprep.write_shards import NoRows, write_shards
from elastic_dp.errors import DataError, RunMismatch
from elastic_dp.materialization.item_columns import ItemColumns
from elastic_dp.storage import Entry, StorageURL, Store, redact_url
from elastic_dp.storage.json_files import make, path_in, read_json, write_json

FORMAT = 1
IN_RUN = "rows"  # the folder in that of a run
_COMMITTED = "rows.json"
_FIRST_SAID = 100_000  # rows; then twice as many, and so on
_ATTEMPT = re.compile(r"rows-[0-9a-f]{16}")
_WAY_OUT = "Delete the folder that it is in, and start again: the rows are written anew"

Say = Callable[[str], None]


@dataclass(frozen=True)
class MaterializedRows:
    """What `rows.json` says. `attempt`: the name of the folder of the shards."""

    fingerprint: str
    attempt: str
    rows: int
    shards: int
    nbytes: int


def materialized(data: IterableData, run_url: StorageURL, say: Say) -> DataConfig:
    """Writes the rows, unless they are there, and returns the data of their shards.

    Raises RunMismatch if the folder holds rows of another fingerprint; DataError if an item cannot
    be a row, if there are too many or none, or if a shard is gone; StorageError; and what the
    iterable raises.
    """
    folder = (
        StorageURL(f"{run_url.rstrip('/')}/{IN_RUN}", run_url.options)
        if data.folder is None
        else StorageURL(data.folder.rstrip("/"), data.storage_options)
    )
    store = Store(folder)
    found = _found(store)
    if found is None:
        found = _write(data, folder, store, say)
    else:
        say(f"reading {_said(found)} of {redact_url(folder)}, written before")
    if found.fingerprint != data.fingerprint:
        raise RunMismatch(
            f"IterableData.fingerprint is {data.fingerprint!r}, but the rows at "
            f"{redact_url(folder)} were written with {found.fingerprint!r}. Use a new name= for a "
            "new run (or a new folder, if you set it), or the old value to train on those rows"
        )
    _check(store, found)
    return data.read_from(f"{folder}/{found.attempt}", folder.options or None)


def _found(store: Store) -> MaterializedRows | None:
    stored = read_json(store, _COMMITTED, FORMAT, _WAY_OUT)
    where = f"{store.url}/{_COMMITTED}"
    return None if stored is None else make(MaterializedRows, stored, where, _WAY_OUT)


def _write(data: IterableData, folder: StorageURL, store: Store, say: Say) -> MaterializedRows:
    attempt = f"rows-{secrets.token_hex(8)}"
    what = f"the rows of {_name(data.dataset)}"
    say(f"writing {what} to {redact_url(folder)}, once, before training starts")
    made = _write_shards(data, f"{folder}/{attempt}", folder.options, attempt, say)
    try:
        write_json(store, _COMMITTED, asdict(made), FORMAT, create_only=True)
    except FileExistsError:  # another driver was first
        _delete(store, {attempt})
        won = _found(store)
        assert won is not None, "rows.json is never deleted by us"
        say(f"another driver has written {_said(won)} to {redact_url(folder)} meanwhile: using it")
        return won
    say(f"wrote {_said(made)} to {redact_url(folder)}")
    _delete(store, _attempts(store).keys() - {attempt})
    return made


def _write_shards(
    data: IterableData, url: str, options: Mapping[str, Any], attempt: str, say: Say
) -> MaterializedRows:
    batches = ItemColumns().batches(_counted(data, say))
    try:
        done = write_shards(batches, url, storage_options=options)
    except NoRows:
        raise DataError(f"IterableData.dataset ({_name(data.dataset)}) gives no row") from None
    return MaterializedRows(data.fingerprint, attempt, done.rows, done.shards, done.nbytes)


def _counted(data: IterableData, say: Say) -> Iterator[Any]:
    rows, said = 0, _FIRST_SAID
    try:
        for item in data:
            yield item
            rows += 1
            if rows == said:
                say(f"{rows:,} rows so far")
                said *= 2
    except GeneratorExit:
        raise
    except Exception as error:  # user code may raise anything; it goes on to the user
        if not isinstance(error, DataError):
            error.add_note(
                f"IterableData.dataset ({_name(data.dataset)}) raised this after {rows:,} rows, "
                "before training started; nothing was kept"
            )
        raise


def _check(store: Store, found: MaterializedRows) -> None:
    """Raises DataError if shards are gone, or have other sizes."""
    there = [e for e in _attempts(store).get(found.attempt, []) if not e.path.endswith(INCOMPLETE)]
    nbytes = sum(entry.size for entry in there)
    if (len(there), nbytes) != (found.shards, found.nbytes):
        raise DataError(
            f"{store.url}/{found.attempt} has {len(there)} files of {nbytes:,} bytes together, and "
            f"{found.shards} of {found.nbytes:,} bytes were written. {_WAY_OUT}"
        )


def _attempts(store: Store) -> dict[str, list[Entry]]:
    """The files of all attempts, by name."""
    found: dict[str, list[Entry]] = {}
    start = len(path_in(store, ""))
    for entry in store.look(store.path, deep=True).entries:
        first, _, rest = entry.path[start:].partition("/")
        if rest and (name := _ATTEMPT.fullmatch(first)):
            found.setdefault(name[0], []).append(entry)
    return found


def _delete(store: Store, names: set[str]) -> None:
    attempts = _attempts(store)
    for name in names:
        for entry in attempts.get(name, []):
            store.delete(entry.path)


def _said(found: MaterializedRows) -> str:
    return (
        f"{found.rows:,} {'row' if found.rows == 1 else 'rows'} "
        f"({found.nbytes:,} bytes, fingerprint {found.fingerprint!r})"
    )


def _name(dataset: Any) -> str:
    return str(getattr(dataset, "__qualname__", type(dataset).__qualname__))
