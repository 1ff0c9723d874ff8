"""Reads committed checkpoints: a digest covers every byte that is used.

- A request reads some units that follow each other in a blob. Many run concurrently, which hides
  latency.
- A missing, truncated, swapped or changed object raises CheckpointDamaged, which names it.
- Only functions that make tensors import torch: `verify` only compares bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elastic_dp.checkpoint.catalog import Catalog, CommitName, Keep, blob_path, step_folder
from elastic_dp.checkpoint.commit_record import (
    CommitRecord,
    Manifest,
    StateTree,
    unit_digest,
)
from elastic_dp.checkpoint.layout import MAX_UNIT_BYTES, Blob, Unit
from elastic_dp.errors import CheckpointDamaged, CheckpointError, ElasticError, StorageError
from elastic_dp.storage import ObjectMissing

if TYPE_CHECKING:
    import torch

IN_FLIGHT = 32  # concurrent requests


class Request(NamedTuple):
    """The units `first` up to `last` of a blob, which are read at once."""

    blob: Blob
    first: int
    last: int

    @property
    def units(self) -> Sequence[Unit]:
        return self.blob.units[self.first : self.last]

    @property
    def nbytes(self) -> int:
        return self.blob.offsets[self.last] - self.blob.offsets[self.first]


def requests(manifest: Manifest) -> list[Request]:
    """Returns the requests that read each unit once."""
    found: list[Request] = []
    seen = set[tuple[str, int, int]]()
    for blob in manifest.blobs:
        for number, unit in enumerate(blob.units):
            at = unit.tensor, unit.start, unit.end
            if at in seen:
                continue
            seen.add(at)
            last = found[-1] if found else None
            joins = last is not None and last.blob is blob and last.last == number
            if joins and last is not None and last.nbytes + unit.nbytes <= MAX_UNIT_BYTES:
                found[-1] = last._replace(last=number + 1)
            else:
                found.append(Request(blob, number, number + 1))
    return found


def load(catalog: Catalog, commit: CommitRecord, *, plain: bool = False) -> Any:
    """Returns the whole state, read by this process alone. Each tensor has its own memory.

    `plain`: see `decode`. Raises CheckpointDamaged.
    """
    import torch

    memory = {
        name: torch.empty(spec.nbytes, dtype=torch.uint8)
        for name, spec in commit.manifest.specs.items()
    }

    def read(request: Request) -> None:
        targets = (memory[one.tensor][one.start : one.end] for one in request.units)
        read_request(catalog, commit, request, [*targets])

    with ThreadPoolExecutor(threads(catalog)) as executor:
        list(executor.map(read, requests(commit.manifest)))
    return tree_of(commit.manifest, memory, plain=plain)


def tree_of(manifest: Manifest, memory: Mapping[str, torch.Tensor], *, plain: bool = False) -> Any:
    """Returns the state, whose tensors share `memory`, their bytes by name. `plain`: see
    `decode`."""
    from elastic_dp.checkpoint.codec import decode

    def decoded(one: StateTree) -> Any:
        tensors = [spec.view(memory[spec.name]) for spec in one.specs]
        return decode(one.tree, tensors, plain=plain)

    tree = decoded(manifest.common)
    if manifest.entries:
        tree["step"]["optimizer"] = [decoded(one) for one in manifest.entries if one is not None]
    return tree


def device_types(commit: CommitRecord) -> dict[str, str]:
    """Returns the type of the device that each tensor was on, such as "cpu", by the tensor's
    name."""
    return {name: spec.device for name, spec in commit.manifest.specs.items()}


def load_newest(
    catalog: Catalog,
    step: int | Literal["latest", "best"] = "latest",
    keep: Keep | None = None,
    *,
    on_damage: Callable[[CheckpointDamaged], None],
) -> tuple[CommitRecord, Any]:
    """Loads the newest checkpoint that is not damaged, or the one that `step` names.

    `on_damage` is called with the error of each damaged checkpoint that is skipped. If `step` is a
    number or "best", no other checkpoint is tried. Raises CheckpointDamaged, CheckpointError.
    """
    if step != "latest":
        commit = catalog.find(step, keep)
        return commit, load(catalog, commit)
    for commit in newest_first(catalog, on_damage):
        try:
            return commit, load(catalog, commit)
        except CheckpointDamaged as error:
            on_damage(error)
    raise AssertionError("newest_first ends with an error")


@contextlib.contextmanager
def taking_apart(step: int, advice: str) -> Iterator[None]:
    """Returns a context for what finds its way in the state of a checkpoint. Raises CheckpointError
    with `advice` if something is not where this package writes it."""
    try:
        yield
    except ElasticError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be read: {type(error).__name__}: {error}. "
            + advice
        ) from error


def newest_first(
    catalog: Catalog, on_damage: Callable[[CheckpointDamaged], None]
) -> Iterator[CommitRecord]:
    """Yields the commit records that can be read, newest first; see `Catalog.commits`. Raises
    CheckpointError after the last one."""
    yield from catalog.commits(on_damage)
    names = catalog.names()
    if not names:
        catalog.find()  # raises: there is none
    raise CheckpointError(
        f"none of the {len(names)} checkpoints of {catalog.store.url} is whole: restore the "
        "folder, or use a new name= for a new run"
    )


def verify(catalog: Catalog, name: CommitName) -> list[str]:
    """Reads a whole checkpoint, headers included, and returns what is wrong: an empty list if
    nothing is."""
    try:
        commit = catalog.read(name)
    except CheckpointDamaged as error:
        return [error.reason]
    wrong = missing_files(catalog, commit)
    for blob, (header, _) in commit.manifest.headers.items():
        path = blob_path(catalog.folder, commit.step, blob)
        try:
            if bytes(catalog.store.read(path, 0, len(header))) != header:
                wrong.append(f"the header of {short(path)} was changed")
        except StorageError as error:
            wrong += [] if wrong else [str(error)]

    def wrong_with(request: Request) -> str:
        try:
            read_request(catalog, commit, request)
        except CheckpointDamaged as error:
            return error.reason
        return ""

    with ThreadPoolExecutor(threads(catalog)) as executor:
        found = executor.map(wrong_with, requests(commit.manifest))
        return list(dict.fromkeys([*wrong, *(words for words in found if words and not wrong)]))


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


def read_request(
    catalog: Catalog,
    commit: CommitRecord,
    request: Request,
    targets: Sequence[torch.Tensor] | None = None,
) -> None:
    """Reads units into `targets`, a uint8 tensor on the host for each, and compares their digests;
    without targets, into memory of its own. Raises CheckpointDamaged."""
    if targets is None:
        memory = memoryview(bytearray(request.nbytes))
        views, at = list[memoryview](), 0
        for unit in request.units:
            views.append(memory[at : at + unit.nbytes])
            at += unit.nbytes
    else:
        views = [memoryview(target.numpy()) for target in targets]  # type: ignore[arg-type]
    path = blob_path(catalog.folder, commit.step, request.blob.name)
    start = request.blob.offsets[request.first]
    try:
        content = memoryview(catalog.store.read(path, start, start + request.nbytes)).cast("B")
    except ObjectMissing:
        raise CheckpointDamaged(commit.step, f"{short(path)} is missing") from None
    except StorageError:
        wrong = missing_files(catalog, commit)
        if not wrong:
            raise
        raise CheckpointDamaged(commit.step, "; ".join(wrong)) from None
    at = 0
    for unit, view in zip(request.units, views, strict=True):
        view[:] = content[at : at + unit.nbytes]
        if unit_digest(view) != unit.digest:
            raise CheckpointDamaged(
                commit.step,
                f"{short(path)}: bytes {start + at} to {start + at + unit.nbytes} are not those "
                "that were committed",
            )
        at += unit.nbytes


def threads(catalog: Catalog) -> int:
    """Returns the number of threads: reading local files is CPU-bound, everything else waits for
    answers."""
    local = catalog.store.local_path(catalog.folder) is not None
    return min(IN_FLIGHT, (os.cpu_count() or 1)) if local else IN_FLIGHT


def short(path: str) -> str:
    """Returns the end of a path: the step and the file."""
    return "/".join(path.rsplit("/", 2)[1:])
