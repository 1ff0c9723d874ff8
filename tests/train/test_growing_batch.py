"""A batch that grows: the same bits for any number of workers, under kills at the very change, and
for runs that go on before it, at it and after it."""

import dataclasses
import json
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import elastic_dp as edp
from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import RunMismatch
from tests import runs
from tests.data.test_packing import DOCUMENTS, document, packed
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy

GROWTH = {0: 4, 3: 6, 6: 12}
STEPS = 9


def job(workers=3, growth=GROWTH, steps=STEPS, **options):
    return spec_of(steps=steps, workers=workers, virtual=growth, rows=300, **options)


def steps_logged(ctx):
    def body(step):
        ctx.log({"weight": step.weight, "epoch": step.epoch, "ends": float(step.epoch_end)})

    classify(ctx, body=body)


def test_steps_have_the_rows_that_the_schedule_says():
    logged = local(job(steps=12, tail="short"), steps_logged).logged
    assert [x["weight"] for x in logged] == [
        *(16.0, 16.0, 16.0, 24.0, 24.0, 24.0),
        *(48.0, 48.0, 48.0, 36.0),  # the last of the epoch: 300 rows, 264 before
        *(48.0, 48.0),
    ]
    assert [x["epoch"] for x in logged] == [0] * 10 + [1] * 2
    assert [x["ends"] for x in logged] == [0.0] * 9 + [1.0, 0.0, 0.0]


def test_epochs_end_the_run_where_the_rows_end():
    spec = job(tail="short")
    data = dataclasses.replace(spec.data, epochs=2)
    run = local(dataclasses.replace(spec, data=data, max_steps=None), steps_logged)
    assert sum(x["weight"] for x in run.logged) == 2 * 300
    assert run.logged[-1]["step"] == 10 + -(-75 // 12) and run.logged[-1]["ends"] == 1.0


ROWS = 475  # a part of an epoch, and a short step


def of_rows(folder):
    folder.mkdir(parents=True)
    for shard, ids in enumerate(np.array_split(np.arange(ROWS), 3)):
        pq.write_table(pa.table({"id": ids}), folder / f"{shard}.parquet", row_group_size=40)
    return DataConfig(str(folder), micro_batch_size=2, seed=3, tail="short", epochs=2)


EVERY_ROW, EVERY_TOKEN = {*range(ROWS)}, {0, *(t for i in range(DOCUMENTS) for t in document(i))}


@pytest.mark.parametrize(
    ("make", "column", "every"),
    [
        (of_rows, "id", EVERY_ROW),
        pytest.param(packed, "input_ids", EVERY_TOKEN, marks=pytest.mark.slow),
    ],
)
def test_shards_are_read_once_an_epoch_by_any_number_of_workers(make, column, every, tmp_path):
    config = dataclasses.replace(make(tmp_path / "shards"), epochs=1)

    def train(ctx):
        model = classifier(1)

        def loss_fn(m, batch):
            ids = batch[column]
            with open(tmp_path / "seen", "a", encoding="utf-8") as file:
                file.write(f"{ids.flatten().tolist()}\n")
            x = ids.float().reshape(len(ids), -1).sum(1, keepdim=True) % 7.0 - 3.0
            return cross_entropy(m, {"x": x, "y": ids.reshape(len(ids), -1)[:, 0].long() % 4})

        for step in ctx.steps(model, adamw(model), loss_fn):
            ctx.log({"weight": step.weight})

    growth = {0: 3, 4: 5, 9: 8}
    spec = dataclasses.replace(job(2, growth, min_workers=2), data=config, max_steps=None)
    outcome, _ = group(spec, train, index=read_index(config))
    lines = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert {i for line in lines for i in json.loads(line)} == every
    calm = local(spec, train)
    assert outcome.digest == calm.digest
    if column == "id":  # no row twice, then
        assert sum(x["weight"] for x in calm.logged) == ROWS


def fit(path, growth, max_steps):
    each = edp.CheckpointConfig(every_steps=1, num_to_keep=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = runs.fit(classify, path, max_steps, virtual=growth, checkpoint=each, name="grows")
    return result, [str(w.message) for w in caught if w.category is UserWarning]


def test_run_that_goes_on_before_at_and_behind_the_change_has_the_same_weights(tmp_path):
    growth = {0: 2, 4: 5}
    at_once, _ = fit(tmp_path / "at once", growth, 8)
    for steps in (3, 4, 5, 8):
        result, warned = fit(tmp_path / "parts", growth, steps)
        assert (result.step, warned) == (steps, [])
    assert result.weights_sha256 == at_once.weights_sha256


def test_rerun_may_change_how_the_batch_grows_in_later_steps_and_says_so(tmp_path):
    at_once, _ = fit(tmp_path / "at once", {0: 2, 4: 5, 6: 7}, 8)
    fit(tmp_path, 2, 4)
    fit(tmp_path, {0: 2, 4: 5}, 6)  # the change of step 4 is behind step 4: not made yet
    result, _ = fit(tmp_path, {0: 2, 4: 5, 6: 7}, 8)
    assert result.weights_sha256 == at_once.weights_sha256
    events = (tmp_path / "grows" / "events.jsonl").read_text(encoding="utf-8")
    assert "virtual_workers is 5 after step 4 now, was as for the first step" in events
    assert "virtual_workers is 5 after step 4, 7 after step 6 now, was 5 after step 4" in events


@pytest.mark.parametrize(
    ("growth", "max_steps", "words"),
    [
        ({0: 2, 4: 6}, 8, r"virtual_workers\[4\] is 6 now, but the run has made step 6, and was 5"),
        ({0: 2, 3: 5}, 8, r"virtual_workers\[3\] is 5 now, .* was unchanged after step 3"),
        (2, 8, r"virtual_workers\[4\] is unchanged now, .* was 5 after step 4"),
        ({0: 2, 4: 5, 5: 7}, 8, r"virtual_workers\[5\] is 7 now"),
        ({0: 2, 4: 6}, 6, r"virtual_workers\[4\] is 6 now"),  # finished, and not to go on
        ({0: 3, 4: 5}, 8, "virtual_workers is 3, .* 2"),
    ],
)
def test_rerun_with_another_batch_in_steps_that_were_made_is_refused_by_name(
    growth, max_steps, words, tmp_path
):
    fit(tmp_path, {0: 2, 4: 5}, 6)
    with pytest.raises(RunMismatch, match=words):
        fit(tmp_path, growth, max_steps)


def test_checkpoint_of_another_batch_is_refused_by_the_worker_that_reads_it(tmp_path):
    """Where `start.json` is gone, which the driver compares."""
    fit(tmp_path, {0: 2, 4: 5}, 6)
    (tmp_path / "grows" / "start.json").unlink()
    with pytest.raises(RunMismatch, match=r"virtual_workers\[4\] is 6 now, .* step 6, and was 5"):
        fit(tmp_path, {0: 2, 4: 6}, 8)


def test_rerun_that_leaves_virtual_workers_open_goes_on_as_the_last_start(tmp_path):
    at_once, _ = fit(tmp_path / "at once", {0: 2, 4: 5}, 7)
    fit(tmp_path, {0: 2, 4: 5}, 3)
    assert fit(tmp_path, None, 7)[0].weights_sha256 == at_once.weights_sha256
