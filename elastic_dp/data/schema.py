"""One schema of many shards: which columns the job reads, and whether all shards agree on them.

A struct is read as its leaves, columns named "a.b"; `DataConfig.columns` may name a leaf or the whole struct. A column
may have a dot in its own name: "a" never means the column "a.b", and a name that means two things is refused.
A column that has no tensor is refused here, before anything is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from elastic_dp.errors import DataError

_NAMES_SHOWN = 20

Merge = Callable[[pa.DataType, pa.DataType], pa.DataType | None]


class Columns:
    """Of one data set, shard by shard."""

    def __init__(self, wanted: Sequence[str] | None) -> None:
        self._wanted = wanted
        self._types: dict[str, tuple[pa.DataType, str]] = {}  # and the shard that has it
        self._last: pa.Schema | None = None

    def add(self, shard: str, schema: pa.Schema, merge: Merge) -> None:
        """Raises DataError where a column is missing, or is not what it is in another shard."""
        if self._last is not None and schema.equals(self._last):
            return
        here = {field.name: field.type for field in self._pick(shard, schema)}
        if self._last is None:
            self._types = {name: (kind, shard) for name, kind in here.items()}
        for name in [*self._types, *(name for name in here if name not in self._types)]:
            self._types[name] = self._merged(name, shard, here.get(name), merge)
        self._last = schema

    def schema(self) -> pa.Schema:
        """Top-level columns, in the order in which they are wanted."""
        return pa.schema([pa.field(name, kind) for name, (kind, _) in self._types.items()])

    def leaves(self) -> list[pa.Field]:
        """The columns that the job reads. Raises DataError for one that has no tensor."""
        found = self.wanted_leaves()
        if not found:
            raise DataError("DataConfig.url: the shards have no columns")
        for leaf in found:
            refuse_without_tensor(leaf)
        return found

    def wanted_leaves(self) -> list[pa.Field]:
        """`leaves`, also those that have no tensor."""
        return leaves(self.schema(), self._wanted)

    def _pick(self, shard: str, schema: pa.Schema) -> list[pa.Field]:
        there = Counter(name for name, _ in _columns_and_structs(schema))
        missing = [name for name in self._wanted or () if name not in there]
        if missing:
            shown = ", ".join(map(repr, schema.names[:_NAMES_SHOWN]))
            raise DataError(
                f"DataConfig.columns: no column {', '.join(map(repr, missing))} in {shard}, which "
                f"has {shown}"
            )
        tops = top_level(schema, self._wanted)
        for name in tops:
            if schema.names.count(name) > 1:
                raise DataError(f"{shard} has several columns named {name!r}; rename all but one")
        read = [leaf.name for leaf in leaves(schema, self._wanted)]
        for name in (*(self._wanted or ()), *read):
            if there[name] > 1:
                raise DataError(
                    f"{name!r} names {there[name]} things in {shard}: columns with a dot in their name, or fields of "
                    "structs; rename all but one, or choose others by DataConfig.columns"
                )
        return [schema.field(name) for name in tops]

    def _merged(
        self, name: str, shard: str, kind: pa.DataType | None, merge: Merge
    ) -> tuple[pa.DataType, str]:
        known, owner = self._types.get(name, (None, self._any_shard()))
        both = known is not None and kind is not None
        merged = merge(known, kind) if both else None
        if merged is None:
            raise DataError(
                f"the shards' schemas differ: column {name!r} is {_say(known)} in {owner} and "
                f"{_say(kind)} in {shard}; rewrite one of them, or leave the column out of "
                "DataConfig.columns"
            )
        return merged, owner

    def _any_shard(self) -> str:
        return next(iter(self._types.values()))[1]


def leaves(
    fields: Iterable[pa.Field], wanted: Sequence[str] | None = None, prefix: str = ""
) -> list[pa.Field]:
    """The columns that are no structs, named "a.b" where they lie in one. `wanted`: names of them, or of structs."""
    found = list[pa.Field]()
    for field in fields:
        name = prefix + field.name
        within = None if wanted is None or name in wanted else wanted
        if pa.types.is_struct(field.type):
            found += leaves(field.type, within, f"{name}.")
        elif within is None:
            found.append(pa.field(name, field.type))
    return found


def top_level(schema: pa.Schema, wanted: Sequence[str] | None) -> list[str]:
    """The columns of a shard that hold those `wanted`; all for None."""
    if wanted is None:
        return list(schema.names)
    tops = dict(reversed(list(_columns_and_structs(schema))))
    return list(dict.fromkeys(tops[name] for name in wanted if name in tops))


def same(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """`Format.merge` of formats whose shards say their types."""
    return one if type_name(one) == type_name(other) else None


def widest(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """`Format.merge` of formats whose types were guessed from the values: the type that holds both."""
    try:
        fields = [pa.schema([("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(fields, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None


def type_name(kind: pa.DataType) -> str:
    """As Arrow says it, without the names that writers give to list items ("item", "element")."""
    if pa.types.is_fixed_size_list(kind):
        return f"list<{type_name(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ", ".join(f"{f.name}: {type_name(f.type)}" for f in kind) + ">"
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    return str(kind)


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


def is_object(kind: pa.DataType) -> bool:
    """What is handed out as Python's own objects: maps, decimals, and lists of these, of text or of structs."""
    depth = 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if depth and pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_map(kind) or pa.types.is_decimal(kind):
        return True
    return depth > 0 and (is_text(kind) or bool(pa.types.is_struct(kind)))


def has_lengths(kind: pa.DataType) -> bool:
    """Whether it is lists of any length, or has some in lists of one length."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return _is_list(kind)


def is_time(kind: pa.DataType) -> bool:
    """Timestamps, dates, times of day, durations: whole numbers of the unit in which they are stored."""
    return bool(pa.types.is_temporal(kind)) and not pa.types.is_interval(kind)


def is_short_time(kind: pa.DataType) -> bool:
    return is_time(kind) and kind.bit_width == 32


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Without the kinds of which Python's objects would depend on what is installed, or that Arrow cannot pick rows of."""
    if is_time(kind):
        return pa.int32() if is_short_time(kind) else pa.int64()
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if _is_list(kind):
        make = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        return make(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


def refuse_without_tensor(leaf: pa.Field) -> None:
    """Raises DataError, with what to do behind a semicolon. Text and objects have none, and need none."""
    kind = leaf.type.value_type if pa.types.is_dictionary(leaf.type) else leaf.type
    if is_text(kind) or is_object(kind):
        return
    while _is_list(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
        while _is_list(kind):
            kind = kind.value_type
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if number or is_time(kind) or pa.types.is_fixed_size_binary(kind):
        return
    nulls = " (every value is null)" if pa.types.is_null(kind) else ""
    raise DataError(
        f"column {leaf.name!r} is {type_name(leaf.type)}{nulls}, which has no tensor; use numbers, dates, "
        "text, or lists, structs and maps of them, or leave it out by DataConfig.columns"
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _columns_and_structs(
    fields: Iterable[pa.Field], prefix: str = "", top: str | None = None
) -> Iterator[tuple[str, str]]:
    """All that a name can mean, and the top-level column that holds it."""
    for field in fields:
        name, owner = prefix + field.name, field.name if top is None else top
        yield name, owner
        if pa.types.is_struct(field.type):
            yield from _columns_and_structs(field.type, f"{name}.", owner)


def _say(kind: pa.DataType | None) -> str:
    return "missing" if kind is None else type_name(kind)
