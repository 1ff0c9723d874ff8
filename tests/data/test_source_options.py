"""Options of single sources of a mixture: columns and a transform of their own, for any workers, in
threads and in processes; epochs; and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.data.discovery.index_difference import difference
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.errors import DataError, SpecError, UserCodeError
from tests.data.test_rows_in_rows_out import evaluated, rows_of

ROWS, B, V, STEPS = 500, 3, 4, 6


def written(folder: Path) -> tuple[str, str]:
    """Two sources with nothing in common but what their transforms make of it."""
    numbers, texts = folder / "numbers", folder / "texts"
    numbers.mkdir(parents=True)
    texts.mkdir()
    made = pa.table(
        {"id": range(ROWS), "x": [[float(i)] * 3 for i in range(ROWS)], "y": range(ROWS)}
    )
    pq.write_table(made, numbers / "a.parquet", row_group_size=70)
    rows = [
        {"text": f"{i},{i},{i}", "n": i, "y": None, "note": [{"a": 1}]}
        for i in range(1000, 1000 + ROWS)
    ]
    (texts / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(numbers), str(texts)


def of_numbers(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    assert batch.keys() == {"id", "x"}
    return {**batch, "noise": rng.random(len(batch["id"]))}


def of_texts(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    assert batch.keys() == {"n", "text"}
    x = np.array([[float(part) for part in text.split(",")] for text in batch["text"]])
    return {"id": batch["n"], "x": x, "noise": rng.random(len(x))}


def mixed(folder: Path, **changes: Any) -> DataConfig:
    numbers, texts = written(folder)
    options = {
        numbers: {"columns": ["id", "x"], "transform": of_numbers},
        texts: {"columns": ["n", "text"], "transform": of_texts},
    }
    given = {"micro_batch_size": B, "source_options": options, **changes}
    return DataConfig({numbers: 0.5, texts: 0.5}, **given)


def taken(config: DataConfig, workers: int) -> list[dict[str, Any]]:
    """The rows of the first steps, from data sets of as many workers."""
    data = [open_data(config, virtual_workers=V) for _ in range(workers)]
    for number, one in enumerate(data):
        one.read_ahead(1, range(number, V, workers))
    slots = [(step, v) for step in range(1, STEPS + 1) for v in range(V)]
    rows = [row for step, v in slots for row in rows_of(data[v % workers].batch(step, v))]
    for one in data:
        one.close()
    return rows


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sources_with_other_columns_become_rows_of_one_kind(workers, tmp_path):
    config = mixed(tmp_path, workers=workers)
    rows = taken(config, 1)
    assert rows == taken(config, 3)
    assert all(row["x"] == [row["id"]] * 3 for row in rows)
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids) and {i // 1000 for i in ids} == {0, 1}
    assert len({row["noise"] for row in rows}) == len(rows)


def test_evaluations_read_all_rows_of_such_sources_in_order(tmp_path):
    found = evaluated(mixed(tmp_path), 1)
    assert [row["id"] for row in found] == [*range(ROWS), *range(1000, 1000 + ROWS)]
    assert all(row["x"] == [row["id"]] * 3 for row in found)


def test_columns_of_sources_travel_with_the_index_and_are_compared(tmp_path):
    config = mixed(tmp_path)
    index = read_index(config)
    assert [source.columns for source in index.sources] == [("id", "x"), ("n", "text")]
    again = Index.from_bytes(index.to_bytes())
    assert again.digest == index.digest and again.sources == index.sources
    _, texts = config.urls
    assert config.source_options is not None
    other = {**config.source_options, texts: {"columns": ["n"]}}
    changed = read_index(dataclasses.replace(config, source_options=other))
    assert changed.digest != index.digest
    said = difference(index, changed)
    assert said == "the columns of source 1 were ['n', 'text'], and are ['n']"


def test_rows_of_a_bad_row_group_are_left_out_of_their_source_alone(tmp_path):
    config = mixed(tmp_path, on_bad_shard="skip", max_bad_fraction=0.5)
    path = tmp_path / "numbers" / "a.parquet"
    at = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[at : at + 8] = b"\xff" * 8
    path.write_bytes(content)
    found = evaluated(dataclasses.replace(config, micro_batch_size=100), 1)
    assert [row["id"] for row in found] == [
        *range(140),
        *range(210, ROWS),
        *range(1000, 1000 + ROWS),
    ]
    assert all(row["x"] == [row["id"]] * 3 for row in found)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda batch, rng: [1], "returned a list, must return a dict of columns"),
        (lambda batch, rng: {"id": batch["id"][:1]}, r"column 'id' as a ndarray with 1 rows"),
        (lambda batch, rng: {"id": batch["id"]}, "let the transforms of source_options return"),
        (
            lambda batch, rng: {**of_numbers(batch, rng), "id": batch["id"].astype(np.int32)},
            "column 'id' is int32 of .* and int64 of .* in one micro-batch",
        ),
        (lambda batch, rng: 1 / 0, r"source_options\['.*numbers'\]\['transform'\] raised Zero"),
    ],
)
def test_transforms_of_sources_that_return_something_else_are_refused_by_name(
    transform, message, tmp_path
):
    config = mixed(tmp_path, micro_batch_size=12)
    numbers, _ = config.urls
    assert config.source_options is not None
    options = {**config.source_options[numbers], "transform": transform}
    config = dataclasses.replace(config, source_options={**config.source_options, numbers: options})
    data = open_data(config, virtual_workers=1)
    try:
        with pytest.raises((DataError, UserCodeError), match=message):
            data.batch(1, 0)
    finally:
        data.close()


def test_a_transform_of_a_source_that_draws_from_global_generators_is_refused(tmp_path):
    config = mixed(tmp_path, columns=["id"])
    _, texts = config.urls
    options = {texts: {"columns": ["n"], "transform": lambda batch: batch}}
    config = dataclasses.replace(config, source_options=options)
    with pytest.raises(SpecError, match=r"takes \(batch\), must take \(batch, rng\)"):
        open_data(config, virtual_workers=1)


def test_columns_that_a_source_has_not_are_refused_and_so_is_a_filter_by_others(tmp_path):
    config = mixed(tmp_path)
    numbers, texts = config.urls
    options = {numbers: {"columns": ["id"]}, texts: {"columns": ["id"]}}
    with pytest.raises(DataError, match=r"texts'\]: no column 'id' in its shards, which have"):
        read_index(dataclasses.replace(config, source_options=options))
    with pytest.raises(
        DataError, match=r"filter uses 'id', and .*texts'\]: no column 'id' in its shards"
    ):
        read_index(dataclasses.replace(config, filter=pc.field("id") > 3))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("a", {}, r"source_options is set, and url has no weights"),
        ({"a": 1}, ["a"], "source_options is .* must be a dict of URLs"),
        ({"a": 1}, {"b": {}}, r"source_options\['b'\]: DataConfig.url names no such source"),
        ({"a": 1}, {"a": 3}, r"source_options\['a'\] is 3, must be a dict of columns, transform"),
        ({"a": 1}, {"a": {"shuffle": 1}}, r"\['a'\] has no 'shuffle', only columns, transform, ep"),
        ({"a": 1}, {"a": {"columns": "x"}}, r"\['a'\]\['columns'\] must be a list"),
        ({"a": 1}, {"a": {"transform": 1}}, r"\['a'\]\['transform'\] is 1, must be a function"),
        ({"a": 1}, {"a": {"epochs": 0}}, r"\['a'\]\['epochs'\] is 0, must be at least 1"),
        ({"a": 1}, {"a": {"epochs": 1}}, "every source with a weight after 0 steps has epochs"),
        (
            {0: {"a": 1, "b": 1}, 9: {"a": 1}},
            {"a": {"epochs": 1}},
            "every source with a weight after 9 steps has epochs",
        ),
        ({"a": 1, "b": 1}, {"a": {"columns": ["x"]}}, r"\['b'\] has no 'columns', and another"),
    ],
)
def test_options_of_sources_that_are_wrong_are_refused_by_name(url, options, message):
    with pytest.raises(SpecError, match=message):
        DataConfig(url, micro_batch_size=1, source_options=options)
