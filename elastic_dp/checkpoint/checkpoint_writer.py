"""Writes checkpoints: first the blobs, then the commit record, one small conditional write.

- Each blob is to be written by one of the members that hold it, and by another one if that is lost.
  A blob does not depend on which member writes it.
- The commit record is written only after all units are, and only if all members hold the same
  state by its digest, and those that hold a unit of a divided state the same bytes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog, CommitName, blob_path
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord, Manifest
from elastic_dp.checkpoint.layout import Blob, canonical
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.errors import LeaseLost, StateDiffers, StateError

_NAMED = 5  # differences that an error names
_WEIGHTS = ("step.parameters", "step.buffers", "step.optimizer")


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """What one member has written of a checkpoint.

    - `manifest` describes what it holds. `planned` says who is to write each blob in it, by name,
      and `written` has the names of those that the member wrote.
    - `members` are those that shared the writing, by rank; a member that is a step behind may have
      others.
    - `metadata` is what the member knows of the commit record's.
    - `stall_s` is how long the snapshot blocked this member's training, in seconds.
    - `took_s` is the time from the begin of the snapshot to this report, in seconds.
    - `lineage_id` is the generation in which the run of this state began or went back.
    """

    writer: str
    manifest: Manifest
    planned: Mapping[str, str]
    written: frozenset[str]
    members: tuple[str, ...]
    metadata: CommitMetadata = field(default_factory=CommitMetadata)
    stall_s: float = 0.0
    took_s: float = 0.0
    lineage_id: int = 0

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def digest(self) -> str:
        """That of what all members hold."""
        return self.manifest.common_digest


def write_blobs(
    catalog: Catalog,
    snapshot: Snapshot,
    executor: Executor,
    *,
    writer: str,
    members: Sequence[str],
    names: Collection[str] | None = None,
) -> WrittenBlobs:
    """Writes the blobs that `writer` is to write, or those with these names. `members` share what
    they hold.

    Writing a blob again creates the same object with the same bytes.
    """
    manifest = snapshot.manifest(executor)
    planned = snapshot.writers(members)
    if names is None:
        mine = [name for name, member in planned.items() if member == writer]
    else:
        mine = [name for name in planned if name in names]

    def write(name: str) -> None:
        path = blob_path(catalog.folder, manifest.step, name)
        catalog.store.write(path, snapshot.content(name))

    list(executor.map(write, mine))
    return WrittenBlobs(writer, manifest, planned, frozenset(mine), tuple(members))


def written_blobs(reports: Collection[WrittenBlobs]) -> list[Blob]:
    """Returns the blobs that some member has written, without those of which other ones have all
    units: members of two generations may have put a unit into different blobs."""
    held, names = _held_blobs(reports), {name for one in reports for name in one.written}
    chosen, ranges = [], set[tuple[str, int, int]]()
    for name in sorted(names & held.keys()):
        if not held[name].ranges <= ranges:
            chosen.append(held[name])
            ranges |= held[name].ranges
    return chosen


def owed_blobs(reports: Collection[WrittenBlobs]) -> dict[str, set[str]]:
    """Returns the blobs with units that nobody has written, by name, and who is to write each."""
    written = {one for blob in written_blobs(reports) for one in blob.ranges}
    held = _held_blobs(reports).values()
    owed = {blob.name: set[str]() for blob in held if not blob.ranges <= written}
    for one in reports:
        for name in owed.keys() & one.planned.keys():
            owed[name].add(one.planned[name])
    return owed


def _held_blobs(reports: Iterable[WrittenBlobs]) -> dict[str, Blob]:
    return {blob.name: blob for one in reports for blob in one.manifest.blobs}


def written_manifest(reports: Collection[WrittenBlobs]) -> Manifest | None:
    """Returns the manifest of what members have written together, or None if that is not a whole
    state. What is common to all is as in the first report, which a member may have written of
    another state, of the same tensors."""
    first = next(iter(reports)).manifest
    if any(one.manifest.common.specs != first.common.specs for one in reports):
        return None
    entries = tuple(
        next((entry for entry in of_all if entry is not None), None)
        for of_all in zip(*(one.manifest.entries for one in reports), strict=True)
    )
    made = Manifest(first.step, first.common, tuple(written_blobs(reports)), entries)
    return None if made.missing() else made


def members_that_differ(reports: Iterable[WrittenBlobs]) -> list[str]:
    """Returns the members that hold something else of a divided state than another member."""
    holders: defaultdict[Any, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in reports:
        common = {spec.name for spec in one.manifest.common.specs}
        for at, unit in one.manifest.units.items():
            if unit.tensor not in common:
                holders[at][unit.digest].add(one.writer)
        for number, entry in enumerate(one.manifest.entries):
            if entry is not None:
                holders[number][canonical(entry.to_json()).decode()].add(one.writer)
    odd = [by_content.values() for by_content in holders.values() if len(by_content) > 1]
    return sorted({worker for found in odd for workers in found for worker in workers})


@dataclass
class PendingCheckpoint:
    """A checkpoint of which some blobs are written: which are missing, who has them, and when it is
    complete. `written`: the reports about it.

    - It is complete when every blob of one state is written, by any member, and each member that is
      present has reported its digest, even one that had nothing to write.
    - A blob whose writer is lost is requested from another member that holds it.
    - If the states of members differ, the one that most of them hold counts. If their weights
      differ, it counts only if no step follows, since the next step compares them.
    """

    step: int
    written: list[WrittenBlobs] = field(default_factory=list)
    requested: dict[str, str] = field(default_factory=dict)  # of whom, by the blob's name
    stall_s: float = 0.0
    told_at: float = 0.0
    began_at: float = math.inf
    error: StateDiffers | None = None  # members hold different states
    weights_differ: bool = False

    def add(self, written: WrittenBlobs, now: float) -> None:
        self.written.append(written)
        self.stall_s = max(self.stall_s, written.stall_s)
        self.told_at = now
        self.began_at = min(self.began_at, now - written.took_s)

    def states(self) -> list[list[WrittenBlobs]]:
        """Returns what members have reported, by their state; that of most members is first."""
        found: dict[str, list[WrittenBlobs]] = {}
        for one in self.written:
            found.setdefault(one.digest, []).append(one)
        return sorted(found.values(), key=lambda some: -len({one.writer for one in some}))

    def note_differences(self) -> None:
        """Notes which members hold another state than most, and what differs."""
        usual, *others = self.states()
        paths = differences(others[0][0].manifest, usual[0].manifest)
        names = ", ".join(map(_key_of, paths[:_NAMED])) + (", …" if len(paths) > _NAMED else "")
        odd = sorted({one.writer for some in others for one in some})
        self.error = StateDiffers(self.step, names, ", ".join(odd))
        self.weights_differ = any(path.startswith(_WEIGHTS) for path in paths)

    def silent(self, lost: Set[str]) -> set[str]:
        """Returns the members that are present and have not reported."""
        return set(self.written[0].members) - {report.writer for report in self.written} - lost

    def requests(self, lost: Set[str], *, all_missing: bool) -> dict[str, list[str]]:
        """Returns the names of blobs that each member is to write, too: of those that lost members
        were to write, or of any that are missing. Writing a blob twice does no harm."""
        usual, wanted = self.states()[0], set[str]()
        for name, planned in owed_blobs(usual).items():
            asked = self.requested.get(name)
            if asked in lost or (asked is None and (all_missing or planned & lost)):
                wanted.add(name)
        found: dict[str, list[str]] = {}
        for report in usual:
            mine = sorted(wanted & report.planned.keys()) if report.writer not in lost else []
            if mine:
                found.setdefault(report.writer, []).extend(mine)
                self.requested |= dict.fromkeys(mine, report.writer)
                wanted.difference_update(mine)
        return found

    def whole(self, *, at_end: bool) -> list[WrittenBlobs] | None:
        """Returns the reports that make the checkpoint, once all of it is written. `at_end`:
        members write nothing more. Then any state counts that is whole, or what is written of all
        of them: what is equal on all, as the weights are, is whole in that."""
        if self.weights_differ and not at_end:
            return None  # the next step decides
        candidates = [*self.states(), self.written] if at_end else self.states()[:1]
        return next((some for some in candidates if written_manifest(some) is not None), None)


def write_commit(
    catalog: Catalog,
    reports: Sequence[WrittenBlobs],
    fence: int,
    metadata: CommitMetadata,
) -> CommitRecord:
    """Commits what members have written together. It is a whole state: see `written_manifest`.

    Committing the same state twice under one claim gives one checkpoint; a different state is
    refused. Raises StateError if two members hold different bytes of a unit, and LeaseLost if
    another controller committed another state.
    """
    step = reports[0].step
    if differing := members_that_differ(reports):
        raise StateError(
            "the optimizer's state",
            f"not the same on the two members that hold a part of it at step {step}: "
            f"it differs on {', '.join(differing)}",
        )
    manifest = written_manifest(reports)
    assert manifest is not None, owed_blobs(reports)
    made = CommitRecord(manifest, fence, metadata)
    name = CommitName(step, fence)
    try:
        catalog.store.write(catalog.path(name), made.to_bytes(), create_only=True)
    except FileExistsError:
        if catalog.read(name).digest != made.digest:
            raise LeaseLost(
                f"step {step} of claim {fence} is already committed with another "
                "state: two controllers write under one claim"
            ) from None
    return made


def differences(one: Manifest, other: Manifest) -> list[str]:
    """Returns the paths of values and the names of tensors in which the states of two members
    differ, of what all members hold."""
    found = sorted(_differing_values(one.common.tree, other.common.tree, ""))
    if one.common.specs != other.common.specs:
        return found or ["the tensors' names, types or shapes"]
    pairs = ((unit, other.units.get(at)) for at, unit in one.units.items())
    names = {mine.tensor for mine, theirs in pairs if theirs is not None and mine != theirs}
    return [*found, *(spec.name for spec in one.common.specs if spec.name in names)]


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


def _key_of(path: str) -> str:
    """Returns the words of a user for a path in the state."""
    path = re.sub(r"^body\.user\.([^. ]+)", r"state['\1'].state_dict()", path)
    groups = r"^(?:body|step)\.held\.optimizers\.0\.groups\.(\d+)\.values\.(\w+)"
    return re.sub(groups, r"optimizer.param_groups[\1]['\2']", path)
