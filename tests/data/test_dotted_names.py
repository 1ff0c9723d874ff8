"""Names of columns that have a dot, beside fields of structs."""

import pyarrow as pa
import pytest

from tests.data.shards import BINARY, refused, rows_of
from tests.data.test_index import config

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
