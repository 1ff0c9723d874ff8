"""The units of an optimizer's state that is divided among workers, and the files that have them.

    unit   the state of some elements of a parameter, or of a whole one, as bytes with a digest
    file   some units one after another: a safetensors file, named by a digest of its units
    table  the files of a checkpoint, and what is in them: a part of the commit record

- Each unit is held by two workers, which have the same bytes of it. Neither the name nor the
  content of a file shows which of them wrote it.
- Which units lie in one file follows from who holds them. The digest of a table does not depend on
  that: it is a digest over the digests of the units.
- Reading a table does not import torch (see layout.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from elastic_dp.checkpoint.layout import (
    METADATA,
    WORDS,
    TensorSpec,
    canonical,
    header,
    whole_number,
)


def blob_name(facts: list[Any]) -> str:
    """Returns the name of a blob of which these facts determine every byte."""
    return hashlib.sha256(canonical(facts)).hexdigest()[:32]


class UnitPlace(NamedTuple):
    """The elements `first` up to `last` of a parameter, in the order in which they lie in memory.

    `parameter` is its number in the order of the optimizer's groups.
    """

    parameter: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class UnitKind:
    """What units of one kind consist of.

    `tree` is the encoded state of such a unit (encoding.py), and `specs` are its tensors. `shape`
    and `stride` are those of the parameter of which a unit has some elements; without a shape, it
    has the state of a whole parameter.
    """

    tree: Any
    specs: tuple[TensorSpec, ...]
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @cached_property
    def text(self) -> str:
        """The kind as JSON. Kinds with the same text are equal."""
        return canonical(self.to_json()).decode()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitKind) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def nbytes(self) -> int:
        """The size of a unit in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    def to_json(self) -> list[Any]:
        """Returns the kind as JSON values."""
        shape, stride = (None if x is None else list(x) for x in (self.shape, self.stride))
        return [self.tree, [spec.to_json() for spec in self.specs], shape, stride]

    @classmethod
    def from_json(cls, stored: list[Any]) -> UnitKind:
        """Reverses `to_json`. Raises ValueError."""
        tree, specs, *form = stored
        shape, stride = (None if x is None else tuple(map(whole_number, x)) for x in form)
        return cls(tree, tuple(map(TensorSpec.from_json, specs)), shape, stride)


@dataclass(frozen=True)
class StateUnit:
    """One unit. `digest` is that of its bytes (`block_digest`)."""

    place: UnitPlace
    kind: UnitKind
    digest: str

    @property
    def facts(self) -> list[Any]:
        """What equal units have in common, as JSON values."""
        return [*self.place, self.kind.text, self.digest]


@dataclass(frozen=True)
class UnitFile:
    """Units that lie in one file, in this order. Those of a snapshot may lack their digests."""

    units: tuple[StateUnit, ...]

    @cached_property
    def name(self) -> str:
        """The name of the file, which follows from the units in it."""
        return blob_name([unit.facts for unit in self.units])

    @cached_property
    def header(self) -> bytes:
        """The safetensors header, in front of the data."""
        table: dict[str, Any] = {"__metadata__": METADATA}
        at = 0
        for unit in self.units:
            number, first, last = unit.place
            part = "" if unit.kind.shape is None else f"[{first}:{last}]"
            for spec in unit.kind.specs:
                word, shape = WORDS.get(spec.dtype, ("", 1))[0], list(spec.shape)
                if not word or spec.stride is not None:
                    word, shape = "U8", [spec.nbytes]
                span = [at, at + spec.nbytes]
                entry = {"dtype": word, "shape": shape, "data_offsets": span}
                table[f"optimizer.{number}.{spec.name}{part}"] = entry
                at += spec.nbytes
        return header(table)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each unit begins in the file, and where the last one ends."""
        sizes = (unit.kind.nbytes for unit in self.units)
        return tuple(accumulate(sizes, initial=len(self.header)))

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes, header included."""
        return self.offsets[-1]


class PlacedUnit(NamedTuple):
    """A unit, the file that has it, and where it begins there."""

    unit: StateUnit
    file: UnitFile
    at: int


@dataclass(frozen=True)
class UnitTable:
    """The files of all units of a checkpoint. Two of them may have the same unit."""

    files: tuple[UnitFile, ...]

    @cached_property
    def units(self) -> Mapping[UnitPlace, PlacedUnit]:
        """Each unit once, in the order of the parameters."""
        found: dict[UnitPlace, PlacedUnit] = {}
        for file in self.files:
            for unit, at in zip(file.units, file.offsets, strict=False):
                found.setdefault(unit.place, PlacedUnit(unit, file, at))
        return {place: found[place] for place in sorted(found)}

    @cached_property
    def nbytes(self) -> int:
        """The size of all units in bytes."""
        return sum(one.unit.kind.nbytes for one in self.units.values())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 over the digests of the units, in whatever files they lie."""
        facts = [one.unit.facts for one in self.units.values()]
        return hashlib.sha256(canonical(facts)).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns the table as JSON values. Each kind is in it once."""
        kinds: dict[str, int] = {}
        files = [
            [
                [*unit.place, kinds.setdefault(unit.kind.text, len(kinds)), unit.digest]
                for unit in file.units
            ]
            for file in self.files
        ]
        by_text = {unit.kind.text: unit.kind for unit in self._all()}
        return {"kinds": [by_text[text].to_json() for text in kinds], "files": files}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> UnitTable:
        """Reverses `to_json`. Raises ValueError, KeyError or TypeError if it is invalid."""
        kinds = [UnitKind.from_json(kind) for kind in stored["kinds"]]
        files = []
        for units in stored["files"]:
            made = []
            for *place, kind, digest in units:
                first, last = place[1:]
                if whole_number(first) > whole_number(last) or not isinstance(digest, str):
                    raise ValueError(f"{place!r} is not a unit")
                number = whole_number(kind)
                if number >= len(kinds):
                    raise ValueError(f"there is no kind {number}")
                made.append(
                    StateUnit(UnitPlace(whole_number(place[0]), first, last), kinds[number], digest)
                )
            files.append(UnitFile(tuple(made)))
        table = cls(tuple(files))
        table._check()
        return table

    def _check(self) -> None:
        """Raises ValueError unless the units of each parameter are all of it."""
        ends: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for place, one in self.units.items():
            if place.first != ends.get(place.parameter, 0):
                raise ValueError(f"units of parameter {place.parameter} are missing, or overlap")
            ends[place.parameter] = place.last
            shape = one.unit.kind.shape
            sizes[place.parameter] = place.last if shape is None else math.prod(shape)
        if ends != sizes:
            raise ValueError("units at the end of a parameter are missing")

    def _all(self) -> Iterator[StateUnit]:
        for file in self.files:
            yield from file.units
