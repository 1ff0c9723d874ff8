"""Packing while training: each token of each document in one packed row of an epoch, with its
position and document; the same rows for any number of workers, under a kill and over a resume."""

import dataclasses
import json
import shutil

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation, read_index
from elastic_dp.data.discovery.index_difference import difference
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.errors import BadShard, DataError, SpecError
from tests.data.shards import batches_of, damage, refused, write_arrow
from tests.data.test_rows_in_rows_out import rows_of
from tests.runs import group, spec_of

V, B, LENGTH, DOCUMENTS = 4, 2, 16, 60
Row = dict[str, list[int]]


def document(i):
    """Token p of document i is 1000 i + p, from 1."""
    return [1000 * i + p + 1 for p in range(i * 7 % 23)]  # some are empty


def table(ids):
    made = [document(i) for i in ids]
    return pa.table(
        {
            "input_ids": pa.array(made, pa.list_(pa.int32())),
            "labels": pa.array([[-token for token in one] for one in made], pa.list_(pa.int64())),
        }
    )


def parquet(path, ids):
    pq.write_table(table(ids), path.with_suffix(".parquet"), row_group_size=7)


def parquet_by_polars(path, ids):
    pl.from_arrow(table(ids)).write_parquet(path.with_suffix(".parquet"), row_group_size=7)


def arrow(path, ids):
    write_arrow(path.with_suffix(".arrow"), table(ids), chunk=9)


KINDS = {write.__name__: write for write in (parquet, parquet_by_polars, arrow)}


