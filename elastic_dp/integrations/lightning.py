"""Runs a `LightningModule` on workers that come and go: `LightningTrainer(module).fit()` in place
of `Trainer().fit(module)`.

Here is what happens in the script's process; lightning_loop.py is the train function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import types
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchmetrics import Metric

from elastic_dp import ElasticTrainer, MapStyleData, Result
from elastic_dp.errors import SpecError
from elastic_dp.integrations.adapter import (
    check_left_alone,
    check_overrides,
    names,
    on_host,
    refuse,
    scaling_of,
)
from elastic_dp.integrations.lightning_loop import train_module

# Arguments of Lightning's Trainer that are used, with their defaults.
USED = {
    **dict.fromkeys(("max_epochs", "gradient_clip_val", "precision", "callbacks")),
    **dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    "max_steps": -1,
    "log_every_n_steps": 50,
}
# Arguments without effect here. Any other must have its default, or a value that changes nothing.
IGNORED = names("""
accelerator limit_test_batches limit_predict_batches num_sanity_val_steps enable_checkpointing
enable_progress_bar enable_model_summary deterministic inference_mode use_distributed_sampler
default_root_dir enable_autolog_hparams
""")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp",),
    "devices": (1, "1"),
    "logger": (True, False),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "val_check_interval"), (1.0,)),
    "gradient_clip_algorithm": ("norm",),
    "benchmark": (False,),
}
# What to do instead; "leave it out" for the others.
REMEDIES = {
    "strategy": "each worker holds the whole model, and is started for you",
    "devices": "set ScalingConfig.max_workers; a worker has one device",
    "num_nodes": "set ScalingConfig.max_workers",
    "logger": "pass loggers=, such as a TensorBoardLogger, WandbLogger or MLflowLogger of "
    "elastic_dp.integrations",
    "fast_dev_run": "set max_steps, and fit(local=True)",
    "max_time": "set max_time_s",
    "limit_train_batches": "set max_steps, or pass a part of the dataset",
    **dict.fromkeys(("limit_val_batches", "overfit_batches"), "pass a part of the dataset"),
    "val_check_interval": "validation runs after an epoch",
    "gradient_clip_algorithm": "gradients are clipped by their norm",
    "benchmark": "exact=True needs the same kernels in every run",
    "detect_anomaly": "leave it out, or train a step by fit(local=True) with torch's",
    "sync_batchnorm": "BatchNorm is computed per virtual worker, so it does not depend on the "
    "number of workers",
    "reload_dataloaders_every_n_epochs": "the rows of a run are fixed",
}
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
IN_BODY = names("""
on_fit_start on_train_start on_train_epoch_start on_train_batch_end on_validation_start
on_validation_epoch_start on_validation_epoch_end on_validation_end on_train_epoch_end
on_train_end on_fit_end
""")
_OF_SETUP = names("""
prepare_data setup teardown configure_model train_dataloader val_dataloader
""")
_OF_A_BATCH = names("""
on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer
""")
_OF_OPTIMIZATION = names("""
backward configure_gradient_clipping lr_scheduler_step optimizer_step optimizer_zero_grad
""")
_CALLBACKS = (EarlyStopping, LambdaCallback)  # of Lightning's own
_ARGUMENTS = inspect.signature(pl.Trainer.__init__).parameters
_LIGHTNING_EPOCHS = 1000  # the default of Lightning


class LightningTrainer(ElasticTrainer):
    """A run of a `LightningModule`.

    `options` are the arguments of `lightning.pytorch.Trainer` and of `ElasticTrainer`, by name. The
    data comes from `datamodule`, from the dataloaders, or from the module's own. The global batch
    is the one that `max_workers` processes would have in Lightning: the dataloader's `batch_size` x
    `accumulate_grad_batches` x `max_workers`. With `ScalingConfig.virtual_workers`, these take the
    place of the last two factors.

    Raises SpecError for what Lightning offers and this class does not, before anything starts.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        datamodule: pl.LightningDataModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(module, LightningModule):
            raise SpecError(
                f"module is a {type(module).__name__}, must be a LightningModule of the package "
                "lightning (not pytorch_lightning)"
            )
        others = {name: value for name, value in options.items() if name not in _ARGUMENTS}
        used = _checked({name: value for name, value in options.items() if name in _ARGUMENTS})
        precision, accumulated = PRECISIONS[used["precision"]], used["accumulate_grad_batches"]
        scaling = scaling_of(
            "LightningTrainer",
            others,
            taken={"the module and its data": ("train", "data")},
            precision=precision,
            accumulated=accumulated,
            own=_ARGUMENTS,
        )
        callbacks = _list_of(used["callbacks"]) + _list_of(module.configure_callbacks())
        _check_hooks(module, datamodule, callbacks)
        train, validation = _dataloaders(module, datamodule, train_dataloaders, val_dataloaders)
        steps = None if used["max_steps"] == -1 else used["max_steps"]
        epochs = None if used["max_epochs"] == -1 else used["max_epochs"]
        if steps is None and used["max_epochs"] is None:
            epochs = _LIGHTNING_EPOCHS
        if train.drop_last and accumulated > 1:
            raise SpecError(
                "drop_last of the DataLoader is True with accumulate_grad_batches > 1: Lightning "
                "drops rows that fill no batch, and this package rows that fill no step. Leave it "
                "out, and no row is dropped"
            )
        data = MapStyleData(
            train.dataset,
            micro_batch_size=train.batch_size,
            collate_fn=_Collated(train.collate_fn),
            shuffle=isinstance(train.sampler, RandomSampler),
            workers=train.num_workers,
            epochs=epochs,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),  # of seed_everything
            tail="drop" if train.drop_last else "short",
        )
        settings = used | {
            "callbacks": callbacks,
            "validation": validation,
            "gradient_clip_val": used["gradient_clip_val"] or None,
            "precision": precision,
            "max_epochs": epochs,
        }
        self._train_module = functools.partial(train_module, settings)
        super().__init__(
            # A method of the module, so that its code counts as the user's.
            types.MethodType(self._train_module, *on_host(module)),
            data=data,
            max_steps=steps,
            **others | {"scaling": scaling},
        )
        self._module, self._datamodule = module, datamodule

    def fit(self, local: bool = False) -> Result:
        """Train to the end, as `ElasticTrainer.fit` does, and give the module the final weights."""
        if local:  # as a worker, which has a copy
            self.train = types.MethodType(self._train_module, copy.deepcopy(self._module))
        result = super().fit(local)
        self._module.load_state_dict(result.load_state().model)
        if self._datamodule is not None:
            self._datamodule.teardown("fit")
        return result


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are used. Raises SpecError for the first one that cannot be."""
    others = given.keys() - USED - set(IGNORED)
    defaults = [(name, given[name], _ARGUMENTS[name].default) for name in given if name in others]
    check_left_alone("", defaults, REMEDIES, _HARMLESS)
    used = USED | {name: value for name, value in given.items() if name in USED}
    if used["log_every_n_steps"] is None:
        used["log_every_n_steps"] = USED["log_every_n_steps"]
    precision = used["precision"]
    if isinstance(precision, bool) or precision not in tuple(PRECISIONS):
        refuse("precision", precision, "use 32-true, bf16-mixed or 16-mixed")
    if used["check_val_every_n_epoch"] is None:
        refuse("check_val_every_n_epoch", None, "validation runs after epochs")
    for name, least in _LEAST.items():
        value = used[name]
        if name == "max_epochs" and value is None:
            continue
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise SpecError(f"{name} is {value!r}, must be a whole number of at least {least}")
    clip = used["gradient_clip_val"]
    if clip is not None and not (isinstance(clip, int | float) and clip >= 0):
        raise SpecError(f"gradient_clip_val is {clip!r}, must be None or a number of at least 0")
    return used


def _list_of(callbacks: Any) -> list[Any]:
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks] * bool(callbacks)


def _check_hooks(module: Any, datamodule: Any, callbacks: Sequence[Any]) -> None:
    """Raises SpecError for a hook that is overridden and would not be called."""
    if not module.automatic_optimization:
        raise SpecError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and a "
            "step that is undone and done again must not write to weights by itself: return the "
            "loss, or write the loop with ctx.steps"
        )
    ours = ", ".join(one.__name__ for one in _CALLBACKS)
    for callback in callbacks:
        kind = type(callback)
        if not isinstance(callback, Callback):
            raise SpecError(f"callbacks has {callback!r}, must be a list of Lightning's Callback")
        if kind.__module__.startswith("lightning.") and kind not in _CALLBACKS:
            raise SpecError(
                f"callbacks has a {kind.__name__}, which is not supported. Of Lightning's own, "
                f"these are: {ours}. For checkpoints, pass checkpoint=; progress is shown by fit"
            )
    of_data = _hooks(DataHooks) | _hooks(CheckpointHooks)
    of_module = _hooks(ModelHooks) | of_data | {*_OF_OPTIMIZATION}
    state = {"state_dict", "load_state_dict"}
    called = f"These hooks are called: {', '.join(IN_BODY)}"
    for owner, base, hooks in (
        (module, LightningModule, of_module - {*IN_BODY, *_OF_SETUP, *_OF_A_BATCH}),
        *(
            []
            if datamodule is None
            else [(datamodule, LightningDataModule, of_data - {*_OF_SETUP})]
        ),
        *(
            (each, Callback, _hooks(Callback) - {*IN_BODY, *_OF_SETUP, *state})
            for each in callbacks
        ),
    ):
        check_overrides(owner, base, sorted(hooks), called)
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            raise SpecError(
                f"module.{name} is a {type(part).__name__} of torchmetrics, which adds up what one "
                "process has seen: log the value of each batch, such as torchmetrics.functional "
                "returns it; the mean over all rows is taken for you"
            )


def _hooks(cls: type) -> set[str]:
    """Returns the hooks but those of testing and prediction, which a run does not do."""
    return {
        name
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
        if not any(word in name for word in ("test", "predict", "sanity"))
    }


def _dataloaders(module: Any, datamodule: Any, train: Any, validation: Any) -> tuple[Any, Any]:
    """Returns the DataLoader to train on, and the data of validation or None."""
    if datamodule is not None and train is not None:
        raise SpecError("both datamodule and train_dataloaders are given; pass one of them")
    for owner in (datamodule, module):
        if owner is not None:
            owner.prepare_data()
            owner.setup("fit")
    module.configure_model()
    owner = module if datamodule is None else datamodule
    if train is None:
        if getattr(type(owner), "train_dataloader", None) is _base(owner).train_dataloader:
            raise SpecError(
                f"{type(owner).__name__} has no train_dataloader: define it, or pass "
                "train_dataloaders= to LightningTrainer"
            )
        train = owner.train_dataloader()
    if validation is None and type(owner).val_dataloader is not _base(owner).val_dataloader:
        validation = owner.val_dataloader()
    _check_dataloader("the train dataloader", train)
    if type(module).validation_step is pl.LightningModule.validation_step or validation is None:
        return train, None
    _check_dataloader("the validation dataloader", validation)
    return train, MapStyleData(
        _Numbered(validation.dataset),
        micro_batch_size=validation.batch_size,
        collate_fn=_Collated(validation.collate_fn, validation.batch_size),
        workers=validation.num_workers,
        shuffle=False,
        epochs=1,
        tail="short",
    )


def _base(owner: Any) -> Any:
    return pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.LightningDataModule


def _check_dataloader(name: str, loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise SpecError(f"{name} is a {type(loader).__name__}, must be one torch DataLoader")
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise SpecError(
            f"{name} has an IterableDataset, whose rows have no numbers: write shards, and a loop "
            "with ctx.steps and DataConfig"
        )
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if loader.batch_size is None or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise SpecError(
            f"{name} has a sampler of its own ({type(loader.sampler).__name__}), but rows are "
            "dealt to virtual workers by arithmetic: use batch_size= and shuffle="
        )
    if isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or loader.sampler.num_samples != rows
    ):
        raise SpecError(f"{name} draws rows with replacement, or some of them: use shuffle=True")


class _Numbered(torch.utils.data.Dataset):
    """Items with their numbers."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Any:
        return i, self._rows[i]


class _Collated:
    """Collates to (batch_idx, number of rows, batch). Rows of validation are numbered, and their
    batches are in order."""

    def __init__(self, collate_fn: Any, numbered_by: int | None = None) -> None:
        self._collate_fn, self._numbered_by = collate_fn, numbered_by

    def __call__(self, rows: Any) -> Any:
        number = 0
        if self._numbered_by is not None:
            number = rows[0][0] // self._numbered_by
            rows = [row for _, row in rows]
        return number, len(rows), self._collate_fn(rows)
