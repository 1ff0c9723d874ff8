"""The schema of a data set: which columns the job reads, and whether the shards agree on them.

All shards have one type for a column, in any layout (see column_types.py). A shard may lack a
column of text or objects, which is None there. A struct is read as its leaves, which are columns
named "a.b"; `DataConfig.columns` may name a leaf or a whole struct. A column may have a dot in its
own name: "a" never means the column "a.b", and an ambiguous name is refused. A column that has no
tensor is refused here, before training starts.

So are nulls of other columns than text and objects, as far as shards count them: by Parquet's
statistics, Arrow's messages, the scan of a tar. Parquet may have no statistics, and in lists they
count empty ones as nulls. There, nulls are refused when a row group is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa

from elastic_dp.data.columns.column_types import (
    is_binary,
    is_list,
    is_string,
    one_type,
    plain,
    plain_schema,
    rebuilt,
    type_name,
)
from elastic_dp.errors import DataError

NULLS_WAYS_OUT = (
    "leave these rows out by DataConfig.filter, write values into the shards (`elastic-dp data "
    "convert --query`), or leave the column out by DataConfig.columns"
)
_NAMES_SHOWN = 20
_NULL_BYTES = 24  # of a null text in memory, at most

_Types = tuple[tuple[str, pa.DataType], ...]


class Columns:
    """Merges the schemas of a data set, and counts its nulls, shard by shard.

    `wanted`: the columns that the job names; None: all. `used`: those that its filter uses, which
    are read too.
    """

    def __init__(self, wanted: Sequence[str] | None, used: Sequence[str] = ()) -> None:
        self._wanted = None if wanted is None else list(dict.fromkeys([*wanted, *used]))
        self._delivered, self._used = wanted, used
        # Type, first shard that has the column in it
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._shards: dict[_Types, str] = {}  # the first shard with these types
        self._nulls: dict[str, tuple[int, str]] = {}  # by leaf: how many, and the first shard
        self._first: tuple[str, list[str]] = "", []  # first shard, and all its columns
        self._last: pa.Schema | None = None
        self._all_null = frozenset[str]()  # leaves of the last shard of Arrow's null type

    def add(
        self,
        shard: str,
        schema: pa.Schema,
        nulls: Mapping[str, int] = MappingProxyType({}),
        rows: int = 0,
    ) -> None:
        """Adds a shard. `nulls`: by leaf, as far as the shard counts them. Raises DataError if a
        column cannot be merged with that of another shard."""
        if self._last is None or not schema.equals(self._last):
            refuse_names_that_are_no_text(shard, schema)
            if self._last is None:
                self._first = shard, schema.names
            self._last = schema
            fields = self._pick(shard, plain_schema(schema))
            here = tuple((field.name, field.type) for field in fields)
            if here not in self._shards:
                self._merge(shard, here)
            nothing = (f.name for f in leaves(fields) if pa.types.is_null(f.type))
            self._all_null = frozenset(nothing)
        for name, count in {**nulls, **dict.fromkeys(self._all_null, rows)}.items():
            if count:
                before, first = self._nulls.get(name, (0, shard))
                self._nulls[name] = before + count, first

    def _merge(self, shard: str, here: _Types) -> None:
        for name, kind in here:
            known, owner = self._types.get(name, (kind, shard))
            merged = one_type(known, kind)
            if merged is None:
                raise DataError(
                    f"the shards' schemas differ: column {name!r} is {type_name(known)} in "
                    f"{owner} and {type_name(kind)} in {shard}; write them with one type, as "
                    "`elastic-dp data convert` does, or leave the column out by naming the "
                    "others (columns)"
                )
            self._types[name] = merged, owner if merged.equals(known) else shard
        self._shards[here] = shard

    def schema(self) -> pa.Schema:
        """The top-level columns, in the order in which they are wanted."""
        return pa.schema([pa.field(name, kind) for name, (kind, _) in self._types.items()])

    def leaves(self) -> list[pa.Field]:
        """The columns that a batch has. Raises DataError for one that has no tensor."""
        self.refuse_missing()
        self.refuse_case()
        found = leaves(self.schema(), self._delivered)
        if not found:
            raise DataError("DataConfig.url: the shards have no columns")
        self._refuse_ambiguous(self.schema(), "the shards together", self._wanted)
        for leaf in found:
            refuse_without_tensor(leaf)
        return found

    def refuse_nulls(self) -> None:
        """Raises DataError for a column that a shard lacks or that holds nulls, if nulls have no
        tensor. Rows that are null in a column of the filter may be left out, so that nulls there
        are refused as they are read."""
        used = {leaf.name for leaf in leaves(self.schema(), self._used)}
        delivered = {leaf.name for leaf in self.leaves()}
        names = [({*dict(_leaf_types(types))}, shard) for types, shard in self._shards.items()]
        for leaf in leaves(self.schema(), self._wanted):
            column = f"column {leaf.name!r} ({type_name(leaf.type)})"
            has_none = may_be_null(leaf.type)
            for here, shard in names:
                if leaf.name not in here and (leaf.name in used or not has_none):
                    raise DataError(
                        f"{column} is not in {shard}; write it in all shards, or leave it out by "
                        "DataConfig.columns"
                    )
            if leaf.name in self._nulls and leaf.name in delivered - used and not has_none:
                count, shard = self._nulls[leaf.name]
                raise DataError(
                    f"{column} holds {count} null{'s' * (count != 1)}, the first in {shard}; "
                    f"{NULLS_WAYS_OUT}"
                )

    def null_bytes(self) -> int:
        """The bytes of a row, at most, for texts that some shards lack or hold as nulls alone."""
        here = [dict(_leaf_types(types)) for types in self._shards]
        wanted = leaves(self.schema(), self._wanted)
        return _NULL_BYTES * sum(
            any(pa.types.is_null(types.get(leaf.name, pa.null())) for types in here)
            for leaf in wanted
        )

    def refuse_missing(self) -> None:
        """Raises DataError if no shard has one of the columns that the job names."""
        there = {name for name, _ in _columns_and_structs(self.schema())}
        for field, columns in ("columns", self._delivered), ("filter", self._used):
            missing = [name for name in columns or () if name not in there]
            if missing:
                shard, names = self._first
                shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
                raise DataError(
                    f"DataConfig.{field}: no column {', '.join(map(repr, missing))} in {shard}, "
                    f"which has {shown}"
                )

    def refuse_case(self) -> None:
        """Raises DataError if two columns differ only in case and no shard has both. Most likely
        they are one column, of which a part would be null."""
        several: dict[str, list[str]] = {}
        for name in self._types:
            several.setdefault(name.casefold(), []).append(name)
        for names in several.values():
            two = names[:2]
            if len(names) > 1 and not any(set(two) <= set(dict(types)) for types in self._shards):
                owners = " and ".join(f"{name!r} (in {self._types[name][1]})" for name in two)
                raise DataError(
                    f"the shards' schemas differ: columns {owners} differ only in case, and "
                    "no shard has both; rename one "
                    "of them, or leave one out by naming the others (columns)"
                )

    def _refuse_ambiguous(
        self, schema: pa.Schema, where: str, wanted: Sequence[str] | None
    ) -> None:
        """Raises DataError if a name that is read means several columns or structs."""
        there = Counter(name for name, _ in _columns_and_structs(schema))
        read = [leaf.name for leaf in leaves(schema, wanted)]
        for name in (*(wanted or ()), *read):
            if there[name] > 1:
                raise DataError(
                    f"{name!r} names {there[name]} things in {where}: columns with a dot in "
                    "their name, or fields of "
                    "structs; rename all but one, or choose others by DataConfig.columns"
                )

    def _pick(self, shard: str, schema: pa.Schema) -> list[pa.Field]:
        wanted = self._wanted
        tops = top_level(schema, wanted)
        times = Counter(schema.names)
        for name in tops:
            if times[name] > 1:
                raise DataError(f"{shard} has several columns named {name!r}; rename all but one")
        self._refuse_ambiguous(schema, shard, wanted)
        return [schema.field(name) for name in tops]


def refuse_names_that_are_no_text(shard: str, schema: pa.Schema) -> None:
    try:
        _ = schema.names, [type_name(field.type) for field in schema]
    except UnicodeDecodeError as error:
        raise name_is_no_text(shard, error) from error


def name_is_no_text(shard: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{shard} has a column whose name is not UTF-8: {error}")


def leaves(
    fields: Iterable[pa.Field], wanted: Sequence[str] | None = None, prefix: str = ""
) -> list[pa.Field]:
    """The columns that are not structs; a field of a struct is named "a.b". `wanted`: names of
    leaves or of structs; None: all."""
    found = list[pa.Field]()
    for field in fields:
        name = prefix + field.name
        within = None if wanted is None or name in wanted else wanted
        if pa.types.is_struct(field.type):
            found += leaves(field.type, within, f"{name}.")
        elif within is None:
            found.append(pa.field(name, field.type))
    return found


def _leaf_types(types: _Types) -> list[tuple[str, pa.DataType]]:
    return [(leaf.name, leaf.type) for leaf in leaves(pa.schema(types))]


def top_level(schema: pa.Schema, wanted: Sequence[str] | None) -> list[str]:
    """The top-level columns that contain `wanted`; None: all."""
    if wanted is None:
        return list(schema.names)
    tops = dict(reversed(list(_columns_and_structs(schema))))
    return list(dict.fromkeys(tops[name] for name in wanted if name in tops))


def is_text(kind: pa.DataType) -> bool:
    """Whether it is text or bytes of variable length, which become Python objects."""
    return is_string(kind) or is_binary(kind)


def is_object(kind: pa.DataType) -> bool:
    """Whether values become Python objects: maps, decimals, and lists of these, of text or of
    structs."""
    depth = 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if depth and pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_map(kind) or pa.types.is_decimal(kind):
        return True
    return depth > 0 and (is_text(kind) or bool(pa.types.is_struct(kind)))


def may_be_null(kind: pa.DataType) -> bool:
    """Whether a null becomes None."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(kind) or is_object(kind)