def packed(folder, kind="parquet", **changes):
    folder.mkdir(parents=True)
    for shard in range(3):
        ids = range(DOCUMENTS * shard // 3, DOCUMENTS * (shard + 1) // 3)
        KINDS[kind](folder / f"{shard}", ids)
    options = {"micro_batch_size": B, "pack": LENGTH, "tail": "short", "seed": 3}
    options["epochs"] = 2  # little is made ahead
    return DataConfig(str(folder), **options | changes)


def epoch_of(config, workers, epoch=0):
    return [row for _, batch in batches_of(config, workers, V, epoch) for row in rows_of(batch)]


def check(rows, ids=range(DOCUMENTS)):
    """Each token once, and each row is parts of documents with their positions and numbers."""
    seen = []
    for row in rows:
        assert row["labels"] == [-token for token in row["input_ids"]]
        tokens = [t for t, d in zip(row["input_ids"], row["document_ids"], strict=True) if d >= 0]
        assert row["input_ids"] == tokens + [0] * (LENGTH - len(tokens))  # padding comes last
        seen += tokens
        number = position = -1
        for i, token in enumerate(tokens):
            follows = i > 0 and token == tokens[i - 1] + 1
            number, position = (number, position + 1) if follows else (number + 1, 0)
            assert (row["document_ids"][i], row["position_ids"][i]) == (number, position)
        assert row["position_ids"][len(tokens) :] == [0] * (LENGTH - len(tokens))
    assert sorted(seen) == sorted(token for i in ids for token in document(i))
    assert sum(0 in row["input_ids"] for row in rows) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_packed_once_for_one_worker_and_for_three(kind, tmp_path):
    config = packed(tmp_path / "in", kind)
    alone = epoch_of(config, 1)
    assert alone == epoch_of(config, 3)
    check(alone)
    other = epoch_of(config, 1, epoch=1)
    check(other)
    assert alone != other


def test_row_group_that_stays_in_memory_gives_each_epoch_its_own_order(tmp_path):
    (folder := tmp_path / "in").mkdir()
    parquet(folder / "0", range(6))
    options = {"micro_batch_size": 1, "pack": LENGTH, "tail": "short"}
    config = DataConfig(str(folder), **options, epochs=4)
    data = open_data(config, virtual_workers=1)
    steps = data.steps_per_epoch
    data.read_ahead(1, range(1))
    found = [rows_of(data.batch(step, 0)) for step in range(1, 1 + 4 * steps)]
    for epoch in range(4):
        rows = [row for step in found[epoch * steps : (epoch + 1) * steps] for row in step]
        check(rows, range(6))
        alone = open_data(config, virtual_workers=1)  # first of all this epoch
        each = (alone.batch(1 + epoch * steps + step, 0) for step in range(steps))
        assert rows == [row for batch in each for row in rows_of(batch)]
    assert found[:steps] != found[steps : 2 * steps]


MADE = ("position_ids", "document_ids")


@pytest.mark.parametrize("made", [(), MADE[:1], MADE[1:]])
@pytest.mark.parametrize("shuffle", ["none", "rows"])
def test_pack_columns_leave_out_what_is_not_wanted_and_change_nothing_else(shuffle, made, tmp_path):
    config = packed(tmp_path / "in", shuffle=shuffle)
    wanted = ["input_ids", "labels", *made]
    rows = epoch_of(dataclasses.replace(config, pack_columns=made), 3)
    assert rows == [{name: row[name] for name in wanted} for row in epoch_of(config, 1)]
    evaluations = []
    for each in (config, dataclasses.replace(config, pack_columns=made)):
        data = open_evaluation(each)
        evaluations.append(rows_of(data.batch(data.num_batches - 1)))
    assert evaluations[1] == [{name: row[name] for name in wanted} for row in evaluations[0]]


@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_each_token_is_packed_once_in_any_shuffle(shuffle, tmp_path):
    config = packed(tmp_path / "in", shuffle=shuffle)
    rows = epoch_of(config, 3)
    check(rows)
    in_order = [token for i in range(DOCUMENTS) for token in document(i)]
    flat = [t for row in rows for t in row["input_ids"]]
    assert (flat[: len(in_order)] == in_order) == (shuffle == "none")


def test_last_tokens_are_dropped_in_each_epoch_and_not_the_same(tmp_path):
    config = packed(tmp_path / "in", tail="drop")
    every = {token for i in range(DOCUMENTS) for token in document(i)}
    lost = []
    for epoch in (0, 1):
        rows = epoch_of(config, 1, epoch)
        seen = [token for row in rows for token in row["input_ids"]]
        assert len(set(seen)) == len(seen) and len(rows) % (V * B) == 0
        lost.append(every - set(seen))
        assert len(lost[-1]) < (V * B + 1) * LENGTH
    assert lost[0] != lost[1]


def test_evaluation_packs_every_token_once_in_file_order(tmp_path):
    config = packed(tmp_path / "in")
    found = []
    for workers in (1, 3):
        data = [open_evaluation(config) for _ in range(workers)]
        rows = [
            row for n in range(data[0].num_batches) for row in rows_of(data[n % workers].batch(n))
        ]
        found.append(rows)
    assert found[0] == found[1]
    check(found[0])
    tokens = [token for row in found[0] for token in row["input_ids"] if token]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_documents_that_a_filter_leaves_out_are_not_packed(kind, tmp_path):
    kept = pc.greater(pc.list_value_length(pc.field("input_ids")), 9)
    config = packed(tmp_path / "in", kind, filter=kept)
    rows = epoch_of(config, 3)
    check(rows, [i for i in range(DOCUMENTS) if len(document(i)) > 9])


def test_tokens_are_counted_by_footers_as_by_reading(tmp_path, monkeypatch):
    by_footer = read_index(packed(tmp_path / "a"))
    monkeypatch.setattr(Parquet, "list_values", lambda *given: None)
    by_reading = read_index(packed(tmp_path / "b"))
    assert by_footer.tokens is not None and by_reading.tokens is not None
    assert by_footer.tokens.tolist() == by_reading.tokens.tolist()
    assert sum(by_footer.tokens) == sum(len(document(i)) for i in range(DOCUMENTS))


def test_row_group_that_cannot_be_decoded_is_named_when_its_tokens_are_counted(tmp_path):
    config = packed(tmp_path / "in", "parquet_by_polars")
    damage(config, 4)
    with pytest.raises(BadShard, match=r"row group 1 of 1\.parquet cannot be decoded"):
        read_index(config)


def test_footers_by_arrow_are_all_that_is_read_at_open(tmp_path, monkeypatch):
    config = packed(tmp_path / "a")
    monkeypatch.setattr(Parquet, "read", lambda *given: pytest.fail("a row group was read"))
    index = read_index(config)
    again = Index.from_bytes(index.to_bytes())
    assert again.digest == index.digest and np.array_equal(again.tokens, index.tokens)


def train(ctx):
    model = torch.nn.Linear(LENGTH, 1)
    with open(f"{ctx.config['folder']}/{ctx._session.worker}", "a", buffering=1) as log:

        def loss_fn(m, batch):
            log.write(json.dumps(rows_of(batch)) + "\n")
            return m(batch["input_ids"].float() / 60_000 + batch["position_ids"]).square().mean()

        for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss_fn):
            pass


def rows_in(log):
    """The packed rows that the workers logged, each once: a worker tries `loss_fn` with the first
    micro-batch of the run before it trains, and the last line may be cut if it was killed."""
    lines = [line for file in log.iterdir() for line in file.read_text().splitlines(keepends=True)]
    logged = [row for line in lines if line.endswith("\n") for row in json.loads(line)]
    return {str(row): row for row in logged}


