"""Packing with a filter on columns that are not packed: they are read for the filter alone."""

import dataclasses
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.columns.row_filter import columns_of
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.formats.parquet import Parquet
from tests.data.shards import refused, write_arrow
from tests.data.test_packing import LENGTH, B, document, epoch_of
from tests.data.values import in_place

SHARDS, ROWS = 3, 40  # documents of a shard
Row = dict[str, Any]
GOOD = (pc.field("language") == "en") & (pc.field("score") > 0.5)


def row(i):
    language = (None, "en", "de", "en")[i % 4]
    return {"input_ids": document(i), "language": language, "score": i % 7 / 7}


def is_good(i):
    return i % 4 in (1, 3) and i % 7 / 7 > 0.5


def table(rows):
    types = {"input_ids": pa.list_(pa.int64()), "language": pa.string(), "score": pa.float64()}
    return pa.Table.from_pylist(rows, pa.schema({name: types[name] for name in rows[0]}))


def parquet(path, rows):
    pq.write_table(table(rows), path.with_suffix(".parquet"), row_group_size=7)


def arrow(path, rows):
    write_arrow(path.with_suffix(".arrow"), table(rows), chunk=9)


def shards(folder, write=parquet):
    folder.mkdir()
    for shard in range(SHARDS):
        write(folder / str(shard), [row(i) for i in range(shard * ROWS, (shard + 1) * ROWS)])
    how = {"micro_batch_size": B, "pack": LENGTH, "tail": "short", "filter": GOOD}
    return DataConfig(str(folder), columns=["input_ids"], **how)


def hive(folder):
    """A folder for each language; documents of a shard have all of it or none."""
    for number, language in enumerate(("de", "en", "fr")):
        rows = [row(i) for i in range(number * ROWS, (number + 1) * ROWS)]
        for one in rows:
            del one["language"]
        (place := folder / f"language={language}").mkdir(parents=True)
        parquet(place / "a", rows)
    return DataConfig(
        f"{folder}/**", columns=["input_ids"], micro_batch_size=B, pack=LENGTH, tail="short"
    )


def tokens(rows):
    each = [zip(r["input_ids"], r["document_ids"], strict=True) for r in rows]
    return [token for pairs in each for token, number in pairs if number >= 0]


def expected(ids):
    return sorted(token for i in ids for token in document(i))


@pytest.mark.parametrize("write", [parquet, pytest.param(arrow, marks=pytest.mark.slow)])
def test_documents_are_chosen_by_columns_that_are_not_packed(write, tmp_path):
    config = shards(tmp_path / "in", write)
    alone = epoch_of(config, 1)
    assert alone == epoch_of(config, 3)
    assert alone[0].keys() == {"input_ids", "position_ids", "document_ids"}
    assert sorted(tokens(alone)) == expected(i for i in range(SHARDS * ROWS) if is_good(i))
    nowhere = dataclasses.replace(config, filter=pc.field("lang") == "en")
    refused(nowhere, r"DataConfig\.filter: no column 'lang' in 0\.")
    every = dataclasses.replace(config, columns=None)
    refused(every, r"column 'language' is string, and must be a list .*DataConfig\.columns")
    again = Index.from_bytes(read_index(config).to_bytes())
    assert again.delivered.names == ["input_ids"] and again.num_rows == sum(
        is_good(i) for i in range(SHARDS * ROWS)
    )


def test_documents_are_chosen_by_columns_in_names_of_folders_without_reading_others(
    tmp_path, monkeypatch
):
    config = hive(tmp_path / "in")
    english = dataclasses.replace(config, filter=pc.field("language") == "en")
    rows = epoch_of(english, 1)
    assert rows == epoch_of(english, 3)
    assert sorted(tokens(rows)) == expected(range(ROWS, 2 * ROWS))
    both = dataclasses.replace(config, filter=GOOD)
    kept = [i for i in range(ROWS, 2 * ROWS) if i % 7 / 7 > 0.5]
    assert sorted(tokens(epoch_of(both, 3))) == expected(kept)

    decode, read = Parquet.read, list[str]()

    def noting(self, shard, *others):
        read.append(shard.name)
        return decode(self, shard, *others)

    monkeypatch.setattr(Parquet, "read", noting)
    index = read_index(english)
    assert not read and index.tokens is not None
    assert index.tokens.sum() == len(expected(range(ROWS, 2 * ROWS)))
    one = (pc.field("language") == "en") & (pc.list_value_length(pc.field("input_ids")) < 0)
    refused(dataclasses.replace(config, filter=one), "no row of 120 fits")


def test_filter_uses_columns_that_are_not_named_without_packing_too(tmp_path):
    config = dataclasses.replace(shards(tmp_path / "in"), pack=None, columns=["input_ids"])
    found = in_place(config)
    assert found == {"input_ids": [document(i) for i in range(SHARDS * ROWS) if is_good(i)]}


def test_filter_uses_a_field_of_a_struct_beside_another_one_that_is_named(tmp_path):
    rows = [{"a": i, "b": i % 2} for i in range(9)]
    pq.write_table(pa.table({"s": rows}), tmp_path / "a.parquet")
    config = DataConfig(str(tmp_path), columns=["s.a"], micro_batch_size=1)
    odd = dataclasses.replace(config, filter=pc.field("s", "b") == 1)
    assert in_place(odd) == {"s.a": [1, 3, 5, 7]}


@pytest.mark.parametrize("pack", [None, LENGTH])
@pytest.mark.parametrize("statistics", [True, False])
def test_rows_that_are_null_in_a_filter_column_are_left_out(pack, statistics, tmp_path):
    made = pa.table({"input_ids": [document(i) for i in range(9)], "score": [None, *range(8)]})
    pq.write_table(made, tmp_path / "a.parquet", write_statistics=statistics)
    named = {"columns": ["input_ids"], "micro_batch_size": 1, "pack": pack}
    config = DataConfig(str(tmp_path), filter=pc.field("score") < 99, **named)
    assert read_index(config).num_rows == 8


def test_columns_of_an_expression_are_found_in_calls_and_structs():
    one = (pc.field("a") == "b") & pc.field("s", "x").isin([1, 2]) | pc.is_null(
        pc.field("ü: 'q'\nend")
    )
    assert columns_of(one) == ["a", "s.x", "ü: 'q'\nend"]
    assert columns_of(pc.scalar(True)) == []
