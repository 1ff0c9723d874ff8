"""A run that is rewound over a bad stretch: its weights are those of a run that never had these
rows, on any fleet."""

import contextlib
import dataclasses
import math
import os
import threading
import types

import pytest
import torch
from typer.testing import CliRunner

import elastic_dp as edp
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.cli import app
from elastic_dp.cluster.runs.rewind import rewind
from elastic_dp.config import CheckpointConfig
from elastic_dp.errors import CheckpointError, LossError, RewindRequested, RunMismatch, SpecError
from elastic_dp.extensions.spikes import SpikeRule
from elastic_dp.storage import Store
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import PATIENT, Points, group, spec_of
from tests.train.jobs import classifier

ROWS = {"micro_batch_size": 4, "shuffle": False}  # 8 rows a step
NAN_AT, JUMP_AT = 130, 330  # rows of steps 17 and 42


def loss_fn(model, batch):
    loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    bad = {NAN_AT: math.nan, JUMP_AT: 100.0}
    return loss * next((bad[i] for i in batch["i"].tolist() if i in bad), 1.0)


def body(ctx, loss_fn):
    model = classifier()
    for step in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn):
        ctx.log({"loss": step.loss})


def train(ctx):
    body(ctx, loss_fn)


def trainer(folder, train=train, *, on_spike=None, virtual=2, name="run"):
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=folder,
        data=edp.MapStyleData(Points(480), epochs=1, **ROWS),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=virtual),
        checkpoint=edp.CheckpointConfig(every_steps=5, num_to_keep=None),
        failure=edp.FailureConfig(on_spike=on_spike),
    )


def never_had(folder, *stretches):
    """The result of a run that leaves these steps out from its start on."""
    with pytest.raises(LossError):
        trainer(folder, name="other").fit(local=True)  # a folder, and its run.json
    for stretch in stretches:
        rewind(trainer(folder, name="other").url, 0, stretch)
    return trainer(folder, name="other").fit(local=True)


def test_a_run_goes_on_without_the_rows_of_a_stretch(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(LossError, match="step 17"):
        run.fit(local=True)
    words = "rewind", "run", "--storage-path", str(tmp_path), "--to-step", "14"
    said = CliRunner().invoke(app, [*words, "--leave-out", "16..18"])
    assert "run goes on from step 10, without the rows of steps 16 to 18" in said.stdout
    result = trainer(tmp_path).fit(local=True)
    assert result.step == 57
    assert result.weights_sha256 == never_had(tmp_path, (16, 18)).weights_sha256
    [*_, said] = (tmp_path / "run/left_out.txt").read_text().splitlines()
    assert said == "step 18, virtual worker 1: rows 140, 141, 142, 143 of the dataset"


def test_a_finished_run_goes_on_from_where_it_is_rewound_to(tmp_path):
    first = never_had(tmp_path, (17, 17))
    assert first.step == 59
    rewind(first.path, 30, (35, 44))
    result = trainer(tmp_path, name="other").fit(local=True)
    assert result.step == 49
    assert Catalog(Store(first.path)).left_out() == ((17, 17), (35, 44))


def jumps(model, batch):
    loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    return loss * (100.0 if JUMP_AT in batch["i"] else 1.0)


def body_rewinds(ctx):
    model = classifier()
    for step in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), jumps):
        if step.loss > 20:
            ctx.rewind(step.number - 3, leave_out=(step.number - 2, step.number + 1))


def test_the_loops_body_rewinds_the_run(tmp_path):
    result = trainer(tmp_path, body_rewinds).fit(local=True)
    assert Catalog(Store(result.path)).left_out() == ((40, 43),) and result.step == 56


KILLS = (4, 17, 19, 42, 50)  # before a jump, in its step, after it
RULE = edp.Rewind(factor=5.0, window=8, before=1, after=2)


def test_the_run_rewinds_itself_at_a_jump_and_at_nan(tmp_path):
    result = trainer(tmp_path, on_spike=RULE).fit(local=True)
    assert Catalog(Store(result.path)).left_out() == ((16, 19), (37, 40))
    assert result.step == 60 - 8
    assert result.weights_sha256 == never_had(tmp_path, (16, 19), (37, 40)).weights_sha256


@pytest.mark.parametrize(
    ("recent", "loss", "jumps"),
    [
        ([1.0, 2.0, 9.0], 10.1, True),
        ([1.0, 2.0, 9.0], 10.0, False),
        ([-1.0, -2.0, -9.0], 5.9, False),
        ([-1.0, -2.0, -9.0], 6.1, True),
        ([0.0, 0.0, 1.0], 9.0, False),
        ([1.0, 1.0], 99.0, False),  # fewer than the window
        ([1.0, 1.0], math.nan, True),
    ],
)
def test_jump_is_measured_by_the_size_of_the_median(recent, loss, jumps):
    result = types.SimpleNamespace(loss=loss, weight=1.0)
    results = types.SimpleNamespace(of_all={0: result})
    build = types.SimpleNamespace(loss_scale=None, results=results)
    rule = SpikeRule(edp.Rewind(factor=5.0, window=3, before=1, after=1), 1, build)
    rule.load_state_dict({"values": recent})
    rule.begin(7)
    with pytest.raises(RewindRequested) if jumps else contextlib.nullcontext():
        rule.agree([])


