"""A LightningModule runs by `ctx.steps`: the same losses as by Lightning's Trainer, and what cannot
be had is refused by name."""

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
    usual = {"max_epochs": 3, "accumulate_grad_batches": 4, "log_every_n_steps": 1}
    options = usual | options
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


@pytest.mark.parametrize("schedule", ["none", "step", "epoch", "plateau", "two", "not strict"])
def test_loss_curve_is_the_one_of_lightning_within_one_in_a_hundred_thousand(
    schedule, tmp_path, original
):
    """Over the same rows: both read them in the order of the data set, and no dropout."""
    ours, theirs, curve = (
        jobs.Classifier(0.0, schedule),
        jobs.Classifier(0.0, schedule),
        jobs.Curve(),
    )
    result = fit(ours, tmp_path, jobs.PointsData(False), gradient_clip_val=0.5)
    trainer = original(theirs, jobs.PointsData(False), callbacks=[curve], gradient_clip_val=0.5)
    assert result.step == 18 and result.exact
    lines = logged(tmp_path)
    assert [line["train_loss_step"] for line in lines] == pytest.approx(curve.losses, rel=1e-5)
    assert [line["rate"] for line in lines] == pytest.approx(curve.rates, rel=1e-12)
    for key in ("train_loss_epoch", "train_accuracy", "val_loss", "val_accuracy"):
        theirs_last = float(trainer.callback_metrics[key])
        assert lines[-1][key] == pytest.approx(theirs_last, rel=1e-5), key
    assert lines[-1]["val_batch"] == pytest.approx(float(trainer.callback_metrics["val_batch"]))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, ours.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_parts_in_the_mode_of_evaluation_stay_in_it(tmp_path, original):
    ours, theirs = jobs.Frozen(), jobs.Frozen()
    fit(ours, tmp_path, jobs.PointsData(False))
    original(theirs, jobs.PointsData(False))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, ours.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_bf16_has_the_loss_curve_of_lightning(tmp_path, original):
    curve, options = jobs.Curve(), {"precision": "bf16-mixed", "max_epochs": 1}
    fit(jobs.Classifier(0.0), tmp_path, jobs.PointsData(False), **options)
    original(jobs.Classifier(0.0), jobs.PointsData(False), callbacks=[curve], **options)
    losses = [line["train_loss_step"] for line in logged(tmp_path)]
    assert losses == pytest.approx(curve.losses, rel=1e-2)


# --------------------------------------------------------------------------------------- logging


def test_step_is_logged_every_so_many_steps_and_epochs_at_their_end(tmp_path, capsys):
    fit(jobs.Classifier(), tmp_path, log_every_n_steps=4)
    assert "WARNING" not in capsys.readouterr().err  # of what a loop's body changes
    lines = logged(tmp_path)
    assert [line["step"] for line in lines if "train_loss_step" in line] == [4, 8, 12, 16]
    ends = [line["step"] for line in lines if "train_loss_epoch" in line]
    assert ends == [6, 12, 18] == [line["step"] for line in lines if "val_loss" in line]
    assert [line["epoch"] for line in lines if "val_loss" in line] == [0, 1, 2]


def test_validation_runs_after_every_so_many_epochs(tmp_path):
    fit(jobs.Classifier(), tmp_path, check_val_every_n_epoch=2)
    assert [line["epoch"] for line in logged(tmp_path) if "val_loss" in line] == [1]


@pytest.mark.parametrize("schedule", [pytest.param("step", marks=pytest.mark.slow), "plateau"])
def test_run_that_failed_goes_on_with_the_log_and_the_weights_of_an_undisturbed_one(
    schedule, tmp_path
):
    """The run goes on in the middle of an epoch, whose means are over all of its steps."""
    options = {"checkpoint": edp.CheckpointConfig(every_steps=4)}
    undisturbed = fit(jobs.Classifier(schedule=schedule), tmp_path, name="calm", **options)
    with pytest.raises(RuntimeError, match="once"):
        fit(jobs.FailsOnce(tmp_path, schedule), tmp_path, **options)
    again = jobs.FailsOnce(tmp_path, schedule)
    result = fit(again, tmp_path, **options)
    assert result.weights_sha256 == undisturbed.weights_sha256
    calm, ours = (
        {line["step"]: line for line in logged(tmp_path, name)} for name in ("calm", "run")
    )
    for step in (6, 12, 18):
        assert ours[step]["train_loss_epoch"] == calm[step]["train_loss_epoch"]
    for name, value in result.load_state().model.items():
        assert torch.equal(value, again.state_dict()[name])


