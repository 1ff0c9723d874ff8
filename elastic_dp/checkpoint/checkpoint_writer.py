"""Parts aside, then the commit record: one small conditional write makes a checkpoint of what lies
there.

- Every member writes its share of the parts; who wrote what does not show in them. A member that is
  lost leaves its parts to others: each has the whole state.
- A commit record is written only when every part was, and only when all members hold the same
  state, by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from elastic_dp.checkpoint.catalog import Catalog, CommitName, part_path
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord, Manifest
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.errors import LeaseLost, StateError


@dataclass(frozen=True)
class Share:
    """What one member tells the committer: the state that it holds, and the numbers of the parts
    that it has written."""

    writer: str
    step: int
    digest: str
    parts: tuple[int, ...]


def write_share(
    catalog: Catalog,
    snapshot: Snapshot,
    rank: int,
    world_size: int,
    executor: Executor,
    *,
    writer: str = "",
) -> Share:
    """Write one of `world_size` shares of the snapshot. Written again it gives the same objects."""
    manifest = snapshot.manifest(executor)
    numbers = manifest.layout.share(rank, world_size)
    return write_parts(catalog, snapshot, numbers, executor, writer=writer or str(rank))


def write_parts(
    catalog: Catalog,
    snapshot: Snapshot,
    numbers: Iterable[int],
    executor: Executor,
    *,
    writer: str = "",
) -> Share:
    """Write these parts: the rest of a checkpoint, where one who should have is lost."""
    manifest = snapshot.manifest(executor)

    def write(number: int) -> int:
        path = part_path(catalog.folder, manifest.step, manifest.digest, number)
        catalog.store.write(path, snapshot.part(manifest.layout.parts[number]))
        return number

    return Share(writer, manifest.step, manifest.digest, tuple(executor.map(write, numbers)))


def missing(manifest: Manifest, shares: Iterable[Share]) -> list[int]:
    """The parts that nobody has written yet."""
    written = {number for share in shares for number in share.parts}
    return [part.number for part in manifest.layout.parts if part.number not in written]


def write_commit(
    catalog: Catalog,
    manifest: Manifest,
    shares: Sequence[Share],
    fence: int,
    metadata: CommitMetadata,
) -> CommitRecord:
    """Make it a checkpoint. Raises StateError if the members' states differ, LeaseLost if the run
    is another's.

    The same state committed twice under one claim is one checkpoint; another state is refused.
    """
    odd = [share for share in shares if share.digest != manifest.digest]
    if odd:
        raise StateError(
            "the state",
            f"not the same on all members at step {manifest.step}: "
            f"{', '.join(s.writer for s in odd)} hold another "
            "one. What state= gives must follow from the steps alone (no clocks, no own "
            "random numbers)",
        )
    assert all(share.step == manifest.step for share in shares), shares
    assert not missing(manifest, shares), missing(manifest, shares)
    made = CommitRecord(manifest, fence, metadata)
    name = CommitName(manifest.step, fence)
    try:
        catalog.store.write(catalog.path(name), made.to_bytes(), create_only=True)
    except FileExistsError:
        if catalog.read(name).digest != made.digest:
            raise LeaseLost(
                f"step {manifest.step} of claim {fence} is committed already, with another "
                "state: two controllers "
                "write under one claim"
            ) from None
    return made


def differences(one: Manifest, other: Manifest) -> list[str]:
    """In what two members' states may differ: the names of the tensors with bytes in a block that
    does."""
    if one.layout != other.layout:
        return ["the tensors' names, types or shapes"]
    layout = one.layout
    differing = [i for i, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=True)) if a != b]
    found = [] if one.tree == other.tree else ["values that are not tensors"]
    for spec, at in zip(layout.specs, layout.offsets, strict=True):
        spans = (layout.block_span(block) for block in differing)
        if any(start < at + spec.nbytes and at < end for start, end in spans):
            found.append(spec.name)
    return found
