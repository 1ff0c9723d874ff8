"""Every format against pyarrow reading the whole shard."""

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest
from hypothesis import strategies as st

from tests.data.shards import BINARY, expected, in_memory, nested, rows_of

odd_fields = st.lists(st.sampled_from(['"', '""', "b", "\n3,", "\r", " "]), max_size=5).map("".join)


def ends_quoted(content: str) -> bool:
    """RFC 4180, character by character: whether a quoted field is still open at the end."""
    state = "start"
    for mark in content:
        if state == "quoted":
            state = "quote" if mark == '"' else "quoted"
        elif mark == '"' and state in ("start", "quote"):
            state = "quoted"
        else:
            state = "start" if mark in ",\r\n" else "field"
    return state == "quoted"


def has_only_nulls(table: pa.Table) -> bool:
    return any(not any(column.to_pylist()) for column in table.columns)


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
