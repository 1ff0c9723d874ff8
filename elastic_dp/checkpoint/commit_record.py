"""The commit record: the small JSON file that makes written blobs a checkpoint.

- A `Manifest` describes the state: its structure, where its bytes are and their digests. Every
  member of the group computes it from its own copy of the state. Its digest covers every byte of
  the state, so members with the same digest hold the same state.
- A `CommitRecord` is one manifest and what only the committer knows. It is written last, once, and
  never changes.
- A file of another format is refused by its number.
- Reading a commit record does not import torch (see layout.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from elastic_dp.checkpoint.layout import Layout, TensorSpec, canonical, whole_number
from elastic_dp.checkpoint.state_units import UnitTable, blob_name
from elastic_dp.errors import CheckpointDamaged, CheckpointError

FORMAT = 6


@dataclass(frozen=True)
class Manifest:
    """The description of a state: its structure, layout and digests.

    `tree` is the encoded state (encoding.py). `blocks` holds the digest of each block of the
    layout. `units` is what the workers of the run have each a part of, which is neither in the tree
    nor in the layout: the state of a sharded optimizer.
    """

    step: int
    tree: Any
    layout: Layout
    blocks: tuple[str, ...]
    units: UnitTable | None = None

    @cached_property
    def digest(self) -> str:
        """A SHA-256 that covers every byte of the state, through its blocks and its units."""
        if self.units is None:
            return self.digest_without_units
        both = [self.digest_without_units, self.units.digest]
        return hashlib.sha256(canonical(both)).hexdigest()

    @cached_property
    def digest_without_units(self) -> str:
        """The SHA-256 of all but the units, which each worker computes of the state it holds."""
        return hashlib.sha256(canonical(self._without_units())).hexdigest()

    @cached_property
    def part_names(self) -> tuple[str, ...]:
        """The name of the blob of each part of the layout, which follows from its content."""
        each = self.layout.part_bytes // self.layout.block_bytes
        return tuple(
            blob_name([part.header.decode("latin-1"), *self.blocks[number * each :][:each]])
            for number, part in enumerate(self.layout.parts)
        )

    @property
    def headers(self) -> dict[str, tuple[bytes, int]]:
        """The header and the size in bytes of each blob, by its name."""
        parts = zip(self.part_names, self.layout.parts, strict=True)
        files = () if self.units is None else self.units.files
        found = {name: (part.header, part.nbytes) for name, part in parts}
        return found | {file.name: (file.header, file.nbytes) for file in files}

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values."""
        units = {} if self.units is None else {"units": self.units.to_json()}
        return {**self._without_units(), **units}

    def _without_units(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tree": self.tree,
            "tensors": [spec.to_json() for spec in self.layout.specs],
            "part_bytes": self.layout.part_bytes,
            "block_bytes": self.layout.block_bytes,
            "blocks": list(self.blocks),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Manifest:
        """Returns the manifest that `to_json` described. Raises ValueError or KeyError if it is
        invalid."""
        specs = tuple(map(TensorSpec.from_json, stored["tensors"]))
        layout = Layout(specs, stored["part_bytes"], stored["block_bytes"])
        units = UnitTable.from_json(stored["units"]) if "units" in stored else None
        made = cls(stored["step"], stored["tree"], layout, tuple(stored["blocks"]), units)
        _check(made)
        if set(stored) - set(made.to_json()):  # fields of a later version: the digest covers them
            others = {key: value for key, value in stored.items() if key != "units"}
            digest = hashlib.sha256(canonical(others)).hexdigest()
            made.__dict__["digest_without_units"] = digest
        return made


@dataclass(frozen=True, kw_only=True)
class CommitMetadata:
    """What the committer adds to a manifest.

    `job` and `data` are fingerprints. `versions` maps names such as "torch" to versions. `metrics`
    holds the values by which the best checkpoint is chosen. `saved_at` is the wall clock in
    seconds. `naming`: see state_dict_names.py. `losses` counts how often all workers were lost in
    `observed_s` seconds; the checkpoint interval depends on both.
    """

    job: str = ""
    data: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    naming: Mapping[str, Any] = field(default_factory=dict)
    saved_at: float = 0.0
    losses: int = 0
    observed_s: float = 0.0


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
        units = self.manifest.units
        return self.manifest.layout.total + (0 if units is None else units.nbytes)

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
            told = {**body["about"], "metrics": _decoded(body["about"]["metrics"])}
            known = {
                field.name for field in dataclasses.fields(CommitMetadata)
            }  # without fields of a later version
            metadata = CommitMetadata(
                **{name: value for name, value in told.items() if name in known}
            )
            manifest, fence = Manifest.from_json(body["manifest"]), whole_number(body["fence"])
            commit = cls(manifest, fence, metadata)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(step, f"its commit record cannot be read ({error})") from None
        if commit.step != step:
            raise CheckpointDamaged(step, f"its commit record is that of step {commit.step}")
        return commit


def _check(manifest: Manifest) -> None:
    """Raises ValueError unless every value that later code computes with is valid."""
    layout = manifest.layout
    whole_number(manifest.step)
    if min(whole_number(layout.part_bytes), whole_number(layout.block_bytes)) < 1:
        raise ValueError("a part or a block has no bytes")
    if len(manifest.blocks) != layout.blocks:
        raise ValueError(f"{len(manifest.blocks)} digests for {layout.blocks} blocks")


def block_digest(content: Any) -> str:
    """Returns the digest of a block: XXH3 with 128 bits, which is fast but not cryptographic."""
    return xxhash.xxh3_128_hexdigest(content)


def block_digester() -> Any:
    """Returns a hash object that computes `block_digest` incrementally."""
    return xxhash.xxh3_128()


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


def _decoded(metrics: Any) -> Any:
    """Returns the metrics as numbers.

    Only values that JSON cannot express (NaN, infinities) go through the decoder, which imports
    torch.
    """
    if all(isinstance(value, int | float) for value in metrics.values()):
        return metrics
    from elastic_dp.checkpoint.codec import decode

    return decode(metrics, [])


def _read_format(stored: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns the body. Raises CheckpointError for another format."""
    number = stored["elastic_dp_checkpoint"]
    if number == FORMAT:
        body: dict[str, Any] = stored["body"]
        return body
    if number > FORMAT:
        raise CheckpointError(
            f"the checkpoint of step {step} has format {number}: it was written by a newer version "
            f"of elastic_dp, and this one reads format {FORMAT}. Upgrade elastic_dp to the "
            "version that wrote it, or a later one"
        )
    raise CheckpointError(
        f"the checkpoint of step {step} has format {number}: it was written by an earlier version "
        f"of elastic_dp, and this one reads format {FORMAT}. Export it with the version that wrote "
        "it (elastic-dp checkpoints export RUN weights.safetensors), start a new run under another "
        "name=, and load the file into the model before ctx.steps"
    )