def test_packed_rows_resumed_within_an_epoch_on_another_number_of_workers_come_once(tmp_path):
    """Two workers until step 2 of 6, then one or three."""
    config = packed(tmp_path / "in")
    data = open_data(config, virtual_workers=V)
    steps, tried = data.steps_per_epoch, {str(row) for row in rows_of(data.batch(1, 0))}

    def trained(workers, last, folder):
        log = folder / f"workers-{workers}"
        log.mkdir(parents=True)
        options = {"folder": str(log)}
        spec = spec_of(steps=last, workers=workers, min_workers=workers, virtual=V, config=options)
        spec = dataclasses.replace(spec, data=config)
        outcome, _ = group(spec, train, url=str(folder / "run"))
        assert outcome.step == last and len(list(log.iterdir())) == workers
        return outcome.digest, rows_in(log)

    undisturbed, every = trained(1, steps, tmp_path / "undisturbed")
    _, before = trained(2, 2, tmp_path / "first")
    assert len(before) == 2 * V * B
    for workers in (1, 3):
        folder = tmp_path / f"resumed-{workers}"
        shutil.copytree(tmp_path / "first/run", folder / "run")
        digest, after = trained(workers, steps, folder)
        assert digest == undisturbed
        assert before.keys() & after.keys() <= tried
        assert before | after == every
    check(list(every.values()))


def write(folder, **columns):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return DataConfig(str(folder), pack=4, micro_batch_size=1)


def test_columns_that_cannot_be_packed_are_refused_by_name(tmp_path):
    lists = [[1, 2, 3], [4, 5, 6, 7]]
    texts = write(tmp_path, input_ids=lists, text=["a", "b"])
    refused(texts, r"column 'text' is string, and must be a list with one")
    own = write(tmp_path, input_ids=lists, position_ids=lists)
    refused(own, r"makes the column 'position_ids', and the data set has")
    data = open_data(dataclasses.replace(own, pack_columns=["document_ids"]), virtual_workers=1)
    (row,) = rows_of(data.batch(1, 0))
    assert row["position_ids"] == row["input_ids"] and "document_ids" in row
    data = open_data(write(tmp_path, input_ids=lists, labels=[[1, 2], lists[1]]), virtual_workers=1)
    with pytest.raises(DataError, match=r"row 0 of a\.parquet has 3 values .* and 2 in 'labels'"):
        data.batch(1, 0)
    config = dataclasses.replace(write(tmp_path, input_ids=lists), pack=8)
    with pytest.raises(DataError, match=r"7 tokens together, too few"):
        open_data(config, virtual_workers=1)
    with pytest.raises(DataError, match=r"DataConfig\.pack: the documents have no token"):
        open_data(
            write(tmp_path, input_ids=pa.array([[]], pa.list_(pa.int32()))), virtual_workers=1
        )


def test_rows_that_memory_does_not_hold_are_refused_when_data_is_opened(tmp_path):
    config = write(tmp_path, input_ids=[[1, 2, 3]])
    huge = dataclasses.replace(config, pack=2**31 - 1, tail="short")
    with pytest.raises(DataError, match=r"a micro-batch of 1 rows of DataConfig\.pack=.*memory_by"):
        open_data(huge, virtual_workers=1)
    with pytest.raises(DataError, match=r"a micro-batch of 1 rows of DataConfig\.pack=.*memory_by"):
        open_evaluation(huge)
    with pytest.raises(SpecError, match=r"DataConfig\.pack is 2147483648, must be at most"):
        dataclasses.replace(config, pack=2**31)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pack": 0}, r"DataConfig\.pack is 0, must be at least 1"),
        ({"pack_columns": ["labels"]}, r"pack_columns is \['labels'\], must be a list of"),
        ({"pack_columns": "position_ids"}, r"pack_columns is 'position_ids', must be a list of"),
        ({"pack": None, "pack_columns": ()}, "pack_columns is set, and pack is not; set pack"),
        ({"url": {"a": 1.0}}, "url has weights, which count rows; pack each source beforehand"),
        ({"max_bad_fraction": 0.1}, "max_bad_fraction is 0.1"),
    ],
)
def test_options_that_do_not_go_with_packing_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        DataConfig(**{"url": "a", "pack": 8, "micro_batch_size": 1} | changes)


def test_packing_is_part_of_what_a_run_remembers(tmp_path):
    config = packed(tmp_path / "in")
    plain = read_index(dataclasses.replace(config, pack=None))
    assert difference(plain, read_index(config)) == "pack was not set, and is set"
    prints = {
        open_data(dataclasses.replace(config, pack=n), virtual_workers=V).fingerprint
        for n in (LENGTH, LENGTH, LENGTH + 1)
    }
    assert len(prints) == 2
