"""Writes checkpoints: first the parts, then the commit record, one small conditional write.

- Every member writes its share of the parts. The parts do not depend on which member wrote them. If
  a member is lost, others write its parts: each member holds the whole state.
- The commit record is written only after every part is, and only if all members hold the same state
  by its digest.
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
class WorkerParts:
    """What one member reports to the committer.

    `digest` is the digest of the state that it holds; `parts` are the numbers of the parts that it
    wrote.
    """

    writer: str
    step: int
    digest: str
    parts: tuple[int, ...]


def write_own_parts(
    catalog: Catalog,
    snapshot: Snapshot,
    rank: int,
    world_size: int,
    executor: Executor,
    *,
    writer: str = "",
) -> WorkerParts:
    """Writes the share of worker `rank` of `world_size`.

    Writing a share again creates the same objects with the same bytes.
    """
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
) -> WorkerParts:
    """Writes these parts, for example those that a lost member did not write."""
    manifest = snapshot.manifest(executor)

    def write(number: int) -> int:
        path = part_path(catalog.folder, manifest.step, manifest.digest, number)
        catalog.store.write(path, snapshot.part(manifest.layout.parts[number]))
        return number

    return WorkerParts(writer, manifest.step, manifest.digest, tuple(executor.map(write, numbers)))


def missing(manifest: Manifest, shares: Iterable[WorkerParts]) -> list[int]:
    """Returns the numbers of the parts that no member has written yet."""
    written = {number for share in shares for number in share.parts}
    return [part.number for part in manifest.layout.parts if part.number not in written]


def write_commit(
    catalog: Catalog,
    manifest: Manifest,
    shares: Sequence[WorkerParts],
    fence: int,
    metadata: CommitMetadata,
) -> CommitRecord:
    """Commits the checkpoint.

    Committing the same state twice under one claim gives one checkpoint; a different state is
    refused. Raises StateError if the members' states differ, and LeaseLost if another controller
    committed another state.
    """
    odd = [share for share in shares if share.digest != manifest.digest]
    if odd:
        raise StateError(
            "the state",
            f"not the same on all members at step {manifest.step}: "
            f"it differs on {', '.join(s.writer for s in odd)}. What is passed as state= must "
            "follow from the steps alone (no clocks, no random numbers of its own)",
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
                f"step {manifest.step} of claim {fence} is already committed with another "
                "state: two controllers write under one claim"
            ) from None
    return made


def differences(one: Manifest, other: Manifest) -> list[str]:
    """Returns the names of the tensors in which two members' states may differ, by their blocks."""
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
