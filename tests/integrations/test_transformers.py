"""A `transformers.Trainer` runs by `ctx.steps`: the same losses as by its own loop, and what cannot
be had is refused by name."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

import elastic_dp as edp
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.errors import SpecError
from elastic_dp.storage import Store
from tests.imported_when_used import ImportedWhenUsed

datasets = ImportedWhenUsed("datasets")
transformers = ImportedWhenUsed("transformers")
integration = ImportedWhenUsed("elastic_dp.integrations.transformers")
jobs = ImportedWhenUsed("tests.integrations.hugging_face")
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["text_classification", "causal_lm"])
def job(request):
    return getattr(jobs, request.param)


def fit(trainer, folder, name="run", **options):
    ours = integration.TransformersTrainer(trainer, storage_path=folder, name=name, **options)
    return ours.fit(local=True)


def pair(folder, **options):
    """The same job twice: for Trainer's own loop, and for ours."""
    return [jobs.causal_lm(folder / name, **options) for name in "ab"]


def losses(trainer, key="loss"):
    return {line["step"]: line[key] for line in trainer.state.log_history if key in line}


# ---------------------------------------------------------------------------- beside the library


def test_loss_curve_is_the_one_of_trainer_within_one_in_a_hundred_thousand(job, tmp_path):
    """Over the same rows: both read them in the order of the data set, and no dropout. The last
    step of an epoch is a short one."""
    options = {"train_sampling_strategy": "sequential", "eval_strategy": "epoch"}
    options |= {"label_smoothing_factor": 0.1, "weight_decay": 0.01, "warmup_steps": 3}
    options |= {"dropout": 0.0} if job is jobs.text_classification else {}
    original, ours = job(tmp_path / "a", **options), job(tmp_path / "b", **options)
    original.train()
    result = fit(ours, tmp_path)
    assert result.step == 12 and result.exact
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
        curve = losses(original, key)
        assert losses(ours, key) == pytest.approx(curve, rel=1e-5), key
        evaluated = key != "eval_accuracy" or job is jobs.text_classification
        assert len(curve) == (2 * evaluated if key.startswith("eval") else 12)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}
