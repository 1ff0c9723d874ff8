"""A LightningModule runs by `ctx.steps`: the same losses as by Lightning's Trainer, hooks once per
step, and what cannot be had is refused by name."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import elastic_dp as edp
from elastic_dp.errors import LoopError, LossError, SpecError
from tests.imported_when_used import ImportedWhenUsed

pl = ImportedWhenUsed("lightning.pytorch")
integration = ImportedWhenUsed("elastic_dp.integrations.lightning")
jobs = ImportedWhenUsed("tests.integrations.lightning_jobs")
ROOT = Path(__file__).parents[2]
QUIET = {
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
    **dict.fromkeys(("enable_model_summary",), False),
    **{"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
}


def fit(module, folder, data=None, name="run", **options):
    options = QUIET | {"max_epochs": 3, "accumulate_grad_batches": 4} | options
    data = jobs.PointsData() if data is None else data
    trainer = integration.LightningTrainer(
        module, datamodule=data, storage_path=str(folder), name=name, **options
    )
    return trainer.fit(local=True)


@pytest.fixture
def original():
    def train(module, data=None, **options):
        options = QUIET | {"max_epochs": 3, "accumulate_grad_batches": 4} | options
        trainer = pl.Trainer(**options)
        trainer.fit(module, datamodule=jobs.PointsData() if data is None else data)
        return trainer

    with pytest.warns() as _:  # Lightning advises more workers for its DataLoader
        yield train


def logged(folder, name="run"):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --------------------------------------------------------------------------- beside the library


@pytest.mark.parametrize("schedule", ["none", "step", "epoch", "plateau"])
def test_loss_curve_is_the_one_of_lightning_within_one_in_a_hundred_thousand(
    schedule, tmp_path, original
):
    """Over the same rows: both read them in the order of the data set, and no dropout."""
    ours, curve = jobs.Classifier(0.0, schedule), jobs.Curve()
    result = fit(ours, tmp_path, jobs.PointsData(False), callbacks=[curve], gradient_clip_val=0.5)
    theirs, whole = jobs.Classifier(0.0, schedule), jobs.Whole()
    trainer = original(theirs, jobs.PointsData(False), callbacks=[whole], gradient_clip_val=0.5)
    assert result.step == 18 and result.exact
    assert curve.losses == pytest.approx(whole.losses, rel=1e-5) and len(curve.losses) == 18
    assert curve.rates == whole.rates
    last = {key: value for line in logged(tmp_path) for key, value in line.items()}
    for key in ("train_loss_epoch", "train_accuracy", "val_loss", "val_accuracy", "val_double"):
        assert last[key] == pytest.approx(float(trainer.callback_metrics[key]), rel=1e-5), key
    assert last["val_batch"] == pytest.approx(float(trainer.callback_metrics["val_batch"]))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, ours.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_bf16_has_the_loss_curve_of_lightning(tmp_path, original):
    curve, whole = jobs.Curve(), jobs.Whole()
    options = {"precision": "bf16-mixed", "max_epochs": 1}
    fit(jobs.Classifier(0.0), tmp_path, jobs.PointsData(False), callbacks=[curve], **options)
    original(jobs.Classifier(0.0), jobs.PointsData(False), callbacks=[whole], **options)
    assert curve.losses == pytest.approx(whole.losses, rel=1e-2)


# ----------------------------------------------------------------------------- hooks and logging


def test_hooks_are_called_in_the_order_of_lightning(tmp_path, original):
    lines = []
    for name, run in (("a", lambda *a, **k: fit(a[0], tmp_path, **k)), ("b", original)):
        (tmp_path / name).mkdir()
        diary = jobs.LightningDiary(tmp_path / name)
        run(jobs.Classifier(), callbacks=[diary], accumulate_grad_batches=1, max_epochs=2)
        lines.append([line[:4] for line in diary.lines()])
    assert lines[0] == lines[1] and len(lines[0]) > 60


def test_step_is_logged_every_so_many_steps_and_epochs_at_their_end(tmp_path):
    fit(jobs.Classifier(), tmp_path, log_every_n_steps=4)
    lines = logged(tmp_path)
    assert [line["step"] for line in lines if "train_loss_step" in line] == [4, 8, 12, 16]
    ends = [line["step"] for line in lines if "train_loss_epoch" in line]
    assert ends == [6, 12, 18] == [line["step"] for line in lines if "val_double" in line]
    assert [line["epoch"] for line in lines if "val_loss" in line] == [0, 1, 2]


def test_no_step_is_logged_if_the_number_of_steps_is_zero(tmp_path):
    fit(jobs.Classifier(), tmp_path, log_every_n_steps=0, max_epochs=1)
    assert not [line for line in logged(tmp_path) if "train_loss_step" in line]


def test_module_logs_the_learning_rate_of_its_optimizer(tmp_path):
    curve = jobs.Curve()
    fit(jobs.LogsRate(schedule="epoch"), tmp_path, callbacks=[curve])
    rates = [line["rate"] for line in logged(tmp_path) if "rate" in line]
    assert rates == pytest.approx([1e-2] * 6 + [5e-3] * 6 + [2.5e-3] * 6)


def test_validation_runs_after_every_so_many_epochs(tmp_path):
    fit(jobs.Classifier(), tmp_path, check_val_every_n_epoch=2)
    assert [line["epoch"] for line in logged(tmp_path) if "val_loss" in line] == [1]


def test_early_stopping_ends_the_run(tmp_path):
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    result = fit(jobs.Classifier(), tmp_path, callbacks=[stopping], max_epochs=9)
    assert result.step == 12 and "should_stop" in result.reason


@pytest.mark.parametrize("schedule", [pytest.param("step", marks=pytest.mark.slow), "plateau"])
def test_run_that_failed_goes_on_with_the_log_and_the_weights_of_an_undisturbed_one(
    schedule, tmp_path
):
    """The run goes on in the middle of an epoch, whose means are over all of its steps."""
    options = {"checkpoint": edp.CheckpointConfig(every_steps=4)}
    undisturbed = fit(
        jobs.Classifier(schedule=schedule),
        tmp_path,
        name="calm",
        callbacks=[stops_late()],
        **options,
    )
    callbacks = [jobs.FailsInHook(tmp_path), stops_late()]
    with pytest.raises(RuntimeError, match="once"):
        fit(jobs.Classifier(schedule=schedule), tmp_path, callbacks=callbacks, **options)
    callbacks = [jobs.FailsInHook(tmp_path), stops_late()]
    again = jobs.Classifier(schedule=schedule)
    result = fit(again, tmp_path, callbacks=callbacks, **options)
    assert result.weights_sha256 == undisturbed.weights_sha256
    calm, ours = (
        {line["step"]: line for line in logged(tmp_path, name)} for name in ("calm", "run")
    )
    assert [ours[step]["train_loss_epoch"] for step in (6, 12, 18)] == [
        calm[step]["train_loss_epoch"] for step in (6, 12, 18)
    ]
    assert callbacks[1].wait_count == 2  # one of them before the failure
    for name, value in result.load_state().model.items():
        assert torch.equal(value, again.state_dict()[name])


def test_run_that_failed_is_continued_by_the_same_object(tmp_path):
    options = {"checkpoint": edp.CheckpointConfig(every_steps=4), "max_epochs": 2}
    undisturbed = fit(jobs.Classifier(), tmp_path, name="calm", **options)
    job = integration.LightningTrainer(
        jobs.Classifier(),
        datamodule=jobs.PointsData(),
        storage_path=str(tmp_path),
        name="run",
        callbacks=[jobs.FailsInHook(tmp_path)],
        accumulate_grad_batches=4,
        **options,
    )
    with pytest.raises(RuntimeError, match="once"):
        job.fit(local=True)
    assert job.fit(local=True).weights_sha256 == undisturbed.weights_sha256


def stops_late():
    return pl.callbacks.EarlyStopping("val_loss", patience=9, min_delta=10.0)


def test_batches_without_a_loss_are_left_out(tmp_path):
    result = fit(jobs.LeavesOut(), tmp_path)
    assert result.step == 18 and result.exact


def test_fact_that_the_trainer_does_not_have_is_an_error_that_lists_those_it_has(tmp_path):
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop does not exist .*global_step"):
        fit(jobs.AsksTrainer(), tmp_path)


# ----------------------------------------------------------------------------------- the job


def test_script_of_the_page_changes_by_at_most_six_lines_and_runs(tmp_path, monkeypatch):
    page = (ROOT / "docs/integrations.md").read_text()
    _, diff = re.findall("```diff\n(.*?)```", page, re.S)
    lines = diff.splitlines()
    assert sum(line[:1] in ("+", "-") for line in lines) <= 6
    monkeypatch.chdir(tmp_path)
    given = {"module": jobs.Classifier(), "data": jobs.PointsData(), "callbacks": []}
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    script = script.replace(
        "scaling=scaling).fit()", "name='run', storage_path='runs').fit(local=True)"
    )
    exec(script.replace(', resources_per_worker={"GPU": 1}', ""), given)
    assert (tmp_path / "final.pt").exists()


def test_global_batch_is_the_one_of_as_many_processes():
    job = integration.LightningTrainer(
        jobs.Classifier(),
        name="job",
        datamodule=jobs.PointsData(rows=44),
        scaling=edp.ScalingConfig(max_workers=3),
        accumulate_grad_batches=2,
        max_epochs=2,
    )
    assert job.spec.data.micro_batch_size == 2 and job.spec.scaling.num_virtual_workers == 6
    assert job.spec.data.epochs == 2 and job.spec.max_steps is None
    assert job.spec.data.tail == "short" and job.spec.data.shuffle


def test_sharded_optimizer_is_passed_on_and_refused_with_loss_scaling():
    options = {"datamodule": jobs.PointsData(), "sharding": "optimizer", **QUIET}
    trainer = integration.LightningTrainer(jobs.Classifier(), name="job", **options)
    assert trainer.spec.sharding == "optimizer"
    with pytest.raises(SpecError, match=r"the precision is fp16.*use bf16"):
        integration.LightningTrainer(jobs.Classifier(), precision="16-mixed", **options)


def test_dataloaders_may_be_given_or_be_those_of_the_module(tmp_path):
    class WithData(jobs.Classifier):
        def train_dataloader(self):
            return DataLoader(jobs.Pairs(16), batch_size=2)

    job = integration.LightningTrainer(WithData(), name="job", max_steps=3)
    assert not job.spec.data.shuffle and job.spec.max_steps == 3 and job.spec.data.epochs is None
    assert integration.LightningTrainer(WithData(), name="job").spec.data.epochs == 1000
    loader = DataLoader(jobs.Pairs(16), batch_size=8, shuffle=True, drop_last=True)
    job = integration.LightningTrainer(
        jobs.Classifier(), name="job", train_dataloaders=loader, max_epochs=1
    )
    assert job.spec.data.micro_batch_size == 8 and job.spec.data.tail == "drop"


# ---------------------------------------------------------------------------------- what is had


def test_tables_name_arguments_of_lightnings_trainer():
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    accepted = {*integration.USED, *integration.IGNORED}
    assert arguments > accepted | set(integration.REMEDIES)
    assert arguments - accepted <= set(OTHERS)  # what is not accepted is refused


OTHERS = {
    "strategy": "fsdp",
    "devices": 2,
    "num_nodes": 2,
    "logger": object(),
    "fast_dev_run": True,
    "min_epochs": 1,
    "min_steps": 1,
    "max_time": "00:01:00:00",
    "limit_train_batches": 0.5,
    "limit_val_batches": 2,
    "overfit_batches": 1,
    "val_check_interval": 0.5,
    "gradient_clip_algorithm": "value",
    "benchmark": True,
    "profiler": "simple",
    "detect_anomaly": True,
    "barebones": True,
    "plugins": [object()],
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 1,
    "model_registry": "a",
    "precision": "64-true",
    "check_val_every_n_epoch": None,
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_argument_that_cannot_be_had_is_refused_by_name(name):
    with pytest.raises(SpecError, match=f"^{name} is .*which is not supported"):
        integration.LightningTrainer(
            jobs.Classifier(), datamodule=jobs.PointsData(), **{name: OTHERS[name]}
        )


SCALINGS = [
    ({"virtual_workers": {0: 2, 5: 4}}, r"virtual_workers is \{0: 2, 5: 4\}, but the Trainer"),
    ({"processes_per_worker": 2}, "processes_per_worker is 2, which .*Trainer does not work with"),
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 8}, "LightningTrainer has no option 'gpus'"),
        ({"stroage_path": "runs"}, "no option 'stroage_path'. Did you mean 'storage_path'"),
        ({"limit_train_batch": 3}, "Did you mean 'limit_train_batches'"),
        ({"ckpt_path": "last"}, "ckpt_path is given, .*under the same name goes on"),
        ({"train": 3}, "train is given, but it comes from the module"),
        ({"data": 3}, "data is given, but it comes from the module"),
        ({"scaling": 4}, "scaling is a int, must be a ScalingConfig"),
        *(({"scaling": edp.ScalingConfig(**scaling)}, words) for scaling, words in SCALINGS),
        ({"accumulate_grad_batches": {0: 2}}, "accumulate_grad_batches is .* whole number"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0, must be .* at least 1"),
        ({"log_every_n_steps": -1}, "log_every_n_steps is -1"),
        ({"max_epochs": 1.5}, "max_epochs is 1.5, must be a whole number"),
        ({"max_steps": None}, "max_steps is None, must be a whole number"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val is -1.0, must be None or a number"),
        ({"callbacks": [print]}, "callbacks has <built-in function print>, must be a list of"),
        ({"callbacks": "EarlyStopping"}, "callbacks has 'E', must be a list of"),
    ],
)
def test_option_that_is_unknown_or_of_a_wrong_kind_is_refused_by_name(options, words):
    with pytest.raises(SpecError, match=words):
        integration.LightningTrainer(
            jobs.Classifier(), datamodule=jobs.PointsData(), **{"max_epochs": 1} | options
        )


def overriding(base, name):
    return type("Mine", (base,), {name: lambda self, *args, **kwargs: None})


@pytest.mark.parametrize(
    "hook",
    [
        *("on_train_batch_start", "on_validation_batch_start", "on_validation_batch_end"),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "on_validation_model_eval", "configure_sharded_model"),
        *("on_save_checkpoint", "on_load_checkpoint", "backward", "optimizer_step"),
        *("configure_gradient_clipping", "lr_scheduler_step", "optimizer_zero_grad"),
    ],
)
def test_hook_that_would_not_be_called_is_refused_where_it_is_overridden(hook):
    with pytest.raises(SpecError, match=f"Mine overrides {hook}"):
        integration.LightningTrainer(
            overriding(jobs.Classifier, hook)(), datamodule=jobs.PointsData(), max_epochs=1
        )
    if hasattr(pl.Callback, hook):
        with pytest.raises(SpecError, match=f"Mine overrides {hook}"):
            integration.LightningTrainer(
                jobs.Classifier(),
                datamodule=jobs.PointsData(),
                callbacks=[overriding(pl.Callback, hook)()],
            )


def test_hooks_of_testing_and_prediction_are_no_reason_to_refuse():
    module = overriding(jobs.Classifier, "on_test_batch_end")()
    assert integration.LightningTrainer(
        module, name="job", datamodule=jobs.PointsData(), max_epochs=1
    )


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        ("Manual", "PointsData", "optimizes manually"),
        ("Metered", "PointsData", r"module\.meter is a MeanMetric of torchmetrics"),
        ("Classifier", "Weighted", "has a sampler of its own"),
        ("Classifier", "Several", "the train dataloader is a list"),
        ("Classifier", "Moves", "Moves overrides transfer_batch_to_device"),
        ("Classifier", "Streams", "has an IterableDataset"),
    ],
)
def test_module_and_data_that_cannot_be_had_are_refused(module, data, words):
    module, data = getattr(jobs, module)(), getattr(jobs, data)()
    with pytest.raises(SpecError, match=words):
        integration.LightningTrainer(module, datamodule=data, max_epochs=1)


def test_callback_and_module_of_another_kind_are_refused():
    checkpoint = pl.callbacks.ModelCheckpoint()
    with pytest.raises(SpecError, match="callbacks has a ModelCheckpoint"):
        integration.LightningTrainer(
            jobs.Classifier(), datamodule=jobs.PointsData(), max_epochs=1, callbacks=checkpoint
        )
    with pytest.raises(SpecError, match="module is a Identity, must be a LightningModule"):
        integration.LightningTrainer(
            torch.nn.Identity(), datamodule=jobs.PointsData(), max_epochs=1
        )


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        ("TwoOptimizers", SpecError, "returned 2 optimizers"),
        ("SumsLog", LossError, "only means are supported"),
        ("LogsBatches", LossError, "with on_step=True"),
        ("KeepsOutputs", LossError, r"adds to self\.outputs\['logits'\]"),
        ("MonitorsNothing", LoopError, "monitors 'nothing'"),
    ],
)
def test_module_that_asks_for_more_in_training_is_an_error(module, error, words, tmp_path):
    with pytest.raises(error, match=words):
        fit(getattr(jobs, module)(), tmp_path)


# ------------------------------------------------------------------------------------ with kills
