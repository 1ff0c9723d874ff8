"""Arrow columns as arrays."""

import itertools

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
        ([[1], None], None, r"holds 1 null; leave these rows out"),
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


@pytest.mark.parametrize("lists", [pa.list_, pa.large_list])
def test_lists_of_a_slice(lists):
    ragged = [[1], [], [2, 3], [4, 5, 6], [7]]
    for start, length in ((0, 5), (1, 3), (2, 2), (4, 1)):
        column = decoded(pa.array(ragged, lists(pa.int32())).slice(start, length))
        wanted = ragged[start : start + length]
        if length == 1:
            assert column.tolist() == wanted
            continue
        bounds = column.offsets.tolist()
        assert [column.values[a:b].tolist() for a, b in itertools.pairwise(bounds)] == wanted
    nested = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]]
    assert decoded(pa.array(nested, lists(lists(pa.int8()))).slice(1)).tolist() == nested[1:]
    assert len(decoded(pa.array([[1]], lists(pa.int8())).slice(1)).values) == 0


def test_memory_that_is_another_ones_is_not_to_be_written_to():
    own, mapped = pa.allocate_buffer(80), pa.py_buffer(bytes(80))
    for memory, writeable in ((own, True), (mapped, False)):
        column = decoded(pa.Array.from_buffers(pa.int64(), 10, [None, memory]))
        assert column.flags.writeable == writeable
