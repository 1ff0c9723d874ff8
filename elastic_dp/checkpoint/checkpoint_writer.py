"""Writes checkpoints: first the blobs, then the commit record, one small conditional write.

- Each blob is to be written by one of the members that hold it, and by another one if that is lost.
  All members hold the parts; two hold each unit of a sharded optimizer's state (state_units.py).
  A blob does not depend on which member writes it.
- The commit record is written only after every part and every unit is, and only if all members hold
  the same state by its digest, and both holders of a unit the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog, CommitName, blob_path
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord, Manifest
from elastic_dp.checkpoint.snapshot import Snapshot, UnitSnapshot
from elastic_dp.checkpoint.state_units import UnitFile, UnitPlace, UnitTable
from elastic_dp.errors import LeaseLost, StateError


@dataclass(frozen=True)
class WorkerBlobs:
    """What one member reports to the committer about the blobs of a checkpoint.

    `digest` is that of the state that it holds. `planned` says who is to write each blob that the
    member holds, by name, and `written` has the names of those that it wrote. `files` are the blobs
    of units among them; the checkpoint has `total_units` units.
    """

    writer: str
    step: int
    digest: str
    planned: Mapping[str, str]
    written: frozenset[str]
    files: tuple[UnitFile, ...] = ()
    total_units: int = 0


def write_blobs(
    catalog: Catalog,
    snapshot: Snapshot,
    executor: Executor,
    *,
    writer: str,
    members: Sequence[str],
    units: UnitSnapshot | None = None,
    names: Collection[str] | None = None,
) -> WorkerBlobs:
    """Writes the blobs that `writer` is to write, or those with these names. `members` share the
    parts.

    Writing a blob again creates the same object with the same bytes.
    """
    manifest = snapshot.manifest(executor)
    layout, planned, contents = manifest.layout, dict[str, str](), dict[str, Any]()
    for rank, member in enumerate(members):
        for number in layout.share(rank, len(members)):
            name = manifest.part_names[number]
            planned[name] = member
            contents[name] = partial(snapshot.part, layout.parts[number])
    files = () if units is None else units.files(executor)
    for member, file in files:
        assert units is not None
        planned[file.name], contents[file.name] = member, partial(units.content, file)
    if names is None:
        mine = [name for name, member in planned.items() if member == writer]
    else:
        mine = [name for name in planned if name in names]

    def write(name: str) -> None:
        catalog.store.write(blob_path(catalog.folder, manifest.step, name), contents[name]())

    list(executor.map(write, mine))
    return WorkerBlobs(
        writer=writer,
        step=manifest.step,
        digest=manifest.digest,
        planned=planned,
        written=frozenset(mine),
        files=tuple(file for _, file in files),
        total_units=0 if units is None else units.total,
    )


def written_files(reports: Iterable[WorkerBlobs]) -> dict[str, UnitFile]:
    """Returns the blobs of units that some member has written, by name."""
    found = {file.name: file for one in reports for file in one.files if file.name in one.written}
    return dict(sorted(found.items()))


def owed_blobs(manifest: Manifest, reports: Collection[WorkerBlobs]) -> dict[str, set[str]]:
    """Returns the blobs without which the checkpoint is incomplete, by name, and who is to write
    each. Members of two generations may have put a unit into different blobs: one is enough."""
    written = {name for one in reports for name in one.written}
    places = {unit.place for file in written_files(reports).values() for unit in file.units}
    owed = {name: set[str]() for name in manifest.part_names if name not in written}
    for one in reports:
        for file in one.files:
            if any(unit.place not in places for unit in file.units):
                owed[file.name] = set()
    for one in reports:
        for name in owed.keys() & one.planned.keys():
            owed[name].add(one.planned[name])
    return owed


def is_written(manifest: Manifest, reports: Collection[WorkerBlobs]) -> bool:
    """Returns whether all parts and all units are written."""
    places = {unit.place for file in written_files(reports).values() for unit in file.units}
    has_units = all(len(places) == one.total_units for one in reports)
    return has_units and not owed_blobs(manifest, reports)


def unit_table(reports: Collection[WorkerBlobs]) -> UnitTable:
    """Returns the table of a checkpoint whose units are all written."""
    files, places = [], set[UnitPlace]()
    for file in written_files(reports).values():
        theirs = {unit.place for unit in file.units}
        if not theirs <= places:  # else members of another generation wrote its units, too
            files.append(file)
            places |= theirs
    return UnitTable(tuple(files))


def units_that_differ(reports: Iterable[WorkerBlobs]) -> list[str]:
    """Returns the members that hold other bytes of a unit than another member."""
    holders: dict[UnitPlace, dict[str, set[str]]] = {}
    for one in reports:
        for unit in (unit for file in one.files for unit in file.units):
            by_digest = holders.setdefault(unit.place, {})
            by_digest.setdefault(unit.kind.text + unit.digest, set()).add(one.writer)
    odd = [by_digest for by_digest in holders.values() if len(by_digest) > 1]
    return sorted({worker for found in odd for workers in found.values() for worker in workers})


def write_commit(
    catalog: Catalog,
    manifest: Manifest,
    reports: Sequence[WorkerBlobs],
    fence: int,
    metadata: CommitMetadata,
) -> CommitRecord:
    """Commits the checkpoint of which members have reported the blobs.

    Committing the same state twice under one claim gives one checkpoint; a different state is
    refused. Raises StateError if two members hold different bytes of a unit, and LeaseLost if
    another controller committed another state.
    """
    assert all(one.digest == manifest.digest_without_units for one in reports), reports
    assert all(one.step == manifest.step for one in reports), reports
    if differing := units_that_differ(reports):
        raise StateError(
            "the optimizer's state",
            f"not the same on the two members that hold a part of it at step {manifest.step}: "
            f"it differs on {', '.join(differing)}",
        )
    assert is_written(manifest, reports), owed_blobs(manifest, reports)
    if any(one.total_units for one in reports):
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
    written: Iterable[tuple[Manifest, WorkerBlobs]],
) -> tuple[Manifest, WorkerBlobs] | None:
    """Makes one checkpoint of parts that members with different states have written, each part as
    one of them has it. Returns None unless each part is written and the layouts are equal.

    What is equal on all members, as the weights are, is whole in it.
    """
    sources: dict[int, Manifest] = {}
    last: WorkerBlobs | None = None
    for manifest, last in written:
        names = enumerate(manifest.part_names)
        sources |= {number: manifest for number, name in names if name in last.written}
    first = next(iter(sources.values()), None)
    if first is None or any(one.layout != first.layout for one in sources.values()):
        return None
    layout = first.layout
    if len(sources) < len(layout.parts):
        return None
    per_part = layout.part_bytes // layout.block_bytes
    blocks = tuple(sources[n // per_part].blocks[n] for n in range(layout.blocks))
    made = replace(first, blocks=blocks)
    assert last is not None
    planned = dict.fromkeys(made.part_names, last.writer)
    return made, replace(last, digest=made.digest, planned=planned, written=frozenset(planned))


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
