"""Reads committed checkpoints: a group reads each block once, and a digest covers every byte it
uses.

A group restores a checkpoint in four steps. Every member reads the same commit record and allocates
memory for the line (`Layout.total` bytes); reads its share into it with `read_own_range`; sends the
share to the others; and decodes the state with `whole_tree`. A process alone calls `load`.

- A request reads one whole block. Many run concurrently, which hides latency.
- A missing, truncated, swapped or changed object raises CheckpointDamaged, which names it.
- Only functions that make tensors import torch: `verify` and `missing_parts` only compare bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from elastic_dp.checkpoint.catalog import Catalog, CommitName, Keep, part_path
from elastic_dp.checkpoint.commit_record import CommitRecord, block_digest, block_digester
from elastic_dp.errors import CheckpointDamaged, CheckpointError, StorageError
from elastic_dp.storage import ObjectMissing

if TYPE_CHECKING:
    import torch

IN_FLIGHT = 32  # concurrent requests for blocks
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
    _read_blocks(catalog, commit, layout.blocks_of(parts), line, executor)
    return layout.span(parts)


def whole_tree(
    commit: CommitRecord,
    line: torch.Tensor,
    *,
    types: Mapping[str, type] | None = None,
    plain: bool = False,
) -> Any:
    """Returns the state, whose tensors are views of `line`, also those that were on a device.

    The caller copies the latter directly from there (`device_types`). `types` and `plain`: see
    `decode`.
    """
    from elastic_dp.checkpoint.decoding import decode

    tensors = commit.manifest.layout.views(line)
    return decode(commit.manifest.tree, tensors, types=types, plain=plain)


def device_types(commit: CommitRecord) -> dict[str, str]:
    """Returns the type of the device that each tensor was on, such as "cpu", by the tensor's
    name."""
    return {spec.name: spec.device for spec in commit.manifest.layout.specs}


def load(catalog: Catalog, commit: CommitRecord, **how: Any) -> Any:
    """Returns the whole state, read by this process alone. Each tensor has its own memory.

    `how`: the arguments `types` and `plain` of `decode`. Raises CheckpointDamaged.
    """
    import torch

    from elastic_dp.checkpoint.decoding import decode

    line = torch.empty(commit.manifest.layout.total, dtype=torch.uint8)
    read_own_range(catalog, commit, 0, 1, line)
    tensors = [view.clone() for view in commit.manifest.layout.views(line)]
    return decode(commit.manifest.tree, tensors, **how)


def load_newest(
    catalog: Catalog,
    step: int | Literal["latest", "best"] = "latest",
    keep: Keep | None = None,
    *,
    on_damage: Callable[[CheckpointDamaged], None],
    **how: Any,
) -> tuple[CommitRecord, Any]:
    """Loads the newest checkpoint that is not damaged, or the one that `step` names.

    `on_damage` is called with the error of each damaged checkpoint that is skipped. If `step` is a
    number or "best", no other checkpoint is tried. Raises CheckpointDamaged, CheckpointError.
    """
    if step != "latest":
        commit = catalog.find(step, keep)
        return commit, load(catalog, commit, **how)
    for commit in newest_first(catalog, on_damage):
        try:
            return commit, load(catalog, commit, **how)
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


def missing_parts(catalog: Catalog, commit: CommitRecord) -> list[str]:
    """Returns what is wrong with the names and sizes of the parts in a listing.

    It reads no part, so it is cheap enough to choose a checkpoint by.
    """
    folder = part_path(catalog.folder, commit.step, commit.digest, 0).rpartition("/")[0]
    sizes = {
        entry.path.rpartition("/")[2]: entry.size for entry in catalog.store.find(f"{folder}/")
    }
    wrong = []
    for part in commit.manifest.layout.parts:
        name = part_path("", commit.step, commit.digest, part.number).rpartition("/")[2]
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != part.nbytes:
            wrong.append(f"{name} has {sizes[name]} bytes, not {part.nbytes}")
    return wrong


def verify(catalog: Catalog, name: CommitName) -> list[str]:
    """Reads a whole checkpoint, headers included, and returns what is wrong: an empty list if
    nothing is."""
    try:
        commit = catalog.read(name)
    except CheckpointDamaged as error:
        return [error.reason]
    wrong = missing_parts(catalog, commit)
    layout = commit.manifest.layout
    for part in layout.parts:
        path = part_path(catalog.folder, commit.step, commit.digest, part.number)
        try:
            header = catalog.store.read(path, 0, len(part.header))
            if bytes(header) != part.header:
                wrong.append(f"the header of {_short(path)} was changed")
        except StorageError as error:
            wrong += [] if wrong else [str(error)]
    with ThreadPoolExecutor(_threads(catalog, layout.block_bytes)) as executor:
        found = executor.map(lambda block: _wrong(catalog, commit, block), range(layout.blocks))
        return list(dict.fromkeys([*wrong, *(words for words in found if words and not wrong)]))


def _wrong(catalog: Catalog, commit: CommitRecord, block: int) -> str:
    """Returns what is wrong with a block, or an empty text."""
    start, end = commit.manifest.layout.block_span(block)
    try:
        _read_block(catalog, commit, block, memoryview(bytearray(end - start)))
    except CheckpointDamaged as error:
        return error.reason
    return ""


def _read_blocks(
    catalog: Catalog,
    commit: CommitRecord,
    blocks: Iterable[int],
    line: torch.Tensor,
    executor: Executor | None,
) -> None:
    content: Any = line.numpy()
    target = memoryview(content)

    def read(block: int) -> None:
        start, end = commit.manifest.layout.block_span(block)
        _read_block(catalog, commit, block, target[start:end])

    if executor is not None:
        list(executor.map(read, blocks))
        return
    with ThreadPoolExecutor(_threads(catalog, commit.manifest.layout.block_bytes)) as made:
        list(made.map(read, blocks))


def _read_block(catalog: Catalog, commit: CommitRecord, block: int, target: memoryview) -> None:
    layout = commit.manifest.layout
    start, end = layout.block_span(block)
    part = layout.part_of(start)
    path = part_path(catalog.folder, commit.step, commit.digest, part.number)
    at = len(part.header) + start - part.start
    local = catalog.store.local_path(path)
    if local is not None and _read_file(local, at, target) == commit.manifest.blocks[block]:
        return
    try:
        content = catalog.store.read(path, at, at + end - start)
    except ObjectMissing:
        raise CheckpointDamaged(commit.step, f"{_short(path)} is missing") from None
    except StorageError:
        wrong = missing_parts(catalog, commit)
        if not wrong:
            raise
        raise CheckpointDamaged(commit.step, "; ".join(wrong)) from None
    target[:] = memoryview(content).cast("B")
    if block_digest(target) != commit.manifest.blocks[block]:
        raise CheckpointDamaged(
            commit.step,
            f"{_short(path)}: bytes {at} to {at + end - start} are not those that were committed",
        )


def _read_file(path: str, at: int, target: memoryview) -> str:
    """Reads a block straight into `target` and returns its digest, computed while the data is in
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


def _threads(catalog: Catalog, block_bytes: int) -> int:
    """Returns the number of threads: reading local files is CPU-bound, everything else waits for
    answers."""
    local = catalog.store.local_path(catalog.folder) is not None
    return min(IN_FLIGHT, (os.cpu_count() or 1)) if local else IN_FLIGHT


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 3)[1:])