@pytest.mark.parametrize("workers", [1, 3])
def test_any_fleet_rewinds_alike(workers, tmp_path):
    """With a worker that is killed before the jump, one in the step of it, and one after it."""
    whole = trainer(tmp_path, on_spike=RULE, virtual=4).fit(local=True)
    url, left_out = os.fspath(tmp_path / "group"), ()
    kills = [WorkerFault("header", step, rank=1, once=f"{tmp_path}/{step}") for step in KILLS]
    while True:
        spec = spec_of(steps=30, workers=workers, virtual=4)
        spec = dataclasses.replace(
            spec,
            data=edp.MapStyleData(Points(480), epochs=1, **ROWS),
            checkpoint=CheckpointConfig(every_steps=5, num_to_keep=None),
            failure=dataclasses.replace(PATIENT, on_spike=RULE),
            max_steps=None,
            left_out=left_out,
        )
        outcome, _ = group(
            spec, train, url=url, faults=tuple(kills) if workers > 1 else (), fails=True
        )
        assert outcome.error_facts or outcome.error is None, outcome
        if outcome.error is None:
            break
        wish = RewindRequested(*outcome.error_facts)
        rewind(url, wish.to_step, (wish.first, wish.last))
        left_out = Catalog(Store(url)).left_out()
    assert outcome.digest == whole.weights_sha256
    assert left_out == Catalog(Store(whole.path)).left_out()


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ({}, "and the job makes none"),
        ({"every_steps": 20}, "the 3 checkpoints that are kept go back 40"),
    ],
)
def test_rule_for_which_no_checkpoint_would_be_old_enough_is_refused(checkpoint, text):
    with pytest.raises(SpecError, match=text):
        dataclasses.replace(
            spec_of(),
            checkpoint=CheckpointConfig(**checkpoint),
            failure=edp.FailureConfig(on_spike=edp.Rewind(before=41)),
        )


@pytest.mark.parametrize(
    ("to_step", "leave_out", "error", "text"),
    [
        (10, (10, 12), SpecError, "must be steps after to_step=10"),
        (10, (13, 12), SpecError, "the first one first"),
        (-1, None, SpecError, "to_step is -1"),
        (10, (15, 16.5), SpecError, r"leave_out\[1\] is 16.5"),
        (10, (15,), SpecError, "must be two steps"),
        (10, (15, None), SpecError, "steps are numbers"),
        (10, (61, 99), SpecError, "the run has 60 steps: it has none of these"),
        (0, (1, 99), SpecError, "none is left"),
        (4, (9, 9), CheckpointError, "no checkpoint of step 4 or earlier; it has: 5, 10"),
    ],
)
def test_what_cannot_be_is_refused(to_step, leave_out, error, text, tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(LossError):
        run.fit(local=True)
    with pytest.raises(error, match=text):
        rewind(run.url, to_step, leave_out)
    assert Catalog(Store(run.url)).left_out() == ()


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    """NaN in a step before the first checkpoint."""
    run = trainer(tmp_path, on_spike=RULE)
    config = edp.CheckpointConfig(every_steps=25)
    run.spec = dataclasses.replace(run.spec, checkpoint=config)
    assert run.fit(local=True).step == 60 - 8
    assert Catalog(Store(run.url)).left_out() == ((16, 19), (37, 40))


@pytest.mark.parametrize("to_step", [1, 9])
def test_body_that_rewinds_to_where_it_is_ends_the_run(to_step, tmp_path):
    def rewinds(ctx):
        model = classifier()
        for step in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-2), jumps):
            ctx.rewind(to_step, leave_out=(to_step + 1, to_step + 2))
            assert step.number

    with pytest.raises(SpecError, match="must be less than the present step, 1"):
        trainer(tmp_path, rewinds).fit(local=True)


def test_a_stretch_that_begins_in_the_run_ends_with_it(tmp_path):
    result = trainer(tmp_path, lambda ctx: body(ctx, jumps)).fit(local=True)
    assert rewind(result.path, 55, (58, 10**20)) == 55
    assert Catalog(Store(result.path)).left_out() == ((58, 60),)
    assert trainer(tmp_path, lambda ctx: body(ctx, jumps)).fit(local=True).step == 57


def test_a_batch_that_grows_is_refused_before_anything_is_decided(tmp_path):
    growing = {0: 2, 20: 4}
    with pytest.raises(SpecError, match="needs steps of one size, and the batch grows"):
        trainer(tmp_path, on_spike=RULE, virtual=growing)
    result = trainer(tmp_path, lambda ctx: body(ctx, jumps), virtual=growing).fit(local=True)
    with pytest.raises(SpecError, match="the batch of the run grows"):
        rewind(result.path, 5, (7, 8))


def test_a_live_run_is_not_rewound(tmp_path):
    begun, done = threading.Event(), threading.Event()

    def waits(ctx):
        model = classifier()
        for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-2), loss_fn):
            begun.set()
            done.wait()
            ctx.stop("enough")

    run = trainer(tmp_path, waits)
    run.spec = dataclasses.replace(run.spec, failure=edp.FailureConfig(run_lease_s=0.5))
    thread = threading.Thread(target=run.fit, args=(True,))
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(RunMismatch, match="is live"):
            rewind(run.url, 0)
    finally:
        done.set()
        thread.join()
