"""Bytes of a committed checkpoint: each block read once by the group, and not a byte used that its
digest does not cover.

A group restores so: every member reads the same commit record and makes room for the line
(`Layout.total` bytes), reads its share into it with `read_share`, gives it to the others, and has
the tree by `whole_tree`. One alone calls `load`.

- Requests are whole blocks, many at once, so that latency does not count.
- What is missing, cut off, swapped or changed raises CheckpointDamaged, which names the object.
- torch is imported where tensors are made: `verify` and `missing_parts` only compare bytes.
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

IN_FLIGHT = 32  # requests for blocks at once
_CACHED_BYTES = 1 << 20  # of a file, at once: with smaller pieces threads wait for the interpreter


def read_share(
    catalog: Catalog,
    commit: CommitRecord,
    rank: int,
    world_size: int,
    line: torch.Tensor,
    executor: Executor | None = None,
) -> tuple[int, int]:
    """Read one of `world_size` shares into its place in `line`, bytes on the host. Returns the
    place, (start, end)."""
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
    """The state, its tensors on the memory of `line`, also those that were on a device: from there
    each is copied to its place at once (`device_types`)."""
    from elastic_dp.checkpoint.decoding import decode

    tensors = commit.manifest.layout.views(line)
    return decode(commit.manifest.tree, tensors, types=types, plain=plain)


def device_types(commit: CommitRecord) -> dict[str, str]:
    """The type of the device on which each tensor was, "cpu" or "cuda", by its name."""
    return {spec.name: spec.device for spec in commit.manifest.layout.specs}


def load(catalog: Catalog, commit: CommitRecord, **how: Any) -> Any:
    """The whole state, read by this process alone, each tensor in memory of its own. `how`: see
    `whole_tree`."""
    import torch

    from elastic_dp.checkpoint.decoding import decode

    line = torch.empty(commit.manifest.layout.total, dtype=torch.uint8)
    read_share(catalog, commit, 0, 1, line)
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
    """The newest checkpoint that is whole; each that is not is told. With a step, or "best", that
    one or none."""
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
    """Those whose commit records can be read; the others are told. Raises CheckpointError where no
    more are to be had."""
    names = catalog.names()
    for name in reversed(names):
        try:
            yield catalog.read(name)
        except CheckpointDamaged as error:
            on_damage(error)
    if not names:
        catalog.find()  # which says that there is none
    raise CheckpointError(f"none of the {len(names)} checkpoints of {catalog.store.url} is whole")


def missing_parts(catalog: Catalog, commit: CommitRecord) -> list[str]:
    """What is wrong with the parts as far as a listing tells: names and sizes. Cheap, to choose a
    checkpoint by."""
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
    """Read everything, headers too; what is wrong, or nothing."""
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
    """Straight into its place, and its digest, taken while it is in the cache. "" if it could not
    be read like that: then the store is asked, which tries again and says what is wrong."""
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
    """For the other end of a named pipe, if that is what has the name of a file."""
    return os.open(path, flags | os.O_NONBLOCK)


def _threads(catalog: Catalog, block_bytes: int) -> int:
    """Local files wait for processors, everything else for answers."""
    local = catalog.store.local_path(catalog.folder) is not None
    return min(IN_FLIGHT, (os.cpu_count() or 1)) if local else IN_FLIGHT


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 3)[1:])
