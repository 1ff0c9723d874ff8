"""Types of columns: which types hold the same values, and to which type a column is cast.

Writers store the same column in different types: strings, large strings, string views and
dictionaries of strings; lists with offsets of 32 or 64 bits; extension types, which Arrow shows
only if they are registered in the process. A data set has one type for each column, which depends
neither on the writer of a shard nor on what this process has imported.

Numbers are not converted: int32 beside int64 is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa


def plain(kind: pa.DataType) -> pa.DataType:
    """The *plain* type, in which columns of this type are read: dictionaries as their values, views
    as large strings, extension types as their storage. pyarrow's own extension types stay if they
    are stored as numbers, since every process has them registered."""
    if isinstance(kind, pa.BaseExtensionType):
        storage = plain(kind.storage_type)
        own = not isinstance(kind, pa.ExtensionType)
        numbers = pa.types.is_primitive(storage) or pa.types.is_fixed_size_binary(storage)
        is_tensor = isinstance(kind, pa.FixedShapeTensorType)
        return kind if own and (numbers or is_tensor) else storage
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return rebuilt(kind, plain)


def rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with `change` applied to the types of its items, keys and fields."""
    if is_list(kind):
        return _with_values(kind, change(kind.value_type))
    if pa.types.is_map(kind):
        key, item = change(kind.key_type), change(kind.item_type)
        same = key.equals(kind.key_type) and item.equals(kind.item_type)
        return kind if same else pa.map_(key, item)
    if pa.types.is_struct(kind):
        fields = [field.with_type(change(field.type)) for field in kind]
        return kind if _same_types(fields, kind) else pa.struct(fields)
    return kind


def node_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The type and those within it, in the order of the field nodes of a record batch: not the
    values of dictionaries."""
    yield kind
    kind = storage_of(kind)
    if not pa.types.is_dictionary(kind):
        for number in range(kind.num_fields):
            yield from node_types(kind.field(number).type)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain(field.type)) for field in schema])


def one_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type in which columns of both plain types are read; None if they hold other values."""
    if type_name(one) == type_name(other) or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if isinstance(one, pa.FixedShapeTensorType) or isinstance(other, pa.FixedShapeTensorType):
        return None
    if isinstance(one, pa.BaseExtensionType) or isinstance(other, pa.BaseExtensionType):
        return one_type(storage_of(one), storage_of(other))
    if is_list(one) and is_list(other):
        return _one_list(one, other)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _one_struct(one, other)
    if pa.types.is_map(one) and pa.types.is_map(other):
        key, item = one_type(one.key_type, other.key_type), one_type(one.item_type, other.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if is_string(one) and is_string(other):
        return pa.large_string()
    return pa.large_binary() if is_binary(one) and is_binary(other) else None


def cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Casts `column` to the plain type `wanted`. Layouts that decode to the same arrays are left as
    they are, so most columns are not copied."""
    if column.type.equals(wanted):
        return column
    encoded = _with_plain_dictionaries(column.type)
    if not encoded.equals(column.type):
        column = column.cast(encoded)
    if pa.types.is_dictionary(encoded):
        column = column.cast(encoded.value_type)
    target = _target(column.type, wanted)
    return column if target.equals(column.type) else column.cast(target)


def type_name(kind: pa.DataType) -> str:
    """Arrow's name of the type, without the names that writers give to list items ("item",
    "element")."""
    if pa.types.is_fixed_size_list(kind):
        return f"list<{type_name(kind.value_type)}>[{kind.list_size}]"
    if is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return "struct<" + ", ".join(f"{f.name}: {type_name(f.type)}" for f in kind) + ">"
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    return str(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list, also of a fixed size."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_string(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def storage_of(kind: pa.DataType) -> pa.DataType:
    """The storage type of an extension type; any other type itself."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _target(kind: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """`wanted`, with the string and list layout of `kind` where both decode to the same arrays."""
    if kind.equals(wanted) or isinstance(kind, pa.FixedShapeTensorType):
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return _target(kind.storage_type, storage_of(wanted))
    if isinstance(wanted, pa.BaseExtensionType):
        return _target(kind, wanted.storage_type)
    if (is_string(kind) and is_string(wanted)) or (is_binary(kind) and is_binary(wanted)):
        return plain(kind)
    if is_list(kind) and is_list(wanted):
        return _with_values(kind, _target(kind.value_type, wanted.value_type))
    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        if [field.name for field in kind] != [field.name for field in wanted]:
            return pa.struct([field.with_nullable(True) for field in wanted])
        fields = [f.with_type(_target(f.type, w.type)) for f, w in zip(kind, wanted, strict=True)]
        return kind if _same_types(fields, kind) else pa.struct(fields)
    return wanted


def _with_plain_dictionaries(kind: pa.DataType) -> pa.DataType:
    """The type with dictionaries of plain values. pyarrow cannot decode dictionaries of views,
    which Polars writes, also within lists."""
    if pa.types.is_dictionary(kind):
        values = plain(kind.value_type)
        same = values.equals(kind.value_type)
        return kind if same else pa.dictionary(kind.index_type, values)
    return rebuilt(kind, _with_plain_dictionaries)


def _with_values(kind: pa.DataType, values: pa.DataType) -> pa.DataType:
    """The list type `kind` with other values."""
    if values.equals(kind.value_type):
        return kind
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    return pa.large_list(values) if pa.types.is_large_list(kind) else pa.list_(values)


def _one_list(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    sizes = {k.list_size for k in (one, other) if pa.types.is_fixed_size_list(k)}
    values = one_type(one.value_type, other.value_type)
    if values is None or len(sizes) > 1:
        return None
    if pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other):
        return pa.list_(values, one.list_size)
    is_large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
    return pa.large_list(values) if is_large else pa.list_(values)


def _one_struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A struct with the fields of both, by name; None if they differ in type."""
    fields = {field.name: field.type for field in one}
    if len(fields) < one.num_fields or len({field.name for field in other}) < other.num_fields:
        return None  # two fields of one name
    for field in other:
        merged = one_type(fields.get(field.name, field.type), field.type)
        if merged is None:
            return None
        fields[field.name] = merged
    return pa.struct(list(fields.items()))


def _same_types(fields: list[pa.Field], kind: pa.DataType) -> bool:
    return all(field.type.equals(old.type) for field, old in zip(fields, kind, strict=True))
