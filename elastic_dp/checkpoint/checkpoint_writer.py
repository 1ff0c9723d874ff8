"""Writes checkpoints: first the parts, then the commit record, one small conditional write.

- Every member writes its share of the parts. The parts do not depend on which member wrote them. If
  a member is lost, others write its parts: each member holds the whole state.
- Of a sharded optimizer's state each member holds some units only (state_units.py). One of the two
  members that hold a unit writes it, and the other one if that is lost.
- The commit record is written only after every part and every unit is, and only if all members hold
  the same state by its digest, and both holders of a unit the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog, CommitName, part_path, units_path
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord, Manifest
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.checkpoint.state_units import UnitFile, UnitPlace, UnitTable
from elastic_dp.checkpoint.unit_snapshot import UnitSnapshot
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


@dataclass(frozen=True)
class WorkerUnits:
    """What one member reports about units. The checkpoint has `total` of them.

    `held` are the files of those that the member holds, and `planned` says who is to write each of
    these files. `written` has the names of those that the member wrote.
    """

    total: int
    held: tuple[UnitFile, ...]
    planned: tuple[str, ...]
    written: frozenset[str]


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
        path = part_path(catalog.folder, manifest, number)
        catalog.store.write(path, snapshot.part(manifest.layout.parts[number]))
        return number

    return WorkerParts(writer, manifest.step, manifest.digest, tuple(executor.map(write, numbers)))


def write_units(
    catalog: Catalog,
    manifest: Manifest,
    snapshot: UnitSnapshot,
    executor: Executor,
    *,
    writer: str,
    names: Collection[str] | None = None,
) -> WorkerUnits:
    """Writes the files of units that `writer` is to write, or those with these names.

    `manifest` is that of the state without units. Writing a file again creates the same object with
    the same bytes.
    """
    files = snapshot.files(executor)
    mine = [
        file
        for planned, file in files
        if (planned == writer if names is None else file.name in names)
    ]

    def write(file: UnitFile) -> str:
        path = units_path(catalog.folder, manifest, file)
        catalog.store.write(path, snapshot.content(file))
        return file.name

    written = frozenset(executor.map(write, mine))
    held, planned = tuple(file for _, file in files), tuple(planned for planned, _ in files)
    return WorkerUnits(snapshot.total, held, planned, written)


def written_files(reports: Iterable[WorkerUnits]) -> dict[str, UnitFile]:
    """Returns the files of units that some member has written, by name."""
    found = {file.name: file for one in reports for file in one.held if file.name in one.written}
    return dict(sorted(found.items()))


def all_units_are_written(reports: Collection[WorkerUnits]) -> bool:
    """Returns whether each unit is in a file that is written."""
    places = {unit.place for file in written_files(reports).values() for unit in file.units}
    return all(len(places) == one.total for one in reports)


def unit_table(reports: Collection[WorkerUnits]) -> UnitTable:
    """Returns the table of a checkpoint whose units are all written."""
    files, places = [], set[UnitPlace]()
    for file in written_files(reports).values():
        theirs = {unit.place for unit in file.units}
        if not theirs <= places:  # else members of another generation wrote its units, too
            files.append(file)
            places |= theirs
    return UnitTable(tuple(files))


def units_that_differ(reports: Mapping[str, Iterable[WorkerUnits]]) -> list[str]:
    """Returns the members that hold other bytes of a unit than another member."""
    holders: dict[UnitPlace, dict[str, set[str]]] = {}
    for worker, told in reports.items():
        for file in (file for one in told for file in one.held):
            for unit in file.units:
                by_digest = holders.setdefault(unit.place, {})
                by_digest.setdefault(unit.kind.text + unit.digest, set()).add(worker)
    odd = [by_digest for by_digest in holders.values() if len(by_digest) > 1]
    return sorted({worker for one in odd for workers in one.values() for worker in workers})


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
    units: Mapping[str, Sequence[WorkerUnits]] | None = None,
) -> CommitRecord:
    """Commits the checkpoint. `units` is what members reported about units, by member.

    Committing the same state twice under one claim gives one checkpoint; a different state is
    refused. Raises StateError if two members hold different bytes of a unit, and LeaseLost if
    another controller committed another state.
    """
    assert all(share.digest == manifest.digest_without_units for share in shares), shares
    assert all(share.step == manifest.step for share in shares), shares
    assert not missing(manifest, shares), missing(manifest, shares)
    if units is not None:
        if differing := units_that_differ(units):
            raise StateError(
                "the optimizer's state",
                f"not the same on the two members that hold a part of it at step {manifest.step}: "
                f"it differs on {', '.join(differing)}",
            )
        reports = [one for told in units.values() for one in told]
        assert all_units_are_written(reports)
        manifest = replace(manifest, units=unit_table(reports))
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


def join_parts(
    catalog: Catalog, written: Iterable[tuple[Manifest, WorkerParts]]
) -> tuple[Manifest, WorkerParts] | None:
    """Makes one checkpoint of parts that members with different states have written, each part as
    one of them has it. Returns None unless each part is written and the layouts are equal.

    What is equal on all members, as the weights are, is whole in it.
    """
    sources: dict[int, Manifest] = {}
    writer, step = "", 0
    for manifest, share in written:
        sources |= dict.fromkeys(share.parts, manifest)
        writer, step = share.writer, share.step
    first = next(iter(sources.values()), None)
    if first is None or any(one.layout != first.layout for one in sources.values()):
        return None
    layout = first.layout
    if len(sources) < len(layout.parts):
        return None
    per_part = layout.part_bytes // layout.block_bytes
    blocks = tuple(sources[n // per_part].blocks[n] for n in range(layout.blocks))
    made = replace(first, blocks=blocks)
    for number, source in sources.items():
        path = part_path(catalog.folder, source, number)
        content = catalog.store.read(path, 0, layout.parts[number].nbytes)
        catalog.store.write(part_path(catalog.folder, made, number), content)
    return made, WorkerParts(writer, step, made.digest, tuple(sorted(sources)))


def differences(one: Manifest, other: Manifest, tensors: Sequence[Sequence[str]] = ()) -> list[str]:
    """Returns the paths of values and tensors in which two members' states differ.

    `tensors` are the digests of all tensors of both. Without them, the tensors are those in blocks
    that differ.
    """
    found = sorted(_differing_values(one.tree, other.tree, ""))
    if one.layout != other.layout:
        return found or ["the tensors' names, types or shapes"]
    layout = one.layout
    if tensors:
        pairs = zip(layout.specs, *tensors, strict=True)
        return [*found, *(spec.name for spec, mine, theirs in pairs if mine != theirs)]
    differing = [i for i, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=True)) if a != b]
    for spec, at in zip(layout.specs, layout.offsets, strict=True):
        spans = (layout.block_span(block) for block in differing)
        if any(start < at + spec.nbytes and at < end for start, end in spans):
            found.append(spec.name)
    return found


def _differing_values(one: Any, other: Any, path: str) -> Iterator[str]:
    """Yields the paths of values that differ in two encoded trees, each with both values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            below = path if key == "v" and "$" in one else f"{path}.{key}".lstrip(".")
            yield from _differing_values(one[key], other[key], below)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differing_values(a, b, f"{path}.{i}")
    elif one != other:
        yield f"{path} ({str(one)[:40]} and {str(other)[:40]})"
