"""What becomes of each argument of `lightning.pytorch.Trainer`, and of each hook.

As for `TrainingArguments`, the tests compare the tables with the installed version.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from elastic_dp.errors import SpecError

# docs/lightning.md says how
USED = (
    *("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision"),
    *("callbacks", "check_val_every_n_epoch", "log_every_n_steps"),
)

# Allowed values, and the way out for others.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "strategy": (("auto", "ddp"), "each worker holds the whole model, and is started for you"),
    "devices": (("auto", 1, "1"), "set ScalingConfig.max_workers; a worker has one device"),
    "num_nodes": ((1,), "set ScalingConfig.max_workers"),
    "logger": (
        (None, True, False),
        "pass loggers=, such as a TensorBoardLogger, WandbLogger or MLflowLogger of "
        "elastic_dp.integrations",
    ),
    "fast_dev_run": ((False,), "set max_steps, and fit(local=True)"),
    "min_epochs": ((None,), "leave it out"),
    "min_steps": ((None,), "leave it out"),
    "max_time": ((None,), "set max_time_s"),
    "limit_train_batches": ((None, 1.0), "set max_steps, or pass a part of the dataset"),
    "limit_val_batches": ((None, 1.0), "pass a part of the dataset"),
    "overfit_batches": ((0.0,), "pass a part of the dataset"),
    "val_check_interval": ((None, 1.0), "validation runs after an epoch"),
    "gradient_clip_algorithm": ((None, "norm"), "gradients are clipped by their norm"),
    "benchmark": ((None, False), "exact=True needs the same kernels in every run"),
    "profiler": ((None,), "leave it out"),
    "detect_anomaly": ((False,), "leave it out, or train a step by fit(local=True) with torch's"),
    "barebones": ((False,), "leave it out"),
    "plugins": ((None,), "leave it out"),
    "sync_batchnorm": (
        (False,),
        "BatchNorm is computed per virtual worker, so it does not depend on the number of workers",
    ),
    "reload_dataloaders_every_n_epochs": ((0,), "the rows of a run are fixed"),
    "model_registry": ((None,), "leave it out"),
}

# docs/lightning.md says why
IGNORED = (
    *("accelerator", "limit_test_batches", "limit_predict_batches", "num_sanity_val_steps"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "deterministic"),
    *("inference_mode", "use_distributed_sampler", "default_root_dir", "enable_autolog_hparams"),
)

_LEAST = {
    **dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    "log_every_n_steps": 0,
    **dict.fromkeys(("max_epochs", "max_steps"), -1),
}

PRECISIONS: dict[Any, str | None] = {
    **dict.fromkeys((None, "32-true", "32", 32)),
    **dict.fromkeys(("bf16-mixed", "bf16"), "bf16"),
    **dict.fromkeys(("16-mixed", "16", 16), "fp16"),
}

# Hooks of modules and callbacks that are called in the loop's body.
IN_BODY = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
)
_OF_SETUP = ("prepare_data", "setup", "configure_model", "train_dataloader", "val_dataloader")
_OF_A_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OF_OPTIMIZATION = (
    *("backward", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step"),
    "optimizer_zero_grad",
)
_ONCE = {"setup", "teardown", "state_dict", "load_state_dict"}
_CALLBACKS = (EarlyStopping, LambdaCallback)  # of Lightning's own


def options_of_lightning(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are used, with their defaults. Raises SpecError for the first
    argument that cannot be had."""
    for name, value in given.items():
        if name in REFUSED and not _among(value, REFUSED[name][0]):
            raise SpecError(f"{name} is {value!r}, which is not supported: {REFUSED[name][1]}")
    options: dict[str, Any] = {
        "max_epochs": None,
        "max_steps": -1,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "precision": None,
        "callbacks": None,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": None,
    }
    options |= {name: value for name, value in given.items() if name in USED}
    if not _among(options["precision"], tuple(PRECISIONS)):
        raise SpecError(
            f"precision is {options['precision']!r}, which is not supported: use 32-true, "
            "bf16-mixed or 16-mixed"
        )
    if options["check_val_every_n_epoch"] is None:
        raise SpecError(
            "check_val_every_n_epoch is None, which is not supported: validation runs after epochs"
        )
    for name, least in _LEAST.items():
        value = options[name]
        if value is None and name in ("max_epochs", "log_every_n_steps"):
            continue
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise SpecError(f"{name} is {value!r}, must be a whole number of at least {least}")
    clip = options["gradient_clip_val"]
    if clip is not None and not (isinstance(clip, int | float) and clip >= 0):
        raise SpecError(f"gradient_clip_val is {clip!r}, must be None or a number of at least 0")
    return options


def check_module(module: Any) -> None:
    """Raises SpecError for a hook that is overridden and would not be called."""
    if not module.automatic_optimization:
        raise SpecError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and a "
            "step that is undone and done again must not write to weights by itself: return the "
            "loss, or write the loop with ctx.steps"
        )
    called = {*IN_BODY, *_OF_SETUP, *_OF_A_BATCH, "teardown"}
    hooks = _public(ModelHooks) | _public(DataHooks) | _public(CheckpointHooks)
    _check_overrides(module, LightningModule, (hooks | {*_OF_OPTIMIZATION}) - called)


def check_datamodule(datamodule: Any) -> None:
    """Raises SpecError for a hook that is overridden and would not be called."""
    hooks = _public(DataHooks) | _public(CheckpointHooks)
    _check_overrides(datamodule, LightningDataModule, hooks - {*_OF_SETUP, "teardown"})


def check_callback(callback: Any) -> None:
    """Raises SpecError for a callback that needs what a step does not have."""
    kind = type(callback)
    if not isinstance(callback, Callback):
        raise SpecError(f"callbacks has {callback!r}, must be a list of Lightning's Callback")
    if kind.__module__.startswith("lightning.") and kind not in _CALLBACKS:
        ours = ", ".join(one.__name__ for one in _CALLBACKS)
        raise SpecError(
            f"callbacks has a {kind.__name__}, which is not supported. Of Lightning's own, these "
            f"are: {ours}. For checkpoints, pass checkpoint=; progress is shown by fit"
        )
    _check_overrides(callback, Callback, _public(Callback) - {*IN_BODY, *_ONCE})


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)


def _public(cls: type) -> set[str]:
    return {
        name
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_") and not _of_other_stages(name)
    }


def _of_other_stages(name: str) -> bool:
    """Whether a hook is of testing or prediction, which a run does not do."""
    return any(word in name for word in ("test", "predict", "sanity"))


def _check_overrides(owner: Any, base: type, hooks: set[str]) -> None:
    for name in sorted(hooks):
        if hasattr(base, name) and getattr(type(owner), name) is not getattr(base, name):
            raise SpecError(
                f"{type(owner).__name__} overrides {name}, which would not be called: a step may "
                f"be undone and done again, and its rows are dealt over workers. These hooks are "
                f"called: {', '.join(IN_BODY)}"
            )
