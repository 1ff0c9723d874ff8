"""The commit record: the small JSON file that makes written parts a checkpoint.

- A `Manifest` describes the state: its structure, where its bytes are and their digests. Every
  member of the group computes it from its own copy of the state. Its digest covers every byte of
  the state, so members with the same digest hold the same state.
- A `CommitRecord` is one manifest and what only the committer knows. It is written last, once, and
  never changes.
- A file of an earlier format is upgraded when it is read. A file of a later format is refused by
  its number.
- Reading a commit record does not import torch (see layout.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from elastic_dp.checkpoint.layout import WORDS, Layout, TensorSpec
from elastic_dp.errors import CheckpointDamaged, CheckpointError

FORMAT = 3


@dataclass(frozen=True)
class Manifest:
    """The description of a state: its structure, layout and digests.

    `tree` is the encoded state (encoding.py). `blocks` holds the digest of each block of the
    layout.
    """

    step: int
    tree: Any
    layout: Layout
    blocks: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the manifest, which covers every byte of the state through its blocks."""
        return hashlib.sha256(_canonical(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest as JSON values."""
        return {
            "step": self.step,
            "tree": self.tree,
            "tensors": [_spec_to_json(spec) for spec in self.layout.specs],
            "part_bytes": self.layout.part_bytes,
            "block_bytes": self.layout.block_bytes,
            "blocks": list(self.blocks),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Manifest:
        """Returns the manifest that `to_json` described. Raises ValueError or KeyError if it is
        invalid."""
        specs = tuple(_spec_from_json(spec) for spec in stored["tensors"])
        layout = Layout(specs, stored["part_bytes"], stored["block_bytes"])
        made = cls(stored["step"], stored["tree"], layout, tuple(stored["blocks"]))
        _check(made)
        if set(stored) - set(made.to_json()):  # fields of a later version: the digest covers them
            made.__dict__["digest"] = hashlib.sha256(_canonical(stored)).hexdigest()
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
        return self.manifest.layout.total

    def to_bytes(self) -> bytes:
        """Returns the content of the commit record's file."""
        from elastic_dp.checkpoint.encoding import encode

        metrics = encode(dict(self.metadata.metrics))[0]  # JSON has no NaN
        body = {
            "fence": self.fence,
            "about": {**dataclasses.asdict(self.metadata), "metrics": metrics},
            "manifest": self.manifest.to_json(),
        }
        digest = hashlib.sha256(_canonical(body)).hexdigest()
        return _canonical({"elastic_dp_checkpoint": FORMAT, "digest": digest, "body": body})

    @classmethod
    def from_bytes(cls, content: bytes, step: int) -> CommitRecord:
        """Parses the content of a commit record's file. `step` is the step in the file's name.

        Raises CheckpointDamaged if it cannot be read, and CheckpointError if its format is a later
        one.
        """
        body = _upgraded(_checked(content, step), step)
        try:
            told = {**body["about"], "metrics": _decoded(body["about"]["metrics"])}
            known = {
                field.name for field in dataclasses.fields(CommitMetadata)
            }  # without fields of a later version
            metadata = CommitMetadata(
                **{name: value for name, value in told.items() if name in known}
            )
            commit = cls(Manifest.from_json(body["manifest"]), _whole(body["fence"]), metadata)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(step, f"its commit record cannot be read ({error})") from None
        if commit.step != step:
            raise CheckpointDamaged(step, f"its commit record is that of step {commit.step}")
        return commit


def _check(manifest: Manifest) -> None:
    """Raises ValueError unless every value that later code computes with is valid."""
    layout = manifest.layout
    _whole(manifest.step)
    if min(_whole(layout.part_bytes), _whole(layout.block_bytes)) < 1:
        raise ValueError("a part or a block has no bytes")
    for spec in layout.specs:
        for n in (*spec.shape, *(spec.stride or ())):
            _whole(n)
        if not isinstance(spec.name, str) or not _is_dtype(spec.dtype):
            raise ValueError(f"{spec.name!r} of {spec.dtype!r} is not a tensor")
    if len(manifest.blocks) != layout.blocks:
        raise ValueError(f"{len(manifest.blocks)} digests for {layout.blocks} blocks")


def _is_dtype(word: Any) -> bool:
    if word in WORDS:
        return True
    import torch

    return isinstance(getattr(torch, word, None), torch.dtype)


def _whole(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a whole number")
    return number


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
        whole = hashlib.sha256(_canonical(body)).hexdigest() == digest
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
    from elastic_dp.checkpoint.decoding import decode

    return decode(metrics, [])


def _upgraded(stored: dict[str, Any], step: int) -> dict[str, Any]:
    """Returns the body in the current format. Raises CheckpointError for a later format."""
    number, body = stored["elastic_dp_checkpoint"], stored["body"]
    if number > FORMAT:
        raise CheckpointError(
            f"the checkpoint of step {step} has format {number}: it was written by a newer version "
            f"of elastic_dp, and this one reads up to format {FORMAT}. Upgrade elastic_dp to the "
            "version that wrote it, or a later one"
        )
    if number != FORMAT and number not in _UPGRADES:
        raise CheckpointDamaged(step, f"its commit record has an unknown format ({number})")
    while number < FORMAT:
        body = _UPGRADES[number](body)
        number += 1
    return body


def _from_1(body: dict[str, Any]) -> dict[str, Any]:
    """Upgrades format 1, which had neither metrics nor losses and whose blocks were whole parts."""
    manifest = body["manifest"]
    metadata = {**body["about"], "metrics": {}, "losses": 0, "observed_s": 0.0}
    return {
        **body,
        "about": metadata,
        "manifest": {**manifest, "block_bytes": manifest["part_bytes"]},
    }


def _from_2(body: dict[str, Any]) -> dict[str, Any]:
    """Upgrades format 2, whose body has the same structure.

    `TrainState.adopt` accepts a tree without the entries of optimizers and modules that format 3
    added.
    """
    return body


_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}


def _canonical(value: Any) -> bytes:
    """Returns the JSON of a value. Keys keep their order, which is part of a state_dict."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    stride = None if spec.stride is None else list(spec.stride)
    return [spec.name, spec.dtype, list(spec.shape), stride, spec.device]


def _spec_from_json(stored: list[Any]) -> TensorSpec:
    name, dtype, shape, stride, device = stored
    return TensorSpec(name, dtype, tuple(shape), None if stride is None else tuple(stride), device)