def test_run_that_failed_is_continued_by_the_same_object(tmp_path):
    options = {"checkpoint": edp.CheckpointConfig(every_steps=4), "max_epochs": 2}
    undisturbed = fit(jobs.Classifier(), tmp_path, name="calm", **options)
    job = integration.LightningTrainer(
        jobs.FailsOnce(tmp_path),
        datamodule=jobs.PointsData(),
        storage_path=str(tmp_path),
        name="run",
        accumulate_grad_batches=4,
        **options,
    )
    with pytest.raises(RuntimeError, match="once"):
        job.fit(local=True)
    assert job.fit(local=True).weights_sha256 == undisturbed.weights_sha256


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
    given = {"module": jobs.Classifier(), "data": jobs.PointsData()}
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


def test_sharded_optimizer_is_passed_on_and_refused_with_loss_scaling(tmp_path):
    options = {"datamodule": jobs.PointsData(), "max_epochs": 1, "sharding": "optimizer"}
    trainer = integration.LightningTrainer(jobs.Classifier(), name="job", **options)
    assert trainer.spec.sharding == "optimizer"
    with pytest.raises(SpecError, match=r'precision is "fp16", whose loss scaling .* use "bf16"'):
        fit(jobs.Classifier(), tmp_path, sharding="optimizer", precision="16-mixed")


def test_dataloaders_may_be_given_or_be_those_of_the_module(tmp_path):
    class WithData(jobs.Classifier):
        def train_dataloader(self):
            return DataLoader(jobs.Pairs(16), batch_size=2)

    job = integration.LightningTrainer(WithData(), name="job", max_steps=3)
    assert not job.spec.data.shuffle and job.spec.max_steps == 3 and job.spec.data.epochs is None
    loader = DataLoader(jobs.Pairs(16), batch_size=8, shuffle=True, drop_last=True)
    job = integration.LightningTrainer(
        jobs.Classifier(), name="job", train_dataloaders=loader, max_epochs=1
    )
    assert job.spec.data.micro_batch_size == 8 and job.spec.data.tail == "drop"


def test_validation_leaves_out_the_last_batch_where_its_dataloader_does(tmp_path):
    means = []
    for rows, options in ((8, {}), (10, {"drop_last": True})):
        job = integration.LightningTrainer(
            jobs.Classifier(),
            name=str(rows),
            storage_path=str(tmp_path),
            train_dataloaders=DataLoader(jobs.Pairs(16), batch_size=2),
            val_dataloaders=DataLoader(jobs.Pairs(rows), batch_size=4, **options),
            max_epochs=1,
        )
        means.append(job.fit(local=True).metrics["val_loss"])
    assert means[0] == means[1]


# ---------------------------------------------------------------------------------- what is had


def test_other_arguments_of_lightnings_trainer_are_refused_by_name():
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert arguments > {*integration.USED, *integration.REMEDIES} and len(arguments) > 35
    for name in arguments - {*integration.USED}:
        remedy = integration.REMEDIES.get(name, "leave it out")
        with pytest.raises(SpecError) as refusal:
            integration.LightningTrainer(jobs.Classifier(), **{name: None})
        assert str(refusal.value).startswith(f"{name} is given, which LightningTrainer does not")
        assert str(refusal.value).endswith(remedy)


