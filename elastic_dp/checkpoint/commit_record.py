"""The commit record: the small JSON file that makes written blobs a checkpoint.

- A `Manifest` describes the state: its structure, where its bytes are and their digests. Every
  member of the group computes one of what it holds, and the committed one has what they describe
  together. Its digest covers every byte of the state, so members with the same digest hold the same
  state.
- A `CommitRecord` is one manifest and what only the committer knows. It is written last, once, and
  never changes.
- A file of another format is refused by its number.
- Reading a commit record does not import torch (see layout.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from elastic_dp.checkpoint.layout import Blob, TensorSpec, Unit, canonical, whole_number
from elastic_dp.errors import CheckpointDamaged, CheckpointError

FORMAT = 7


@dataclass(frozen=True)
class StateTree:
    """An encoded tree (codec.py) and the tensors in it, by slot."""

    tree: Any
    specs: tuple[TensorSpec, ...]

    def to_json(self) -> list[Any]:
        return [self.tree, [spec.to_json() for spec in self.specs]]

    @classmethod
    def from_json(cls, stored: list[Any]) -> StateTree:
        """Reverses `to_json`. Raises ValueError."""
        tree, specs = stored
        return cls(tree, tuple(map(TensorSpec.from_json, specs)))


@dataclass(frozen=True)
class Manifest:
    """The description of a state: its structure, and the blobs that have its bytes.

    `common` is what all members hold. If the optimizer's state is divided among them, `entries` has
    that of each parameter, in the order of the optimizer's groups; the tensors in it are those of
    the whole parameter. A member's own manifest has what it holds: None is the entry of a parameter
    of which it holds nothing.
    """

    step: int
    common: StateTree
    blobs: tuple[Blob, ...]
    entries: tuple[StateTree | None, ...] = ()

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, by name."""
        trees = [self.common, *(entry for entry in self.entries if entry is not None)]
        return {spec.name: spec for one in trees for spec in one.specs}

    @cached_property
    def units(self) -> Mapping[tuple[str, int, int], Unit]:
        """Each unit once, by its tensor and bytes. Two blobs may have the same one."""
        return {(u.tensor, u.start, u.end): u for blob in self.blobs for u in blob.units}

    @cached_property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(spec.nbytes for spec in self.specs.values())

    @cached_property
    def digest(self) -> str:
        """A SHA-256 that covers every byte of the state, through its units, in whatever blobs."""
        if not self.entries:
            return self.common_digest
        entries = [None if one is None else one.to_json() for one in self.entries]
        facts = [self.common_digest, entries, sorted(self.units.values())]
        return hashlib.sha256(canonical(facts)).hexdigest()

    @cached_property
    def common_digest(self) -> str:
        """The SHA-256 of what all members hold."""
        names = {spec.name for spec in self.common.specs}
        units = sorted(unit for unit in self.units.values() if unit.tensor in names)
        facts = [self.step, self.common.to_json(), units]
        return hashlib.sha256(canonical(facts)).hexdigest()

    @property
    def headers(self) -> dict[str, tuple[bytes, int]]:
        """The header and the size in bytes of each blob, by its name."""
        return {blob.name: (blob.header, blob.nbytes) for blob in self.blobs}

    def entry(self, parameter: int) -> tuple[Any, Sequence[TensorSpec]]:
        """Returns the encoded optimizer state of a parameter, and the tensors by slot."""
        if not self.entries:
            return self.common.tree["step"]["optimizer"][parameter], self.common.specs
        found = self.entries[parameter]
        assert found is not None
        return found.tree, found.specs

    def missing(self) -> str:
        """Returns what the blobs lack, or have twice in different units; else an empty text."""
        ends = dict.fromkeys(self.specs, 0)
        for tensor, start, end in sorted(self.units):
            if ends.get(tensor) != start:
                return f"units of {tensor} are missing, or overlap"
            ends[tensor] = end
        for name, spec in self.specs.items():
            if ends[name] != spec.nbytes:
                return f"units at the end of {name} are missing"
        without = (number for number, entry in enumerate(self.entries) if entry is None)
        return next((f"the state of parameter {number} is missing" for number in without), "")

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values."""
        numbers = {name: number for number, name in enumerate(self.specs)}
        trees = self.common, *self.entries
        return {
            "step": self.step,
            "trees": [None if one is None else one.to_json() for one in trees],
            "blobs": [
                [[numbers[u.tensor], u.start, u.end, u.digest] for u in blob.units]
                for blob in self.blobs
            ],
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Manifest:
        """Returns the manifest that `to_json` described. Raises ValueError or KeyError if it is
        invalid."""
        common, *entries = map(StateTree.from_json, stored["trees"])
        all_specs = [spec for one in (common, *entries) for spec in one.specs]
        by_name = {spec.name: spec for spec in all_specs}
        if len(by_name) < len(all_specs):
            raise ValueError("two tensors have the same name")
        blobs = []
        for given in stored["blobs"]:
            units = []
            for number, start, end, digest in given:
                if whole_number(number) >= len(all_specs) or not isinstance(digest, str):
                    raise ValueError(f"{[number, digest]} is not a unit")
                if whole_number(start) >= whole_number(end):
                    raise ValueError(f"a unit has no bytes: {start} to {end}")
                units.append(Unit(all_specs[number].name, start, end, digest))
            blobs.append(Blob.of(units, by_name))
        made = cls(whole_number(stored["step"]), common, tuple(blobs), tuple(entries))
        if lacks := made.missing():
            raise ValueError(lacks)
        return made


@dataclass(frozen=True, kw_only=True)
class CommitMetadata:
    """What the committer adds to a manifest.

    `job` and `data` are fingerprints. `versions` maps names such as "torch" to versions. `metrics`
    holds the values by which the best checkpoint is chosen. `saved_at` is the wall clock in
    seconds. `naming`: see `naming_of`.
    """

    job: str = ""
    data: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    naming: Mapping[str, Any] = field(default_factory=dict)
    saved_at: float = 0.0


@dataclass(frozen=True)
class CommitRecord:
    """A manifest and the committer's metadata.

    `fence` is the number of the claim on the run under which the record was written (catalog.py).
    """

    manifest: Manifest
    fence: int
    metadata: CommitMetadata

    @property
    def step(self) -> int:
        """The number of the step after which the state was taken."""
        return self.manifest.step

    @property
    def digest(self) -> str:
        """The digest of the whole state."""
        return self.manifest.digest

    @property
    def nbytes(self) -> int:
        """The size of the state's tensors in bytes."""
        return self.manifest.nbytes

    def to_bytes(self) -> bytes:
        """Returns the content of the commit record's file."""
        from elastic_dp.checkpoint.codec import encode

        metrics = encode(dict(self.metadata.metrics))[0]  # JSON has no NaN
        body = {
            "fence": self.fence,
            "about": {**dataclasses.asdict(self.metadata), "metrics": metrics},
            "manifest": self.manifest.to_json(),
        }
        digest = hashlib.sha256(canonical(body)).hexdigest()
        return canonical({"elastic_dp_checkpoint": FORMAT, "digest": digest, "body": body})

    @classmethod
    def from_bytes(cls, content: bytes, step: int) -> CommitRecord:
        """Parses the content of a commit record's file. `step` is the step in the file's name.

        Raises CheckpointDamaged if it cannot be read, and CheckpointError if it has another
        format.
        """
        body = _read_format(_checked(content, step), step)
        try:
            metrics = {
                name: value if isinstance(value, int | float) else _number(value)
                for name, value in body["about"]["metrics"].items()
            }
            told = {**body["about"], "metrics": metrics}
            known = {
                field.name for field in dataclasses.fields(CommitMetadata)
            }  # without fields of a later version
            metadata = CommitMetadata(
                **{name: value for name, value in told.items() if name in known}
            )
            manifest, fence = Manifest.from_json(body["manifest"]), whole_number(body["fence"])
            commit = cls(manifest, fence, metadata)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointDamaged(step, f"its commit record cannot be read ({error})") from None
        if commit.step != step:
            raise CheckpointDamaged(step, f"its commit record is that of step {commit.step}")
        return commit


