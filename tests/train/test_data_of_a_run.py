"""What a run makes of its data: the same bits from processes for any number of workers, and no
other data set on its second start. A worker that trains for long keeps few data sets of
evaluations. An evaluation leaves the model as the body has it."""

import random
import types
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp import DataConfig, MapStyleData
from elastic_dp.errors import LoopError, RunMismatch
from elastic_dp.train import context
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import Points, fit, group, local, spec_of, warnings_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy, loop


def write(folder, shard, rows=96):
    x = np.random.default_rng(shard).standard_normal((rows, 16)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(x.ravel(), 16)
    table = pa.table({"x": column, "y": x[:, :4].argmax(axis=1)})
    pq.write_table(table, folder / f"part-{shard}.parquet", row_group_size=12)


@pytest.fixture
def folder(tmp_path):
    (folder := tmp_path / "data").mkdir()
    for shard in range(3):
        write(folder, shard)
    return folder


def jitter(batch):
    """Draws as torchvision and albumentations do, from the generators that all threads share."""
    noise = random.gauss(0, 0.1) + np.random.randn(16) / 10 + torch.randn(16).numpy() / 10
    return batch | {"x": (batch["x"] + noise).astype(np.float32)}


train = partial(classify, clip_norm=1.0)


def test_a_transform_in_processes_gives_the_same_bits_for_any_number_of_workers(folder):
    def job(workers, **options):
        data = DataConfig(str(folder), micro_batch_size=4, transform=jitter, workers=workers)
        return spec_of(steps=16, workers=2, min_workers=2, virtual=4, data=data, **options)

    calm = local(job(0), train)
    fault = WorkerFault("before_forward", step=9, rank=1, once=str(folder.parent / "dead"))
    outcome, _ = group(job(1), train, faults=(fault,))
    assert outcome.workers_lost == 1 and outcome.digest == calm.digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: write(f, 1, 97), r"shard part-1.parquet was rewritten"),
        (lambda f: write(f, 3), r"shard part-3.parquet is new"),
        (lambda f: (f / "part-2.parquet").unlink(), r"shard part-2.parquet is gone"),
    ],
)
def test_a_data_set_that_changed_between_two_starts(folder, tmp_path, change, said):
    data = DataConfig(str(folder), micro_batch_size=4)
    fit(train, tmp_path / "runs", 2, data=data)
    change(folder)
    with pytest.raises(RunMismatch, match=rf"{said}.*Use a new name="):
        fit(train, tmp_path / "runs", 4, data=data)


NUMBERS = [{"x": torch.full((4,), float(i))} for i in range(64)]
OTHERS = [{"x": row["x"] + 1} for row in NUMBERS]


def half(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.random_split(NUMBERS, [32, 32], generator)[0]


@pytest.mark.parametrize(
    ("first", "second", "options", "said"),
    [
        (NUMBERS, NUMBERS, {}, ""),
        (half(0), half(0), {}, ""),
        (half(0), half(1), {}, "indices of MapStyleData.dataset.*random_split that is drawn anew"),
        (half(0), half(1), {"fingerprint": "v1"}, ""),
        (NUMBERS, OTHERS, {}, r"row 0 of MapStyleData\.dataset is not the one .*fingerprint"),
        (NUMBERS, OTHERS, {"fingerprint": "v1"}, ""),
    ],
)
def test_other_rows_of_a_map_style_dataset_are_refused_at_a_restart(
    first, second, options, said, tmp_path
):
    one, other = (MapStyleData(rows, micro_batch_size=4, **options) for rows in (first, second))
    fit(train_on_x, tmp_path, 2, data=one)
    if said:
        with pytest.raises(RunMismatch, match=said):
            fit(train_on_x, tmp_path, 4, data=other)
    else:
        assert fit(train_on_x, tmp_path, 4, data=other).step == 4


def train_on_x(ctx):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop(ctx, model, optimizer, lambda m, batch: m(batch["x"]).square().mean())


def test_evaluation_data_that_a_body_makes_each_time_is_opened_once_and_little_of_it_is_kept(
    monkeypatch,
):
    opened = []

    def opens(data, **_):
        opened.append(data)
        return len(opened)

    monkeypatch.setattr("elastic_dp.data.open_evaluation", opens)
    session = types.SimpleNamespace(
        device=torch.device("cpu"), spec=spec_of(), link=types.SimpleNamespace(say=print)
    )
    made = context.TrainContext(session)
    found = {made._opened(DataConfig("there", micro_batch_size=4)) for _ in range(5)}
    assert found == {1} and len(opened) == 1
    kept = MapStyleData(Points(), micro_batch_size=4)
    assert [made._opened(kept) for _ in range(2)] == [2, 2]
    for _ in range(100):
        newest = MapStyleData(Points(), micro_batch_size=4)
        assert made._opened(newest) == len(opened)
    assert made._opened(newest) == 102 and len(made._evaluation_data) == context._EVALUATIONS_KEPT


def test_evaluation_does_not_undo_what_the_body_has_set():
    def train(ctx):
        model = classifier()
        model.warmth = 1.0
        for step in ctx.steps(model, adamw(model), lambda m, b: cross_entropy(m, b) * m.warmth):
            model.warmth = 0.9**step.number
            ctx.evaluate(cross_entropy, ctx.config["eval"])
            assert model.warmth == 0.9**step.number

    data = MapStyleData(Points(30), micro_batch_size=8)
    warnings = warnings_of(train, config={"eval": data})
    assert any("changes model.warmth (1.0, then 0.9)" in text for text in warnings)


@pytest.mark.parametrize("after", [True, False])
def test_evaluation_keeps_buffers_written_after_the_loop_and_refuses_those_of_a_body(after):
    data = MapStyleData(Points(30), micro_batch_size=8)

    def train(ctx):
        model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4))

        def write_and_evaluate():  # as torch.optim.swa_utils.update_bn does
            model[1].running_mean.fill_(7.0)
            ctx.evaluate(cross_entropy, data)
            assert model[1].running_mean.eq(7.0).all()

        for _ in ctx.steps(model, adamw(model), cross_entropy):
            if not after:
                write_and_evaluate()
        write_and_evaluate()

    if after:
        local(spec_of(steps=2), train)
    else:
        with pytest.raises(LoopError, match="running_mean"):
            local(spec_of(steps=2), train)
