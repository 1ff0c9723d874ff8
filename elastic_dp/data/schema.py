"""One schema of many shards: which columns the job reads, and whether the shards agree on them.

Their types need not be equal, if one holds the values of all (see kinds.py), and a column may be missing in some shards,
whose rows are null there. A struct is read as its leaves, columns named "a.b"; `DataConfig.columns` may name a leaf or
the whole struct.
A column that has no tensor is refused here, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from elastic_dp.data.kinds import growth, is_list, lossless, null_bytes, plain, type_name
from elastic_dp.errors import DataError

_NAMES_SHOWN = 20

_Types = tuple[tuple[str, pa.DataType], ...]
Merge = Callable[[pa.DataType, pa.DataType], pa.DataType | None]


class Columns:
    """Of one data set, shard by shard."""

    def __init__(self, wanted: Sequence[str] | None) -> None:
        self._wanted = wanted
        self._types: dict[str, tuple[pa.DataType, str]] = {}  # and the first shard that has it
        self._shards: dict[_Types, str] = {}  # the first of each kind
        self._numbers: dict[_Types, int] = {}  # of these kinds
        self._kind = 0  # of the last shard
        self._first: tuple[str, list[str]] = "", []  # shard, and all its columns
        self._last: pa.Schema | None = None

    def add(self, shard: str, schema: pa.Schema, merge: Merge) -> int:
        """The number of its kind: shards that have the same types. Raises DataError where a column is not what it is in
        another shard."""
        if self._last is not None and schema.equals(self._last):
            return self._kind
        if self._last is None:
            self._first = shard, schema.names
        self._last = schema
        here = tuple((field.name, plain(field.type)) for field in self._pick(shard, schema))
        if here in self._shards:
            self._kind = self._numbers[here]
            return self._kind
        self._kind = self._numbers[here] = len(self._shards)
        self._shards[here] = shard
        for name, kind in here:
            known, owner = self._types.get(name, (kind, shard))
            merged = merge(known, kind) if name in self._types else kind
            if merged is None:
                raise _differ(name, known, owner, kind, shard)
            self._types[name] = merged, owner
        return self._kind

    def schema(self) -> pa.Schema:
        """Top-level columns, in the order in which they are wanted."""
        return pa.schema([pa.field(name, kind) for name, (kind, _) in self._types.items()])

    def leaves(self) -> list[pa.Field]:
        """The columns that the job reads. Raises DataError for one that has no tensor."""
        self.refuse_missing()
        found = self.wanted_leaves()
        if not found:
            raise DataError("DataConfig.url: the shards have no columns")
        for error in self.absent().values():
            raise error
        for leaf in found:
            refuse_without_tensor(leaf)
        return found

    def wanted_leaves(self) -> list[pa.Field]:
        """`leaves`, also those that have no tensor."""
        return [leaf for leaf in leaves(self.schema()) if self._wants(leaf.name)]

    def refuse_missing(self) -> None:
        """Raises DataError for a column that was asked for and is in no shard."""
        schema = self.schema()
        there = {leaf.name for leaf in leaves(schema)} | set(schema.names)
        missing = [n for n in self._wanted or () if n not in there and not _is_inside(n, there)]
        if missing:
            shard, names = self._first
            shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
            raise DataError(
                f"DataConfig.columns: no column {', '.join(map(repr, missing))} in {shard}, which has {shown}"
            )

    def costs(self) -> list[tuple[float, int]]:
        """For each kind of shard: how many times the memory its rows take in the types of all, and bytes for each row."""
        wanted, found = self.wanted_leaves(), []
        for here in self._shards:
            types = {leaf.name: leaf.type for leaf in leaves(pa.schema(here))}
            there = [(types[leaf.name], leaf.type) for leaf in wanted if leaf.name in types]
            null = sum(null_bytes(leaf.type) for leaf in wanted if leaf.name not in types)
            null += sum(null_bytes(merged) for kind, merged in there if pa.types.is_null(kind))
            found.append((max((growth(*pair) for pair in there), default=1.0), null))
        return found

    def absent(self) -> dict[str, DataError]:
        """What is wrong with the columns that hold no null, but are null in all rows of some shard."""
        found: dict[str, DataError] = {}
        if len(self._shards) == 1:
            return found
        held = [
            ({f.name: f.type for f in leaves(pa.schema(h))}, s) for h, s in self._shards.items()
        ]
        for leaf in self.wanted_leaves():
            if is_text(leaf.type):
                continue
            kinds = [(types.get(leaf.name), shard) for types, shard in held]
            nulls = [
                (kind, shard) for kind, shard in kinds if kind is None or pa.types.is_null(kind)
            ]
            if 0 < len(nulls) < len(kinds):
                owner = next(pair[1] for pair in kinds if pair not in nulls)
                found[leaf.name] = _differ(leaf.name, leaf.type, owner, *nulls[0])
        return found

    def _pick(self, shard: str, schema: pa.Schema) -> list[pa.Field]:
        tops = top_level(schema, self._wanted)
        twice = {name for name in schema.names if schema.names.count(name) > 1}
        for name in tops:
            if name in twice:
                raise DataError(f"{shard} has several columns named {name!r}; rename all but one")
        return [schema.field(name) for name in tops]

    def _wants(self, leaf: str) -> bool:
        if self._wanted is None:
            return True
        return any(leaf == name or leaf.startswith(name + ".") for name in self._wanted)


def leaves(schema: pa.Schema) -> Iterator[pa.Field]:
    """The columns that are no structs, named "a.b" where they lie in one."""
    for field in schema:
        if pa.types.is_struct(field.type):
            inner = leaves(pa.schema(list(field.type)))
            yield from (pa.field(f"{field.name}.{leaf.name}", leaf.type) for leaf in inner)
        else:
            yield field


def top_level(schema: pa.Schema, wanted: Sequence[str] | None) -> list[str]:
    """The columns of a shard that hold those `wanted`; all for None."""
    if wanted is None:
        return list(schema.names)
    tops = dict.fromkeys(_top(name, schema) for name in wanted)
    return [name for name in tops if name in schema.names]


def widest(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """`Format.merge` of formats whose types were guessed from the values: the type that holds both."""
    try:
        fields = [pa.schema([("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(fields, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return lossless(one, other)


def is_text(kind: pa.DataType) -> bool:
    """Of any length: no array, but objects."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary_view(kind)
    )