OFTEN_USED = {
    "steps that are shares": EVALUATES | {"logging_steps": 0.25, "eval_steps": 0.25},
    "late evaluations": EVALUATES | {"eval_delay": 6, "eval_accumulation_steps": 1},
    "epochs": {"max_steps": -1, "num_train_epochs": 1.5, "logging_strategy": "epoch"},
    "first step": {"logging_first_step": True, "logging_steps": 5},
    "data processes": {"dataloader_num_workers": 2},
    "a batch of more rows than there are": {
        "per_device_train_batch_size": 100,
        "gradient_accumulation_steps": 1,
    },
    "full batches": {"gradient_accumulation_steps": 1, "dataloader_drop_last": True},
    "clipping": {"max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "AdamW": {"adam_beta2": 0.9, "weight_decay": 0.1},
    **{optimizer: {"optim": optimizer} for optimizer in ("adafactor", "adagrad", "rmsprop", "sgd")},
    **{
        schedule: {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": options}
        | {"warmup_steps": 0.2}
        for schedule, options in {
            "constant_with_warmup": {},
            "cosine_with_min_lr": {"min_lr": 1e-4},
            "cosine_with_restarts": {"num_cycles": 2},
            "inverse_sqrt": {},
            "polynomial": {},
            "warmup_stable_decay": {"num_decay_steps": 4},
        }.items()
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OFTEN_USED.values(), ids=OFTEN_USED)
def test_options_that_are_often_used_do_what_they_do_in_trainer(options, tmp_path):
    options = {"train_sampling_strategy": "sequential"} | options
    original, ours = pair(tmp_path, **options)
    original.train()
    result = fit(ours, tmp_path)
    assert result.exact and result.step == original.state.global_step
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        curve = losses(original, key)
        assert losses(ours, key) == pytest.approx(curve, rel=1e-5), key
        assert curve or key == "eval_loss"


@pytest.mark.parametrize(
    ("more", "rel"),
    [
        ({"bf16": True, "max_steps": 4}, 1e-3),
        ({"kind": "Halved"}, 1e-5),
        ({"kind": "Stops"} | EVALUATES, 1e-5),
    ],
    ids=["bf16", "compute_loss of a subclass", "evaluate that stops"],
)
def test_loss_curve_and_rates_are_those_of_trainer(more, rel, tmp_path):
    kind = getattr(jobs, more.get("kind", "Trainer"))
    options = {"train_sampling_strategy": "sequential"} | more | {"kind": kind}
    trainers = pair(tmp_path, **options)
    trainers[0].train()
    fit(trainers[1], tmp_path)
    for key in ("loss", "learning_rate"):
        assert losses(trainers[1], key) == pytest.approx(losses(trainers[0], key), rel=rel)


# --------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_made_where_trainer_saves(tmp_path, capsys):
    trainer = jobs.text_classification(tmp_path, save_strategy="steps", save_steps=5)
    result = fit(trainer, tmp_path)
    names = Catalog(Store(str(tmp_path / "run"))).names()
    assert [name.step for name in names] == [5, 10, 12]
    assert "WARNING" not in capsys.readouterr().err  # of what a loop's body changes
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, result.load_state().model[name])
    assert len(trainer.state.log_history) == trainer.state.global_step == 12


def test_run_that_failed_goes_on_with_the_log_and_the_weights_of_an_undisturbed_one(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"}
    options |= {"logging_steps": 3}
    calm = jobs.text_classification(tmp_path / "a", **options)
    undisturbed = fit(calm, tmp_path, "calm")
    first, again = (jobs.text_classification(tmp_path, **options) for _ in range(2))
    first.compute_metrics = jobs.FailsAt(2)
    with pytest.raises(RuntimeError, match="once"):
        fit(first, tmp_path)
    result = fit(again, tmp_path)
    assert result.step == 12 and result.weights_sha256 == undisturbed.weights_sha256
    for key in ("loss", "learning_rate", "eval_loss", "eval_accuracy"):
        assert losses(again, key) == losses(calm, key)


def test_limit_that_is_raised_and_intervals_of_the_new_start_count(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4} | EVALUATES
    fit(jobs.causal_lm(tmp_path, max_steps=4, **options), tmp_path)
    trainer = jobs.causal_lm(tmp_path, max_steps=12, **options | {"logging_steps": 5})
    fit(trainer, tmp_path)
    assert trainer.state.max_steps == 12 and trainer.state.num_train_epochs == 2
    assert [*losses(trainer)] == [1, 2, 3, 4, 5, 10]
    assert [*losses(trainer, "eval_loss")] == [3, 4, 6, 9, 12]
    names = Catalog(Store(str(tmp_path / "run"))).names()
    assert [name.step for name in names] == [4, 8, 12]


def test_model_init_makes_the_model_in_the_worker(tmp_path):
    trainers = [jobs.causal_lm(tmp_path) for _ in range(2)]
    digests = set()
    for number, trainer in enumerate(trainers):
        kind, config = type(trainer.model), trainer.model.config
        trainer.model_init = functools.partial(kind, config)
        digests.add(fit(trainer, tmp_path, f"run{number}").weights_sha256)
    assert len(digests) == 1


# ------------------------------------------------------------------------------------ the job


def test_script_of_the_page_changes_by_at_most_six_lines_and_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/integrations.md").read_text()
    diff, _ = re.findall("```diff\n(.*?)```", page, re.S)
    lines = diff.splitlines()
    assert sum(line[:1] in ("+", "-") for line in lines) <= 6
    monkeypatch.chdir(tmp_path)
    there = jobs.text_classification(tmp_path, max_steps=2)
    given = {"model": there.model, "args": there.args, "tokenizer": there.processing_class}
    given |= {"train": there.train_dataset, "test": there.eval_dataset}
    script = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    script = script.replace("/shared/runs", "runs").replace(".fit()", ".fit(local=True)")
    exec(script.replace(', resources_per_worker={"GPU": 1}', ""), given)
    assert "'eval_loss':" in capsys.readouterr().out
    assert transformers.AutoModelForSequenceClassification.from_pretrained("final") is not None


def test_global_batch_is_the_one_of_as_many_processes(tmp_path):
    trainer = jobs.causal_lm(tmp_path, max_steps=-1, num_train_epochs=2.5)
    job = integration.TransformersTrainer(
        trainer, name="job", scaling=edp.ScalingConfig(max_workers=3)
    )
    assert job.spec.data.micro_batch_size == 2
    assert job.spec.scaling.num_virtual_workers == 12
    assert job.spec.max_steps == 5  # 44 rows in batches of 24: 2 steps an epoch
    assert job.spec.data.tail == "short" and job.spec.data.shuffle


def test_sharded_optimizer_is_passed_on(tmp_path):
    trainer = integration.TransformersTrainer(
        jobs.causal_lm(tmp_path / "a"), name="a", storage_path=tmp_path, sharding="optimizer"
    )
    assert trainer.spec.sharding == "optimizer"


def test_run_that_failed_is_continued_by_the_same_object(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "epoch"}
    undisturbed = fit(jobs.text_classification(tmp_path, **options), tmp_path, "calm")
    trainer = jobs.text_classification(tmp_path, **options)
    trainer.compute_metrics = jobs.FailsAt(2)
    job = integration.TransformersTrainer(trainer, storage_path=tmp_path, name="run")
    with pytest.raises(RuntimeError, match="once"):
        job.fit(local=True)
    result = job.fit(local=True)
    assert result.step == 12 and result.weights_sha256 == undisturbed.weights_sha256
    assert [*losses(trainer)] == [*range(1, 13)]


# ----------------------------------------------------------------------------------- what is had


def test_tables_name_fields_of_training_arguments():
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    accepted = set(integration.ACCEPTED)
    assert fields > accepted | set(integration.REMEDIES) and not accepted & set(OTHERS)
    assert fields - accepted <= set(OTHERS)  # what is not accepted is refused


OTHERS = {
    "tf32": True,
    "optim_target_modules": ["q_proj"],
    "average_tokens_across_devices": False,
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "include_num_input_tokens_seen": "all",
    "eval_on_start": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "ignore_data_skip": True,
    "parallelism_config": object(),
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 1},
    "deepspeed": "ds.json",
    "debug": ["underflow_overflow"],
    "skip_memory_metrics": False,
    "resume_from_checkpoint": "out/checkpoint-5",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "save_total_limit": 2,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "data_seed": 7,
    "torch_empty_cache_steps": 2,
    "log_on_each_node": False,
    "save_only_model": True,
    "eval_use_gather_object": True,
    "restore_callback_states_from_checkpoint": True,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "length_column_name": "n",
    "ddp_bucket_cap_mb": 25,
    "ddp_find_unused_parameters": True,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 5,
    "hub_token": "secret",
    "hub_private_repo": True,
    "hub_model_id": "a",
    "hub_always_push": True,
    "hub_revision": "a",
    "project": "a",
    "trackio_space_id": "a",
    "trackio_bucket_id": "a",
    "trackio_static_space_id": "a",
}
VALUES = OTHERS | {
    "activation_checkpointing": True,
    "train_sampling_strategy": "group_by_length",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "save_strategy": "best",
    "mixed_precision": "fp8",
    "optim": "lomo",
    "tf32": False,
}


@pytest.mark.parametrize("field", sorted(VALUES))
def test_field_that_cannot_be_had_is_refused_by_name(field, tmp_path):
    trainer = jobs.causal_lm(tmp_path, max_steps=-1)
    setattr(trainer.args, field, VALUES[field])
    with pytest.raises(SpecError, match=rf"TrainingArguments\.{field} is .*which is not supported"):
        integration.TransformersTrainer(trainer)


def test_split_batches_of_accelerate_are_refused_by_name(tmp_path):
    trainer = jobs.causal_lm(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(SpecError, match=r"accelerator_config\.split_batches"):
        integration.TransformersTrainer(trainer)


def test_fields_of_a_derived_class_are_its_own(tmp_path):
    there = jobs.causal_lm(tmp_path)
    given = jobs.OwnArguments(tmp_path, use_cpu=True, temperature=0.5, report_to="none")
    trainer = transformers.Trainer(there.model, given, train_dataset=there.train_dataset)
    assert integration.TransformersTrainer(trainer, name="job").spec.max_steps == 18


def test_methods_that_are_not_called_are_refused_where_a_subclass_overrides_them(tmp_path):
    trainer = jobs.causal_lm(tmp_path)
    assert {"train", "training_step", "log", "get_train_dataloader"} < {*integration.NOT_CALLED}
    for name in integration.NOT_CALLED:
        methods = {name: lambda self, *args, **kwargs: None}
        trainer.__class__ = type("Mine", (transformers.Trainer,), methods)
        with pytest.raises(SpecError, match=f"Mine overrides {name}, which is not called"):
            integration.TransformersTrainer(trainer)


def test_callbacks_are_refused_by_name(tmp_path):
    callbacks = [transformers.EarlyStoppingCallback()]
    with pytest.raises(SpecError, match=r"callbacks \(EarlyStoppingCallback\).*pass loggers="):
        integration.TransformersTrainer(jobs.causal_lm(tmp_path, callbacks=callbacks))


def test_optimizer_that_each_worker_would_not_make_is_refused(tmp_path):
    trainer = jobs.causal_lm(tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(SpecError, match=r"has an optimizer.*override create_optimizer"):
        integration.TransformersTrainer(trainer)


def test_trainer_of_another_kind_or_without_data_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"must be a transformers\.Trainer"):
        integration.TransformersTrainer(jobs.arguments(tmp_path))
    trainer = jobs.causal_lm(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(SpecError, match="train_dataset is a NoneType"):
        integration.TransformersTrainer(trainer)
    trainer = jobs.causal_lm(tmp_path, max_steps=-1, num_train_epochs=0)
    with pytest.raises(SpecError, match=r"no step to make: .*num_train_epochs is 0"):
        integration.TransformersTrainer(trainer)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            lambda: datasets.IterableDataset.from_generator(iter, gen_kwargs={}),
            "train_dataset is a IterableDataset",
        ),
        (Stream, "train_dataset is a Stream, must be a map-style"),
        (list, "train_dataset is a list, must be a map-style dataset with rows"),
    ],
)
def test_rows_without_numbers_are_refused(rows, words, tmp_path):
    trainer = jobs.causal_lm(tmp_path)
    trainer.train_dataset = rows()
    with pytest.raises(SpecError, match=words):
        integration.TransformersTrainer(trainer)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage_pth": "runs"}, "no option 'storage_pth'. Did you mean 'storage_path'"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint is given, .*goes on"),
        ({"train": 3}, "train is given, which .*: it comes from the Trainer"),
        ({"data": 3}, "data is given, which .*: it comes from the Trainer"),
        ({"max_steps": 3}, "max_steps is given, which .*: it comes from TrainingArguments"),
        ({"scaling": {"max_workers": 2}}, "scaling is a dict, must be a ScalingConfig"),
        (
            {"scaling": edp.ScalingConfig(virtual_workers={0: 2, 5: 4})},
            r"virtual_workers=\{0: 2, 5: 4\}.*, but TransformersTrainer works with",
        ),
        (
            {"scaling": edp.ScalingConfig(processes_per_worker=2)},
            "processes_per_worker=2.*, but TransformersTrainer works with",
        ),
    ],
)
def test_option_that_is_unknown_or_of_a_wrong_kind_is_refused_by_name(options, words, tmp_path):
    with pytest.raises(SpecError, match=words):
        integration.TransformersTrainer(jobs.causal_lm(tmp_path), **options)
