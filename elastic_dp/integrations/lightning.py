"""Runs a `LightningModule` on workers that come and go: `LightningTrainer(module).fit()` in place
of `Trainer().fit(module)`.

Here is what happens in the script's process; lightning_loop.py is the train function.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import types
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchmetrics import Metric

from elastic_dp import ElasticTrainer, MapStyleData, Result
from elastic_dp.errors import SpecError
from elastic_dp.integrations.elastic_options import scaling_of
from elastic_dp.integrations.host_copy import on_host
from elastic_dp.integrations.lightning_arguments import (
    PRECISIONS,
    check_callback,
    check_datamodule,
    check_module,
    options_of_lightning,
)
from elastic_dp.integrations.lightning_loop import train_module

_OF_TRAINER = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
_LIGHTNING_EPOCHS = 1000  # the default of Lightning
_LOG_EVERY = 50  # the default of Lightning


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
        if not isinstance(module, pl.LightningModule):
            raise SpecError(
                f"module is a {type(module).__name__}, must be a LightningModule of the package "
                "lightning (not pytorch_lightning)"
            )
        for name in ("train", "data"):
            if name in options:
                raise SpecError(f"{name} is given, but it comes from the module and its data")
        used = options_of_lightning({k: v for k, v in options.items() if k in _OF_TRAINER})
        others = {name: value for name, value in options.items() if name not in _OF_TRAINER}
        scaling = scaling_of("LightningTrainer", others, PRECISIONS[used["precision"]], _OF_TRAINER)
        callbacks = _callbacks(module, used["callbacks"])
        _check(module, datamodule, callbacks)
        train, validation = _dataloaders(module, datamodule, train_dataloaders, val_dataloaders)
        accumulated = used["accumulate_grad_batches"]
        steps = None if used["max_steps"] == -1 else used["max_steps"]
        epochs = None if used["max_epochs"] == -1 else used["max_epochs"]
        if epochs is None and steps is None and used["max_epochs"] is None:
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
        if scaling.virtual_workers is None:
            virtual_workers = scaling.max_workers * accumulated
            scaling = dataclasses.replace(scaling, virtual_workers=virtual_workers)
        if scaling.grows:
            raise SpecError(
                f"ScalingConfig.virtual_workers is {scaling.virtual_workers}, but the Trainer "
                "counts its epochs in batches of one size; give one number"
            )
        settings = {
            "callbacks": callbacks,
            "validation": validation,
            "validate_every": used["check_val_every_n_epoch"],
            "log_every": _LOG_EVERY
            if used["log_every_n_steps"] is None
            else used["log_every_n_steps"],
            "clip_norm": used["gradient_clip_val"] or None,
            "precision": PRECISIONS[used["precision"]],
            "max_epochs": epochs,
            "max_steps": -1 if steps is None else steps,
            "accumulate_grad_batches": accumulated,
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


# ------------------------------------------------------------------------- in the script's process


def _callbacks(module: Any, given: Any) -> list[Any]:
    own = module.configure_callbacks()
    lists = [one if isinstance(one, Sequence) else [one] for one in (given or [], own or [])]
    return [callback for each in lists for callback in each]


def _check(module: Any, datamodule: Any, callbacks: Sequence[Any]) -> None:
    check_module(module)
    if datamodule is not None:
        check_datamodule(datamodule)
    for callback in callbacks:
        check_callback(callback)
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            raise SpecError(
                f"module.{name} is a {type(part).__name__} of torchmetrics, which adds up what one "
                "process has seen: log the value of each batch, such as torchmetrics.functional "
                "returns it; the mean over all rows is taken for you"
            )


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
