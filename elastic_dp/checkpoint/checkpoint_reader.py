"""Reads committed checkpoints: a group reads each block once, and a digest covers every byte it
uses.

A group restores a checkpoint in four steps. Every member reads the same commit record and allocates
memory for the line (`Layout.total` bytes); reads its share into it with `read_own_range`; sends the
share to the others; and decodes the state with `whole_tree`. A process alone calls `load`.

- A request reads one whole block. Many run concurrently, which hides latency.
- A missing, truncated, swapped or changed object raises CheckpointDamaged, which names it.
- Only functions that make tensors import torch: `verify` only compares bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from elastic_dp.checkpoint.catalog import Catalog, CommitName, Keep, blob_path, step_folder
from elastic_dp.checkpoint.commit_record import CommitRecord, block_digest, block_digester
from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit, UnitKind
from elastic_dp.errors import CheckpointDamaged, CheckpointError, StorageError
from elastic_dp.storage import ObjectMissing

if TYPE_CHECKING:
    import torch

IN_FLIGHT = 32  # concurrent requests
_CACHED_BYTES = 1 << 20  # bytes per read; smaller reads make threads wait for the GIL


def read_own_range(
    catalog: Catalog,
    commit: CommitRecord,
    rank: int,
    world_size: int,
    line: torch.Tensor,
    executor: Executor | None = None,
) -> tuple[int, int]:
    """Reads the share of worker `rank` of `world_size` into its place in `line`.

    `line` is a uint8 tensor on the host with `Layout.total` elements. Returns where the share
    starts and ends in it, in bytes. Raises CheckpointDamaged.
    """
    layout = commit.manifest.layout
    assert line.numel() == layout.total and line.element_size() == 1, (line.shape, line.dtype)
    parts = layout.share(rank, world_size)
    read_blocks(catalog, commit, layout.blocks_of(parts), line, executor=executor)
    return layout.span(parts)


def whole_tree(
    commit: CommitRecord,
    line: torch.Tensor,
    *,
    plain: bool = False,
) -> Any:
    """Returns the state, whose tensors are views of `line`, also those that were on a device.

    The caller copies the latter directly from there (`device_types`). `plain`: see `decode`.
    """
    from elastic_dp.checkpoint.codec import decode

    tensors = commit.manifest.layout.views(line)
    return decode(commit.manifest.tree, tensors, plain=plain)


def device_types(commit: CommitRecord) -> dict[str, str]:
    """Returns the type of the device that each tensor was on, such as "cpu", by the tensor's
    name."""
    found = {spec.name: spec.device for spec in commit.manifest.layout.specs}
    if commit.manifest.units is not None:  # their names as `add_states` makes them
        for place, placed in commit.manifest.units.units.items():
            for spec in placed.unit.kind.specs:
                found[f"step.optimizer.{place.parameter}.{spec.name}"] = spec.device
    return found


def load(catalog: Catalog, commit: CommitRecord, *, plain: bool = False) -> Any:
    """Returns the whole state, read by this process alone. Each tensor has its own memory.

    `plain`: see `decode`. Raises CheckpointDamaged.
    """
    import torch

    from elastic_dp.checkpoint.codec import decode

    manifest = commit.manifest
    line = torch.empty(manifest.layout.total, dtype=torch.uint8)
    read_own_range(catalog, commit, 0, 1, line)
    tensors = [view.clone() for view in manifest.layout.views(line)]
    tree = decode(manifest.tree, tensors, plain=plain)
    if manifest.units is not None:
        placed = list(manifest.units.units.values())
        add_states(tree, read_states(catalog, commit, placed, plain=plain))
    return tree


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


def newest_first(
    catalog: Catalog, on_damage: Callable[[CheckpointDamaged], None]
) -> Iterator[CommitRecord]:
    """Yields the commit records that can be read, newest first.

    `on_damage` is called with the error of each one that cannot be read. Raises CheckpointError
    after the last one.
    """
    names = catalog.names()
    for name in reversed(names):
        try:
            yield catalog.read(name)
        except CheckpointDamaged as error:
            on_damage(error)
    if not names:
        catalog.find()  # raises: there is none
    raise CheckpointError(f"none of the {len(names)} checkpoints of {catalog.store.url} is whole")


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
    layout, units = commit.manifest.layout, commit.manifest.units
    reads: list[Callable[[], object]] = [
        functools.partial(_read_alone, catalog, commit, block) for block in range(layout.blocks)
    ]
    if units is not None:
        placed = units.units.values()
        reads += [functools.partial(read_unit, catalog, commit, one) for one in placed]
    with ThreadPoolExecutor(threads(catalog)) as executor:
        found = executor.map(_wrong, reads)
        return list(dict.fromkeys([*wrong, *(words for words in found if words and not wrong)]))


def _wrong(read: Callable[[], object]) -> str:
    """Returns what is wrong with what is read, or an empty text."""
    try:
        read()
    except CheckpointDamaged as error:
        return error.reason
    return ""


def _read_alone(catalog: Catalog, commit: CommitRecord, block: int) -> None:
    start, end = commit.manifest.layout.block_span(block)
    _read_block(catalog, commit, block, memoryview(bytearray(end - start)))


def read_blocks(
    catalog: Catalog,
    commit: CommitRecord,
    blocks: Iterable[int],
    line: torch.Tensor,
    first: int = 0,
    executor: Executor | None = None,
) -> None:
    """Reads blocks into their place in `line`, a uint8 tensor on the host, which is the line from
    its byte `first` on. Raises CheckpointDamaged."""
    content: Any = line.numpy()
    target = memoryview(content)

    def read(block: int) -> None:
        start, end = commit.manifest.layout.block_span(block)
        _read_block(catalog, commit, block, target[start - first : end - first])

    if executor is not None:
        list(executor.map(read, blocks))
        return
    with ThreadPoolExecutor(threads(catalog)) as made:
        list(made.map(read, blocks))


def _read_block(catalog: Catalog, commit: CommitRecord, block: int, target: memoryview) -> None:
    layout = commit.manifest.layout
    start, _ = layout.block_span(block)
    part = layout.part_of(start)
    path = blob_path(catalog.folder, commit.step, commit.manifest.part_names[part.number])
    at = len(part.header) + start - part.start
    read_range(catalog, commit, path, at, target, commit.manifest.blocks[block])


# ------------------------------------------------------------------- units of an optimizer's state


def read_unit(
    catalog: Catalog, commit: CommitRecord, placed: PlacedUnit, target: memoryview | None = None
) -> memoryview:
    """Returns the bytes of a unit, in `target` or in new memory. Raises CheckpointDamaged."""
    if target is None:
        target = memoryview(bytearray(placed.unit.kind.nbytes))
    if len(target):
        path = blob_path(catalog.folder, commit.step, placed.file.name)
        read_range(catalog, commit, path, placed.at, target, placed.unit.digest)
    return target


def read_states(
    catalog: Catalog, commit: CommitRecord, units: Sequence[PlacedUnit], *, plain: bool = False
) -> Iterator[tuple[StateUnit, dict[str, Any]]]:
    """Yields each of these units and its state. `plain`: see `decode`. Raises CheckpointDamaged."""

    def read(placed: PlacedUnit) -> dict[str, Any]:
        return state_of(placed.unit.kind, read_unit(catalog, commit, placed), plain=plain)

    with ThreadPoolExecutor(threads(catalog)) as executor:
        for placed, state in zip(units, executor.map(read, units), strict=True):
            yield placed.unit, state


def state_of(kind: UnitKind, content: memoryview, *, plain: bool = False) -> dict[str, Any]:
    """Returns the state of a unit, with tensors of their own on the host. `plain`: see `decode`."""
    import torch

    from elastic_dp.checkpoint.codec import decode

    tensors, at = [], 0
    for spec in kind.specs:
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)  # aligned, which `content` is not
        memory: Any = flat.numpy()
        memoryview(memory)[:] = content[at : at + spec.nbytes]
        tensors.append(spec.view(flat))
        at += spec.nbytes
    state: dict[str, Any] = decode(kind.tree, tensors, plain=plain)
    return state


def add_states(tree: Any, states: Iterable[tuple[StateUnit, dict[str, Any]]]) -> None:
    """Adds the states of all units to a state that has none of its optimizer."""
    import torch

    for unit, state in states:
        kind, (number, first, last) = unit.kind, unit.place
        whole = tree["step"]["optimizer"][number]
        for key, value in state.items():
            if kind.shape is None or not isinstance(value, torch.Tensor) or not value.dim():
                whole[key] = value
                continue
            assert kind.stride is not None
            if key not in whole:
                whole[key] = torch.empty_strided(kind.shape, kind.stride, dtype=value.dtype)
            in_memory = whole[key].as_strided((whole[key].numel(),), (1,))
            in_memory[first:last].copy_(value)


# ------------------------------------------------------------------------------- ranges of blobs


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
