"""Arrow columns as arrays."""

import numpy as np
import pyarrow as pa
import pytest

from elastic_dp.data.columns import decode_column
from elastic_dp.errors import DataError


def decoded(values, kind=None):
    return decode_column(pa.chunked_array([pa.array(values, kind)]), "column 'x' of a.parquet")


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([1, None], None, r"column 'x' of a\.parquet holds 1 null"),
        ([[1], None], None, r"holds 1 null"),
        ([[1, None]], None, r"holds 1 null"),
        ([[[1], [1, 2]]], None, r"lists of lists of different lengths"),
        ([[{"a": 1}]], None, r"struct<a: int64>, which has no tensor"),
    ],
)
def test_what_has_no_tensor(values, kind, said):
    with pytest.raises(DataError, match=said):
        decoded(values, kind)


def test_dictionaries_tensors_and_fixed_bytes():
    assert decoded(pa.array([5, 6, 5]).dictionary_encode()).tolist() == [5, 6, 5]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(2, 3, 2))
    assert decoded(tensors).shape == (2, 3, 2)
    assert decoded([b"ab", b"cd", b"ef"], pa.binary(2))[1:].tolist() == [[99, 100], [101, 102]]
