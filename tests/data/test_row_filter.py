"""Row filters: which rows are part of the data set, and what is read to find out."""

import dataclasses

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data.columns import row_filter
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.errors import BadShard, DataError, SpecError
from tests.data.shards import damage, refused
from tests.data.test_rows_in_rows_out import dealt, evaluated, row, written
from tests.data.values import in_place


def ids(folder, shards=2, rows=100):
    folder.mkdir()
    for shard in range(shards):
        made = pa.table({"id": range(shard * rows, (shard + 1) * rows)})
        pq.write_table(made, folder / f"{shard}.parquet", row_group_size=10)
    return DataConfig(str(folder), micro_batch_size=1)


def where(config, expression):
    return dataclasses.replace(config, filter=expression)


@pytest.mark.parametrize(
    "kind",
    ["parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("arrow_stream", "tar"))],
)
def test_rows_that_a_filter_keeps_are_dealt_once_to_one_worker_and_to_three(kind, tmp_path):
    name = "cls" if kind == "tar" else "id"
    odd = pc.bit_wise_and(pc.field(name), pc.scalar(1)) == 1
    config = where(written(kind, tmp_path / "in"), odd)
    alone = dealt(config, 1)
    assert alone == dealt(config, 3)
    wanted = [row(i) for i in range(1, 96, 2)]
    assert sorted((r for step in alone for r in step), key=lambda r: r["id"]) == wanted
    assert evaluated(config, 1) == evaluated(config, 3) == wanted


def test_filter_is_exact_where_statistics_are_missing(tmp_path):
    (tmp_path / "in").mkdir()
    made = pa.table({"id": range(100)})
    pq.write_table(made, tmp_path / "in/a.parquet", row_group_size=10, write_statistics=False)
    config = DataConfig(str(tmp_path / "in"), micro_batch_size=1)
    found = in_place(where(config, (pc.field("id") > 17) & (pc.field("id") < 34)))
    assert found == {"id": list(range(18, 34))}


def test_filter_that_keeps_other_rows_is_another_data_set(tmp_path):
    config = ids(tmp_path / "in")
    plain = read_index(config)
    one, same, other = (
        read_index(where(config, fits))
        for fits in (pc.field("id") == 7, pc.field("id").isin([7]), pc.field("id") == 8)
    )
    assert one.digest == same.digest
    assert len({plain.digest, one.digest, other.digest}) == 3
    assert Index.from_bytes(one.to_bytes()).digest == one.digest


def test_filter_that_cannot_be_applied_is_refused_by_name(tmp_path):
    config = ids(tmp_path / "in")
    for one, words in (
        (pc.field("y") == 1, "no column 'y' in 0\\.parquet"),
        (pc.field("id") + 1, ".*must evaluate to bool"),
        (pc.field("id") < 0, "no row of 200 fits"),
    ):
        refused(where(config, one), rf"DataConfig\.filter: {words}")
    with pytest.raises(SpecError, match=r"DataConfig\.filter is 'id > 3', must be an expression"):
        where(config, "id > 3")


def test_filter_keeps_rows_that_statistics_do_not_count(tmp_path):
    made = pa.table({"x": [4.0, float("nan"), 5.0]})
    pq.write_table(made, tmp_path / "a.parquet")
    config = DataConfig(str(tmp_path), micro_batch_size=1)
    assert read_index(where(config, ~(pc.field("x") > 3))).num_rows == 1


def test_row_group_that_cannot_be_decoded_is_named_when_a_filter_is_applied(tmp_path, caplog):
    config = ids(tmp_path / "in")
    damage(config, 13)
    config = where(config, pc.field("id") > 5)
    with pytest.raises(BadShard, match=r"row group 3 of 1\.parquet cannot be decoded") as found:
        read_index(config)
    assert (found.value.shard, found.value.row_group) == ("1.parquet", 3)
    index = read_index(dataclasses.replace(config, max_bad_fraction=0.01))
    assert index.rows.tolist() == [4, *[10] * 19]  # all rows of it, which training skips
    assert "row group 3 of 1.parquet cannot be decoded" in caplog.text


def test_filter_that_fails_on_some_rows_is_no_bad_row_group(tmp_path):
    config = dataclasses.replace(ids(tmp_path / "in"), max_bad_fraction=0.01)
    expression = pc.divide(pc.scalar(6), pc.field("id")) > 1
    refused(where(config, expression), r"filter.*row group 0 of 0\.parquet: divide by zero")


def test_a_wrong_list_of_columns_is_refused(monkeypatch):
    """The list is read from a form of the expression that pyarrow may change."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    assert row_filter.RowFilter(pc.field("a") > 1, schema).names == ["a"]
    for found in ([], ["b"]):
        monkeypatch.setattr(row_filter, "columns_of", lambda _, found=found: found)
        with pytest.raises(DataError, match="cannot be applied"):
            row_filter.RowFilter(pc.field("a") > 1, schema)
