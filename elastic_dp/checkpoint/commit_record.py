"""The small JSON that makes parts a checkpoint: what the state is, where its bytes are, their
digests, and whose it is.

- `Manifest` is what every member of the group computes alike from its own copy of the state. Its
  digest covers every byte of the state, so two members with the same digest hold the same state.
- `CommitRecord` is one manifest with what only the committer knows. It is written last, once, and
  never changed.
- A file of an earlier format is brought up to this one when it is read; one of a later format is
  refused by its number.
- Reading one imports no torch, see layout.py.
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
    """`tree`: the encoded state. `blocks`: the digest of each block of the layout's line."""

    step: int
    tree: Any
    layout: Layout
    blocks: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything here, and so over every byte of the state."""
        return hashlib.sha256(_canonical(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
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
        specs = tuple(_spec_from_json(spec) for spec in stored["tensors"])
        layout = Layout(specs, stored["part_bytes"], stored["block_bytes"])
        made = cls(stored["step"], stored["tree"], layout, tuple(stored["blocks"]))
        _check(made)
        if set(stored) - set(made.to_json()):  # of a later version, whose digest covers them
            made.__dict__["digest"] = hashlib.sha256(_canonical(stored)).hexdigest()
        return made


@dataclass(frozen=True, kw_only=True)
class CommitMetadata:
    """What the committer adds.

    `job`, `data`: fingerprints. `versions`: of Python, torch and so on, by name. `metrics`: to
    choose the best by. `saved_at`: seconds of the wall clock. `naming`: see `naming.py`. `losses`,
    `observed_s`: how often everyone was lost, and in how much time, for the choice of the interval.
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
    """`fence`: the number of the claim on the run under which it was written (claims.py)."""

    manifest: Manifest
    fence: int
    metadata: CommitMetadata

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def nbytes(self) -> int:
        return self.manifest.layout.total

    def to_bytes(self) -> bytes:
        from elastic_dp.checkpoint.encoding import encode

        metrics = encode(dict(self.metadata.metrics))[0]  # NaN has no word in JSON
        body = {
            "fence": self.fence,
            "about": {**dataclasses.asdict(self.metadata), "metrics": metrics},
            "manifest": self.manifest.to_json(),
        }
        digest = hashlib.sha256(_canonical(body)).hexdigest()
        return _canonical({"elastic_dp_checkpoint": FORMAT, "digest": digest, "body": body})

    @classmethod
    def from_bytes(cls, content: bytes, step: int) -> CommitRecord:
        """`step`: the one that its name says. Raises CheckpointDamaged; CheckpointError if it is of
        a later format."""
        body = _upgraded(_checked(content, step), step)
        try:
            told = {**body["about"], "metrics": _decoded(body["about"]["metrics"])}
            known = {
                field.name for field in dataclasses.fields(CommitMetadata)
            }  # not those of a later version
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
    """What is computed with is what it must be. Raises ValueError."""
    layout = manifest.layout
    _whole(manifest.step)
    if min(_whole(layout.part_bytes), _whole(layout.block_bytes)) < 1:
        raise ValueError("parts of no bytes")
    for spec in layout.specs:
        for n in (*spec.shape, *(spec.stride or ())):
            _whole(n)
        if not isinstance(spec.name, str) or not _is_dtype(spec.dtype):
            raise ValueError(f"{spec.name!r} of {spec.dtype!r} is no tensor")
    if len(manifest.blocks) != layout.blocks:
        raise ValueError(f"{len(manifest.blocks)} digests of {layout.blocks} blocks")


def _is_dtype(word: Any) -> bool:
    if word in WORDS:
        return True
    import torch

    return isinstance(getattr(torch, word, None), torch.dtype)


def _whole(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is no number")
    return number


def block_digest(content: Any) -> str:
    """XXH3, 128 bits: it runs at the speed of memory, and is no defence against who means to
    deceive."""
    return xxhash.xxh3_128_hexdigest(content)


def block_digester() -> Any:
    """The same, piece by piece."""
    return xxhash.xxh3_128()


def _checked(content: bytes, step: int) -> dict[str, Any]:
    try:
        stored = json.loads(content)
        body, digest = stored["body"], stored["digest"]
        whole = hashlib.sha256(_canonical(body)).hexdigest() == digest
        stored["elastic_dp_checkpoint"] + 0
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(step, f"its commit record is no JSON of ours ({error})") from None
    if not whole:
        raise CheckpointDamaged(
            step, "its commit record is not the one that was written: the digest differs"
        )
    return stored


def _decoded(metrics: Any) -> Any:
    """Numbers stand for themselves; the decoder imports torch, so only what JSON has no word for is
    left to it."""
    if all(isinstance(value, int | float) for value in metrics.values()):
        return metrics
    from elastic_dp.checkpoint.decoding import decode

    return decode(metrics, [])


def _upgraded(stored: dict[str, Any], step: int) -> dict[str, Any]:
    """The body as this format has it."""
    number, body = stored["elastic_dp_checkpoint"], stored["body"]
    if number > FORMAT:
        raise CheckpointError(
            f"the checkpoint of step {step} is of format {number}: it was written by a newer "
            "version of elastic_dp, and "
            f"this one reads up to format {FORMAT}. Upgrade elastic_dp: install the version "
            "that wrote it, or a later one"
        )
    if number != FORMAT and number not in _UPGRADES:
        raise CheckpointDamaged(step, f"its commit record names a format {number} that never was")
    while number < FORMAT:
        body = _UPGRADES[number](body)
        number += 1
    return body


def _from_1(body: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had no metrics and no record of losses; its blocks were whole parts."""
    manifest = body["manifest"]
    metadata = {**body["about"], "metrics": {}, "losses": 0, "observed_s": 0.0}
    return {
        **body,
        "about": metadata,
        "manifest": {**manifest, "block_bytes": manifest["part_bytes"]},
    }


def _from_2(body: dict[str, Any]) -> dict[str, Any]:
    """The same; what format 3 has more of an optimizer and of modules is absent in its tree
    (`TrainState.adopt`)."""
    return body


_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1, 2: _from_2}


def _canonical(value: Any) -> bytes:
    """One text for one value, in the order of its keys: the order of a state_dict is part of it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    stride = None if spec.stride is None else list(spec.stride)
    return [spec.name, spec.dtype, list(spec.shape), stride, spec.device]


def _spec_from_json(stored: list[Any]) -> TensorSpec:
    name, dtype, shape, stride, device = stored
    return TensorSpec(name, dtype, tuple(shape), None if stride is None else tuple(stride), device)
