"""String and binary views of nulls, which may be anything.

A view is 16 bytes: a length, and the bytes or the place of a value. Arrow leaves open what a null's
view holds, and `validate` does not look at it. pyarrow still uses its length when it casts the
array, and a negative length ends the process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_INTS = 4  # of 32 bits in a view, of which the first is the length


def clear_null_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with an empty view for each null, also in nested columns and dictionaries. What has
    no such view is not copied."""
    for number, field in enumerate(batch.schema):
        if _has_views(field.type):
            batch = batch.set_column(number, field, _cleared(batch.column(number)))
    return batch


def has_views(schema: pa.Schema) -> bool:
    """Whether `clear_null_views` has anything to do."""
    return any(_has_views(kind) for kind in schema.types)


def _has_views(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_views(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _has_views(kind.storage_type)
    return _is_view(kind) or any(_has_views(kind.field(n).type) for n in range(kind.num_fields))


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _cleared(array: Any) -> Any:
    kind = array.type
    if _is_view(kind):
        return _cleared_views(array) if array.null_count else array
    if not _has_views(kind):
        return array
    if pa.types.is_dictionary(kind):
        values = _cleared(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _cleared(array.storage))
    if pa.types.is_struct(kind):
        children = [_cleared(array.field(n)) for n in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=array.is_null())
    own = array.buffers()[: kind.num_buffers]
    inner = [_cleared(array.values)]
    return pa.Array.from_buffers(kind, len(array), own, array.null_count, array.offset, inner)


def _cleared_views(array: Any) -> Any:
    validity, views, *content = array.buffers()
    ints = np.frombuffer(views, np.int32).reshape(-1, _INTS)
    nulls = array.offset + np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
    if not ints[nulls, 0].any():
        return array
    ints = ints.copy()
    ints[nulls] = 0
    buffers = [validity, pa.py_buffer(ints), *content]
    return pa.Array.from_buffers(array.type, len(array), buffers, array.null_count, array.offset)