def unit_digest(content: Any) -> str:
    """Returns the digest of a unit: XXH3 with 128 bits, which is fast but not cryptographic."""
    return xxhash.xxh3_128_hexdigest(content)


def _checked(content: bytes, step: int) -> dict[str, Any]:
    """Parses the file and compares its digest. Raises CheckpointDamaged."""
    try:
        stored = json.loads(content)
        body, digest = stored["body"], stored["digest"]
        whole = hashlib.sha256(canonical(body)).hexdigest() == digest
        stored["elastic_dp_checkpoint"] + 0
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(step, f"its commit record is not valid ({error})") from None
    if not whole:
        raise CheckpointDamaged(
            step, "its commit record changed after it was written: the digest differs"
        )
    return stored


def _number(value: Any) -> float:
    """Returns a metric. NaN and infinities are as codec.py writes them, which imports torch."""
    number: float = struct.unpack(">d", bytes.fromhex(value["v"]))[0]
    return number


def _read_format(stored: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns the body. Raises CheckpointError for another format."""
    number = stored["elastic_dp_checkpoint"]
    if number == FORMAT:
        body: dict[str, Any] = stored["body"]
        return body
    advice = (
        "Upgrade elastic_dp to the version that wrote it, or a later one"
        if number > FORMAT
        else "Export it with the version that wrote it (elastic-dp checkpoints export RUN "
        "weights.safetensors), start a new run under another name=, and load the file into the "
        "model before ctx.steps"
    )
    raise CheckpointError(
        f"the checkpoint of step {step} has format {number}: it was written by "
        f"{'a newer' if number > FORMAT else 'an earlier'} version of elastic_dp, and this one "
        f"reads format {FORMAT}. {advice}"
    )
