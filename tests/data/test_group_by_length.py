"""Rows grouped by length: each row once in an epoch, in the same micro-batches for any number of
workers, under a kill and over a resume in the middle of a window."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.errors import BadShard, DataError, SpecError, UserCodeError
from elastic_dp.sampling.length_groups import WINDOW
from elastic_dp.train.fault_injection import WorkerFault
from tests.data.shards import damage
from tests.runs import group, local, spec_of

V, B = 4, 2
ROWS = V * B * (WINDOW + 9) + 3  # of an epoch: a window, a part of one, and a short step


def length(i: int) -> int:
    return i * 37 % 41


def written(folder: Path, **changes: Any) -> DataConfig:
    folder.mkdir(parents=True)
    for shard, ids in enumerate(np.array_split(np.arange(ROWS), 3)):
        tokens = [[i] * length(i) for i in ids.tolist()]
        columns = {
            "id": ids,
            "input_ids": pa.array(tokens, pa.list_(pa.int32())),
            "text": ["x" * len(row) for row in tokens],
            "length": [len(row) for row in tokens],
        }
        table = pa.table(columns)
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=40)
    options: dict[str, Any] = {"micro_batch_size": B, "group_by_length": "input_ids", "seed": 3}
    return DataConfig(str(folder), **options | {"tail": "short", "epochs": 2} | changes)


Epoch = list[dict[int, list[int]]]  # by step: the rows of each virtual worker


def epoch_of(config: DataConfig, workers: int, epoch: int = 0, skip: int = 0) -> Epoch:
    data = [open_data(config, virtual_workers=V) for _ in range(workers)]
    per_epoch = data[0].steps_per_epoch
    first = 1 + epoch * per_epoch + skip
    for number, one in enumerate(data):
        one.read_ahead(first, range(number, V, workers))
    found = []
    for step in range(first, 1 + (epoch + 1) * per_epoch):
        here = {}
        for v in range(V):
            if rows := data[v % workers].rows(step, v):
                batch = data[v % workers].batch(step, v)
                here[v] = batch["id"].tolist()
                assert len(here[v]) == rows
                for i, ids in zip(here[v], batch["input_ids"], strict=True):
                    assert ids.tolist() == [i] * length(i)
        found.append(here)
    for one in data:
        one.close()
    return found


def rows_in(found: Epoch) -> list[int]:
    return [i for here in found for ids in here.values() for i in ids]


def padding_in(found: Epoch) -> int:
    """What padding each micro-batch to its longest row adds."""
    each = [[length(i) for i in ids] for here in found for ids in here.values()]
    return sum(max(lengths) * len(lengths) - sum(lengths) for lengths in each)


def uneven(found: Epoch) -> int:
    """By how much the longest rows of the micro-batches of a step differ."""
    each = [[max(length(i) for i in ids) for ids in here.values()] for here in found]
    return sum(max(longest) - min(longest) for longest in each)


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    """Keeps lists: as a `collate_fn`, to which the padding is left."""
    return {"id": torch.tensor(batch["id"]), "input_ids": list(batch["input_ids"])}


@pytest.mark.parametrize("shuffle", ["rows", "full"])
def test_each_row_comes_once_beside_rows_of_similar_length_for_any_workers(shuffle, tmp_path):
    config = written(tmp_path / "in", shuffle=shuffle, collate_fn=ragged)
    alone = epoch_of(config, 1)
    assert alone == epoch_of(config, 3)
    assert sorted(rows_in(alone)) == list(range(ROWS))
    plain = epoch_of(dataclasses.replace(config, group_by_length=None), 1)
    assert sorted(rows_in(alone[:WINDOW])) == sorted(rows_in(plain[:WINDOW]))
    assert padding_in(alone) * 8 < padding_in(plain)
    assert uneven(alone) * 2 < uneven(plain)
    other = epoch_of(config, 1, epoch=1)
    assert sorted(rows_in(other)) == list(range(ROWS)) and other != alone


@pytest.mark.parametrize("column", ["text", "length"])
def test_lengths_may_be_those_of_texts_or_numbers(column, tmp_path):
    config = written(tmp_path / "in", collate_fn=ragged)
    assert epoch_of(dataclasses.replace(config, group_by_length=column), 1) == epoch_of(config, 1)


def test_worker_that_begins_in_the_middle_of_a_window_goes_on_with_its_rows(tmp_path):
    config = written(tmp_path / "in", collate_fn=ragged)
    whole = epoch_of(config, 1)
    for skip in (WINDOW // 2, WINDOW - 1, WINDOW + 3):
        assert epoch_of(config, 3, skip=skip) == whole[skip:]


def test_virtual_worker_that_moves_in_the_middle_of_a_window_has_its_rows(tmp_path):
    config = written(tmp_path / "in", collate_fn=ragged)
    whole = epoch_of(config, 1)
    data = open_data(config, virtual_workers=V)
    data.read_ahead(1, [0, 1])
    for step in range(1, 8):
        assert [data.batch(step, v)["id"].tolist() for v in (0, 1)] == [
            whole[step - 1][v] for v in (0, 1)
        ]
    data.read_ahead(6, [1, 3])  # step 6 is done again
    for step in (6, 7, 8, WINDOW, WINDOW + 1):
        for v in (1, 3):
            assert data.batch(step, v)["id"].tolist() == whole[step - 1][v]
    assert data.batch(3, 2)["id"].tolist() == whole[2][2]  # was not announced
    data.close()


def failing(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    if 5 in batch["id"]:
        raise ValueError("row 5")
    return {"id": batch["id"]}


def test_error_in_a_transform_is_raised_by_the_step_that_has_the_row(tmp_path):
    config = written(tmp_path / "in", transform=failing)
    plain = epoch_of(dataclasses.replace(config, transform=None, collate_fn=ragged), 1)
    ((at, v),) = [(n, v) for n, here in enumerate(plain) for v, ids in here.items() if 5 in ids]
    data = open_data(config, virtual_workers=V)
    data.read_ahead(1, range(V))
    for step in range(1, at + 1):
        for worker in range(V):
            data.batch(step, worker)
    with pytest.raises(UserCodeError, match=r"row 5 on 2 of 100 rows grouped by length: rows \d"):
        data.batch(at + 1, v)
    data.close()


def test_row_group_that_cannot_be_decoded_fails_the_windows_that_have_it(tmp_path):
    config = written(tmp_path / "in", collate_fn=ragged)
    damage(config, 5)
    data = open_data(config, virtual_workers=V)
    data.read_ahead(1, range(V))
    failed = []
    for v in range(V):
        try:
            data.batch(1, v)
        except BadShard as error:
            failed.append(str(error))
    data.close()
    assert 0 < len(failed) < V
    assert all("row group 1 of 1.parquet cannot be decoded" in message for message in failed)


def test_evaluation_keeps_the_order_of_the_files(tmp_path):
    data = open_evaluation(written(tmp_path / "in", collate_fn=ragged))
    found = [i for n in range(data.num_batches) for i in data.batch(n)["id"].tolist()]
    data.close()
    assert found == list(range(ROWS))


def padded(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    rows = [torch.as_tensor(row) for row in batch["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"id": torch.as_tensor(batch["id"]), "input_ids": ids}


def train(ctx: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with open(f"{ctx.config['folder']}/{ctx._session.worker}", "a", buffering=1) as log:

        def loss_fn(m: Any, batch: Any) -> torch.Tensor:
            log.write(json.dumps(batch["id"].tolist()) + "\n")
            return m(batch["input_ids"].float().sum(1, keepdim=True) / 1e4).square().mean()

        for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn):
            pass


def test_kill_and_resume_in_the_middle_of_a_window_give_the_undisturbed_weights(tmp_path):
    config = written(tmp_path / "in", collate_fn=padded, epochs=1)
    (tmp_path / "log").mkdir()
    steps = WINDOW // 2 + 4
    options = {"folder": str(tmp_path / "log")}
    spec = spec_of(steps=steps, workers=3, min_workers=3, virtual=V, config=options)
    spec = dataclasses.replace(spec, data=config)
    fault = WorkerFault("before_forward", step=WINDOW // 2, rank=1, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, train, faults=(fault,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    seen: set[str] = set()
    for file in (tmp_path / "log").iterdir():
        lines = file.read_text().splitlines(keepends=True)
        seen |= {line for line in lines if line.endswith("\n")}  # else its worker was killed
    ids = [i for line in seen for i in json.loads(line)]
    assert len(set(ids)) == len(ids) == steps * V * B
    url = str(tmp_path / "run")
    first = local(dataclasses.replace(spec, max_steps=WINDOW // 2), train, url=url)
    resumed = local(spec, train, url=url)
    assert first.digest != resumed.digest == local(spec, train).digest == outcome.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_by_length": ""}, r"group_by_length is '', must be the name of a column"),
        ({"group_by_length": True}, "group_by_length is True, must be the name of a column"),
        ({"pack": 8}, "pack makes rows of one length"),
        ({"url": {"a": 1.0}}, "url has weights"),
        ({"shuffle": "none"}, 'shuffle is "none"'),
        ({"on_bad_shard": "skip"}, 'on_bad_shard is "skip"'),
    ],
)
def test_options_that_do_not_go_with_groups_are_refused(changes, message):
    options = {"url": "a", "group_by_length": "x", "micro_batch_size": 1}
    with pytest.raises(SpecError, match=message):
        DataConfig(**options | changes)


def test_columns_without_lengths_are_refused_by_name(tmp_path):
    pq.write_table(pa.table({"x": [0.5], "s": ["a"]}), tmp_path / "a.parquet")
    for column, message in (
        ("y", r"the job reads no column 'y', only 'x', 's'"),
        ("x", r"column 'x' is .*; it must hold lists, texts, or the lengths"),
    ):
        config = DataConfig(str(tmp_path), group_by_length=column, micro_batch_size=1)
        with pytest.raises(DataError, match=message):
            open_data(config, virtual_workers=1)


def test_groups_are_part_of_what_a_run_remembers(tmp_path):
    config = written(tmp_path / "in")
    prints = {
        open_data(dataclasses.replace(config, group_by_length=name), virtual_workers=V).fingerprint
        for name in ("input_ids", "input_ids", "length", None)
    }
    assert len(prints) == 3