def refuse_without_tensor(leaf: pa.Field) -> None:
    """Raises DataError, with what to do behind a semicolon."""
    kind = leaf.type.value_type if pa.types.is_dictionary(leaf.type) else leaf.type
    if is_text(kind):
        return
    while is_list(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
        while is_list(kind):
            kind = kind.value_type
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if number or (pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)):
        return
    nulls = " (every value is null)" if pa.types.is_null(kind) else ""
    raise DataError(
        f"column {leaf.name!r} is {type_name(leaf.type)}{nulls}, which has no tensor; use numbers, lists of "
        "numbers, structs of them, strings or binary, or leave it out by DataConfig.columns"
    )


def _top(name: str, schema: pa.Schema) -> str:
    return name if name in schema.names else name.split(".", 1)[0]


def _is_inside(name: str, leaf_names: set[str]) -> bool:
    """A struct in a struct."""
    return any(leaf.startswith(name + ".") for leaf in leaf_names)


def _differ(
    name: str, one: pa.DataType, owner: str, other: pa.DataType | None, shard: str
) -> DataError:
    return DataError(
        f"the shards' schemas differ: column {name!r} is {_say(one)} in {owner} and {_say(other)} in {shard}; rewrite "
        "one of them, or leave the column out of DataConfig.columns"
    )


def _say(kind: pa.DataType | None) -> str:
    return "missing" if kind is None else type_name(kind)
