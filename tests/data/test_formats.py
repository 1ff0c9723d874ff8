"""Every format against pyarrow reading the whole shard."""

import pyarrow as pa
import pytest

from tests.data.shards import BINARY, expected, in_memory, nested, rows_of


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