SCALINGS = [
    ({"virtual_workers": {0: 2, 5: 4}}, r"virtual_workers=\{0: 2, 5: 4\}.*, but LightningTrainer"),
    ({"processes_per_worker": 2}, "processes_per_worker=2.*, but LightningTrainer works with"),
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 8}, "LightningTrainer has no option 'gpus'"),
        ({"stroage_path": "runs"}, "no option 'stroage_path'. Did you mean 'storage_path'"),
        ({"limit_train_batch": 3}, "Did you mean 'limit_train_batches'"),
        ({"ckpt_path": "last"}, "ckpt_path is given, .*under the same name goes on"),
        ({"train": 3}, "train is given, .*it is the module's training_step"),
        ({"data": 3}, "data is given, .*it comes from the dataloaders"),
        ({"scaling": 4}, "scaling is a int, must be a ScalingConfig"),
        *(({"scaling": edp.ScalingConfig(**scaling)}, words) for scaling, words in SCALINGS),
        ({"accumulate_grad_batches": {0: 2}}, "accumulate_grad_batches is .* whole number"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0, must be .* at least 1"),
        ({"log_every_n_steps": -1}, "log_every_n_steps is -1"),
        ({"max_epochs": 1.5}, "max_epochs is 1.5, must be a whole number"),
        ({"max_steps": -1}, "max_steps is -1, must be a whole number"),
        ({"precision": "64-true"}, "precision is '64-true', must be one of 32-true"),
    ],
)
def test_option_that_is_unknown_or_of_a_wrong_kind_is_refused_by_name(options, words):
    with pytest.raises(SpecError, match=words):
        integration.LightningTrainer(
            jobs.Classifier(), datamodule=jobs.PointsData(), **{"max_epochs": 1} | options
        )


def overriding(base, name):
    return type("Mine", (base,), {name: lambda self, *args, **kwargs: None})


def test_hook_that_would_not_be_called_is_refused_where_it_is_overridden():
    assert {"on_train_batch_end", "on_validation_epoch_end", "on_save_checkpoint", "backward"} < {
        *integration.NOT_CALLED
    }
    of_datamodules = integration.NOT_CALLED + integration.OF_DATAMODULES
    for base, hooks in (
        (jobs.Classifier, integration.NOT_CALLED),
        (jobs.PointsData, of_datamodules),
    ):
        for hook in hooks:
            if not hasattr(base, hook):
                continue
            given = {"module": jobs.Classifier(), "datamodule": jobs.PointsData()}
            given["module" if base is jobs.Classifier else "datamodule"] = overriding(base, hook)()
            with pytest.raises(SpecError, match=f"Mine overrides {hook}"):
                integration.LightningTrainer(**given, max_epochs=1)


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
        ("Classifier", "Weighted", "the train dataloader is .* no sampler of its own"),
        ("Classifier", "Several", "the train dataloader is a list, must be one torch DataLoader"),
        ("Classifier", "Moves", "Moves overrides transfer_batch_to_device"),
        ("Classifier", "Streams", "a map-style dataset"),
        ("Classifier", "Empty", "a map-style dataset with rows"),
    ],
)
def test_module_and_data_that_cannot_be_had_are_refused(module, data, words):
    module, data = getattr(jobs, module)(), getattr(jobs, data)()
    with pytest.raises(SpecError, match=words):
        integration.LightningTrainer(module, datamodule=data, max_epochs=1)


def test_module_of_another_kind_is_refused():
    with pytest.raises(SpecError, match="module is a Identity, must be a LightningModule"):
        integration.LightningTrainer(
            torch.nn.Identity(), datamodule=jobs.PointsData(), max_epochs=1
        )


@pytest.mark.parametrize(
    ("module", "error", "words"),
    [
        ("TwoOptimizers", SpecError, "returned 2 optimizers"),
        ("MisspellsLog", TypeError, "on_steps, which it does not take"),
        ("ForgetsLoss", LossError, "returned a dict of los without 'loss'"),
        ("SumsLog", LossError, "reduce_fx='sum'.* the mean over the batch"),
        ("LogsBatches", LossError, "on_step=True, .*on_epoch alone in validation_step"),
        ("MonitorsNothing", LoopError, "monitors 'nothing'"),
    ],
)
def test_module_that_asks_for_more_in_training_is_an_error(module, error, words, tmp_path):
    with pytest.raises(error, match=words):
        fit(getattr(jobs, module)(), tmp_path)
