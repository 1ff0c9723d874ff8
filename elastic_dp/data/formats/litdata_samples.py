"""How the leaves of litdata's samples become columns: of a dict by their keys, of a list or tuple
by their places, as structs where they are nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.columns.schema import leaves as leaves_of
from elastic_dp.data.formats.file_format import Ints
from elastic_dp.data.formats.litdata_index import INDEX, ChunkFacts, SampleLayout, Tree
from elastic_dp.data.formats.litdata_leaves import leaf_of
from elastic_dp.data.formats.mds_encodings import Encoding
from elastic_dp.data.formats.sample_values import Values
from elastic_dp.errors import DataError

_ARRAY_BYTES = 256  # of an array in NumPy, beside its numbers


@dataclass(frozen=True)
class Samples:
    """How the leaves of samples become columns."""

    leaves: tuple[Encoding, ...]
    tree: Tree
    has_lengths: bool  # whether each item begins with the lengths of its leaves
    row_bytes: int

    @classmethod
    def of(cls, layout: SampleLayout) -> Samples:
        noted: dict[int, Any] = {}
        _note(layout.tree, layout.types, noted)
        leaves = tuple(
            leaf_of(name, noted.get(number)) for number, name in enumerate(layout.serializers)
        )
        row_bytes = 16 * len(leaves) + _ARRAY_BYTES * sum(leaf.needs_sample for leaf in leaves)
        return cls(leaves, layout.tree, not layout.is_tokens, row_bytes)

    def schema(self, sample: bytes) -> pa.Schema:
        values = self._values(sample, np.array([0, len(sample)])) if sample else None

        def kind(tree: Tree) -> pa.DataType:
            if isinstance(tree, int):
                first = values[tree].joined() if values else b""
                leaf = self.leaves[tree]
                return leaf.type_of(first)
            return pa.struct([(name, kind(part)) for name, part in tree])

        assert not isinstance(self.tree, int)
        return pa.schema([(name, kind(part)) for name, part in self.tree])

    def refuse(self, shard: str, schema: pa.Schema, columns: Sequence[str] | None) -> None:
        """Raises DataError if the job reads a leaf whose serializer is not read."""
        wanted = {leaf.name for leaf in leaves_of(schema, columns)}
        for name, number in _paths(self.tree):
            if name in wanted and not self.leaves[number].is_read:
                raise DataError(
                    f"{shard}: column {name!r} is by litdata's serializer "
                    f"{self.leaves[number].name!r}, which is not read; leave it out by "
                    "DataConfig.columns, or write it as numbers, text, bytes or arrays"
                )

    def check_tokens(self, nbytes: int, facts: ChunkFacts) -> None:
        kind = self.leaves[0].type_of(b"")
        if facts.tokens is not None and pa.types.is_large_list(kind):
            width = np.dtype(kind.value_type.to_pandas_dtype()).itemsize
            if nbytes != facts.tokens * width:
                raise ValueError(
                    f"it has {nbytes:,} bytes of tokens, and {INDEX} says {facts.tokens:,} tokens"
                )

    def decode(
        self, content: bytes, offsets: Ints, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        """The columns of `schema`. `offsets` [rows + 1]: of the items in `content`."""
        values = self._values(content, offsets)

        def array(tree: Tree, path: str, kind: pa.DataType) -> pa.Array | None:
            if isinstance(tree, int):
                leaf = self.leaves[tree]
                if not leaf.is_read or not _is_among(path, leaves):
                    return None
                try:
                    return leaf.decode(values[tree], kind)
                except (ValueError, pa.ArrowInvalid) as error:
                    raise ValueError(f"column {path!r} ({leaf.name}): {error}") from error
            parts = {
                name: array(part, f"{path}.{name}", _field_of(kind, name)) for name, part in tree
            }
            parts = {name: part for name, part in parts.items() if part is not None}
            return pa.StructArray.from_arrays(list(parts.values()), list(parts)) if parts else None

        assert not isinstance(self.tree, int)
        found = {
            name: array(part, name, schema.field(name).type)
            for name, part in self.tree
            if name in schema.names
        }
        return pa.table({name: column for name, column in found.items() if column is not None})

    def _values(self, content: bytes, offsets: Ints) -> list[Values]:
        """Where the values of each leaf are. Raises ValueError if the lengths of an item's leaves
        do not add up to the item."""
        view, starts, ends = memoryview(content), offsets[:-1], offsets[1:]
        if offsets[-1] != len(content):
            raise ValueError("its items are not as long as its header says")
        if not self.has_lengths:
            return [Values(view, starts, ends)]
        head = 4 * len(self.leaves)
        if (ends - starts < head).any():
            raise ValueError("an item is shorter than the lengths of its leaves")
        data = np.frombuffer(content, np.uint8)
        heads = np.ascontiguousarray(data[starts[:, None] + np.arange(head)])
        lengths = heads.view("<u4").astype(np.int64)
        bounds = np.cumsum(np.column_stack([starts + head, lengths]), axis=1)
        if (bounds[:, -1] != ends).any():
            row = int(np.argmax(bounds[:, -1] != ends))
            raise ValueError(f"the leaves of item {row} do not add up to its length")
        return [
            Values(view, bounds[:, number], bounds[:, number + 1])
            for number in range(len(self.leaves))
        ]


def _note(tree: Tree, types: Any, noted: dict[int, Any]) -> None:
    """Finds what litdata noted of each leaf. `types`: of the parts of `tree`, by name."""
    if isinstance(tree, int):
        noted[tree] = types
        return
    for name, part in tree:
        inside = types.get(name) if isinstance(types, Mapping) else None
        if not isinstance(part, int) and isinstance(inside, Mapping):
            inside = inside.get("fields")
        _note(part, inside, noted)


def _paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The name of the column of each leaf."""
    if isinstance(tree, int):
        yield prefix.removesuffix("."), tree
        return
    for name, part in tree:
        yield from _paths(part, f"{prefix}{name}.")


def _is_among(path: str, leaves: Sequence[str]) -> bool:
    """Whether the column, or a field of it, is among `leaves`."""
    return any(leaf == path or leaf.startswith(f"{path}.") for leaf in leaves)


def _field_of(kind: pa.DataType, name: str) -> pa.DataType:
    at = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
    return kind.field(at).type if at >= 0 else pa.null()
