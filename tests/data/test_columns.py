"""Arrow columns as arrays."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from elastic_dp.data.columns.arrow_arrays import decode_column
from tests.data.shards import BINARY, config, expected, in_memory, nested, refused, rows_of


def decoded(values, kind=None):
    return decode_column(pa.chunked_array([pa.array(values, kind)]), "column 'x' of a.parquet")


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


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_every_column_of_binary_shards(kind, where, dictionary, tmp_path):
    tables = [nested(0, 37), nested(37, 16)]
    if not dictionary:
        tables = [t.set_column(9, "kind", t["kind"].cast(pa.string())) for t in tables]
    for number, content in enumerate(tables):
        BINARY[kind](tmp_path / f"part-{number}", content)
    rows, counts = rows_of(where(tmp_path))
    assert counts == [16, 16, 5, 16]
    assert rows == expected(pa.concat_tables(tables))
    some, _ = rows_of(where(tmp_path), columns=["at.deep", "ragged"])
    assert some == [{"at.deep.y": row["at.deep.y"], "ragged": row["ragged"]} for row in rows]


DOTTED = pa.table({"id": [1, 2], "a.b": [3, 4], "a.b.c": [5, 6]})


STRUCT = pa.array([{"b": 7, "c": 8}] * 2)


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_a_column_with_a_dot_in_its_name_is_read_by_exactly_that_name(kind, tmp_path):
    BINARY[kind](tmp_path / "a", DOTTED)
    assert rows_of(tmp_path)[0] == DOTTED.to_pylist()
    for some in (["a.b"], ["a.b.c", "id"], ["id", "a.b"]):
        assert rows_of(tmp_path, columns=some)[0] == DOTTED.select(some).to_pylist()
    for name in ("a", "a.b.c.d", "b"):
        words = rf"no column '{name}' in .*a\.\w+, which ha(s|ve) 'id', 'a\.b'"
        refused(config(tmp_path, columns=["id", name]), words)


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_a_name_that_means_a_column_and_a_field_of_a_struct_is_refused(kind, tmp_path):
    """Only where it is asked for: the struct's other fields, and other columns, can be read."""
    BINARY[kind](tmp_path / "a", DOTTED.append_column("a", STRUCT))
    for wanted in (None, ["a.b"], ["a"]):
        words = r"'a\.b' names 2 things in a\.\w+: columns with a dot"
        refused(config(tmp_path, columns=wanted), words)
    rows, _ = rows_of(tmp_path, columns=["a.c", "id", "a.b.c"])
    assert rows == [{"a.c": 8, "id": 1, "a.b.c": 5}, {"a.c": 8, "id": 2, "a.b.c": 6}]