def has_lengths(kind: pa.DataType) -> bool:
    """Whether it is a list of variable length, or a fixed-size list that contains such lists."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return is_list(kind)


def is_time(kind: pa.DataType) -> bool:
    """Whether it is a timestamp, date, time of day or duration, which become integers in the stored
    unit."""
    return bool(pa.types.is_temporal(kind)) and not pa.types.is_interval(kind)


def is_short_time(kind: pa.DataType) -> bool:
    return is_time(kind) and kind.bit_width == 32


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in which values become Python objects. It has no types whose objects depend on
    installed packages, and none of which Arrow cannot select rows."""
    if is_time(kind := plain(kind)):
        return pa.int32() if is_short_time(kind) else pa.int64()
    return rebuilt(kind, plain_type)


def refuse_without_tensor(leaf: pa.Field) -> None:
    """Raises DataError for a type that has no tensor and is neither text nor an object. The way out
    follows after a semicolon."""
    kind = leaf.type.value_type if pa.types.is_dictionary(leaf.type) else leaf.type
    if is_text(kind) or is_object(kind):
        return
    while is_list(kind):
        kind = kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
        while is_list(kind):
            kind = kind.value_type
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if number or is_time(kind) or pa.types.is_fixed_size_binary(kind):
        return
    nulls = " (every value is null)" if pa.types.is_null(kind) else ""
    raise DataError(
        f"column {leaf.name!r} is {type_name(leaf.type)}{nulls}, which has no tensor; use "
        "numbers, dates, "
        "text, or lists, structs and maps of them, or leave it out by DataConfig.columns"
    )


def _columns_and_structs(
    fields: Iterable[pa.Field], prefix: str = "", top: str | None = None
) -> Iterator[tuple[str, str]]:
    """(name, its top-level column) of all columns, structs and fields."""
    for field in fields:
        name, owner = prefix + field.name, field.name if top is None else top
        yield name, owner
        if pa.types.is_struct(field.type):
            yield from _columns_and_structs(field.type, f"{name}.", owner)
