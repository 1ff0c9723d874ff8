"""Arrow columns as arrays."""

import numpy as np
import pyarrow as pa
import pytest

from elastic_dp.data.columns.arrow_arrays import decode_column
from elastic_dp.errors import DataError


def decoded(values, kind=None):
    return decode_column(pa.chunked_array([pa.array(values, kind)]), "column 'x' of a.parquet")


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([1, None], None, r"column 'x' of a\.parquet holds 1 null"),
        ([[1], None], None, r"holds 1 null list; write an empty list"),
        ([[1, None]], None, r"holds 1 null"),
        ([[1, 2]], pa.list_view(pa.int64()), r"list_view<item: int64>, which has no tensor"),
    ],
)
def test_decode_of_a_type_without_a_tensor_is_refused(values, kind, said):
    with pytest.raises(DataError, match=said):
        decoded(values, kind)


def test_dictionaries_tensors_and_fixed_bytes():
    assert decoded(pa.array([5, 6, 5]).dictionary_encode()).tolist() == [5, 6, 5]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(2, 3, 2))
    assert decoded(tensors).shape == (2, 3, 2)
    assert decoded([b"ab", b"cd", b"ef"], pa.binary(2))[1:].tolist() == [[99, 100], [101, 102]]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64()])
def test_numbers_of_a_slice(kind):
    whole = pa.array(range(100), pa.int64()).cast(kind)
    for start, length in ((0, 100), (7, 50), (99, 1), (100, 0)):
        column = decoded(whole.slice(start, length))
        assert column.tolist() == list(range(start, start + length))
        assert column.dtype == np.dtype(kind.to_pandas_dtype())
    lists = pa.ListArray.from_arrays(pa.array(range(0, 101, 5), pa.int32()), whole)
    assert decoded(lists.slice(3, 4)).tolist() == np.arange(15, 35).reshape(4, 5).tolist()
    assert decoded(pa.array([], kind)).dtype == np.dtype(kind.to_pandas_dtype())


def test_memory_that_is_another_ones_is_not_to_be_written_to():
    own, mapped = pa.allocate_buffer(80), pa.py_buffer(bytes(80))
    for memory, writeable in ((own, True), (mapped, False)):
        column = decoded(pa.Array.from_buffers(pa.int64(), 10, [None, memory]))
        assert column.flags.writeable == writeable
