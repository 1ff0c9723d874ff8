"""Runs a `LightningModule` on workers that come and go: `LightningTrainer(module, …).fit()` in
place of `Trainer(…).fit(module)`.

`training_step` is the loss function of `ctx.steps`, `validation_step` that of `ctx.evaluate`. What
they log is the mean over the rows of the whole step, or of the validation.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, StackDataset, Subset
from torchmetrics import Metric

from elastic_dp import ElasticTrainer, MapStyleData, Result, Step, TrainContext
from elastic_dp.errors import LoopError, LossError, SpecError
from elastic_dp.integrations.adapter import RESUMES, check_overrides, names, on_host, scaling_of

USED = names("""
max_epochs max_steps precision gradient_clip_val accumulate_grad_batches check_val_every_n_epoch
log_every_n_steps
""")
# What to do instead of another argument of Lightning's Trainer; "leave it out" for the others.
REMEDIES = {
    "accelerator": 'set ScalingConfig.resources_per_worker={"GPU": 1}',
    **dict.fromkeys(("devices", "num_nodes"), "set ScalingConfig.max_workers"),
    "logger": "pass loggers=, such as a WandbLogger of elastic_dp.integrations",
    "callbacks": "for checkpoints, pass checkpoint=; for others, write the loop with ctx.steps",
    "fast_dev_run": "set max_steps, and fit(local=True)",
    "max_time": "set max_time_s",
    "limit_train_batches": "set max_steps, or pass a part of the dataset",
    **dict.fromkeys(("limit_val_batches", "overfit_batches"), "pass a part of the dataset"),
    "val_check_interval": "validation runs after epochs",
    "gradient_clip_algorithm": "gradients are clipped by their norm",
    "sync_batchnorm": "BatchNorm is computed per virtual worker",
}
_REFUSED = {
    **dict.fromkeys(inspect.signature(pl.Trainer).parameters.keys() - {*USED}, "leave it out"),
    **REMEDIES,
    "train": "it is the module's training_step",
    "data": "it comes from the dataloaders",
    "ckpt_path": f"leave it out, since {RESUMES}",
}
PRECISIONS = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
_CALLED = names("""
prepare_data setup teardown configure_model train_dataloader val_dataloader
""")
_OF_MODULES = names("""
backward configure_callbacks configure_gradient_clipping log lr_scheduler_step optimizer_step
optimizer_zero_grad
""")
OF_DATAMODULES = names("load_state_dict on_exception state_dict")
_HOOKS = (name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(kind))
# What is refused where it is overridden. A run does not test or predict, so those hooks are not.
NOT_CALLED = _OF_MODULES + [
    name
    for name in _HOOKS
    if name[0] != "_" and name not in _CALLED and not re.search("test|predict", name)
]
_LOG_OPTIONS = inspect.signature(LightningModule.log).parameters.keys()


class LightningTrainer(ElasticTrainer):
    """A run of a `LightningModule`.

    The arguments from `max_epochs` to `log_every_n_steps` are those of `lightning.pytorch.Trainer`,
    `options` those of `ElasticTrainer`. The data comes from `datamodule`, from the dataloaders, or
    from the module's own. The global batch is the one that `max_workers` processes would have in
    Lightning: the dataloader's `batch_size` x `accumulate_grad_batches` x `max_workers`. With
    `ScalingConfig.virtual_workers`, these take the place of the last two factors.

    Raises SpecError for what Lightning offers and this class does not, before anything starts.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        datamodule: pl.LightningDataModule | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        precision: str = "32-true",
        gradient_clip_val: float | None = None,
        accumulate_grad_batches: int = 1,
        check_val_every_n_epoch: int = 1,
        log_every_n_steps: int = 50,
        **options: Any,
    ) -> None:
        if precision not in tuple(PRECISIONS):
            raise SpecError(f"precision is {precision!r}, must be one of {', '.join(PRECISIONS)}")
        for name, value in {
            "max_epochs": 1 if max_epochs is None else max_epochs,
            "max_steps": 1 if max_steps is None else max_steps,
            "accumulate_grad_batches": accumulate_grad_batches,
            "check_val_every_n_epoch": check_val_every_n_epoch,
            "log_every_n_steps": log_every_n_steps,
        }.items():
            if type(value) is not int or value < 1:
                raise SpecError(f"{name} is {value!r}, must be a whole number of at least 1")
        scaling = scaling_of(
            LightningTrainer, options, refused=_REFUSED, accumulated=accumulate_grad_batches
        )
        _check_module(module, datamodule)
        train, validation = _dataloaders(module, datamodule, train_dataloaders, val_dataloaders)
        data = MapStyleData(
            train.dataset,
            micro_batch_size=train.batch_size,
            collate_fn=functools.partial(_collated, train.collate_fn),
            shuffle=isinstance(train.sampler, RandomSampler),
            workers=train.num_workers,
            epochs=max_epochs,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),  # of seed_everything
            tail="drop" if train.drop_last else "short",
        )
        self._train_module = functools.partial(
            _train,
            of_steps={"clip_norm": gradient_clip_val or None, "precision": PRECISIONS[precision]},
            validation=validation,
            batches_of_step=accumulate_grad_batches,
            validate_every=check_val_every_n_epoch,
            log_every=log_every_n_steps,
        )
        super().__init__(
            # A method of the module, so that its code counts as the user's.
            types.MethodType(self._train_module, on_host(module)),
            data=data,
            max_steps=max_steps,
            **options | {"scaling": scaling},
        )
        self._module, self._datamodule = module, datamodule

    def fit(self, local: bool = False) -> Result:
        """Train to the end, as `ElasticTrainer.fit` does, and give the module the final weights."""
        if local:  # as a worker, which has a copy
            self.train = types.MethodType(self._train_module, copy.deepcopy(self._module))
        result = super().fit(local)
        self._module.load_state_dict(result.load_state().model)
        for owner in (self._module, self._datamodule):
            if owner is not None:
                owner.teardown("fit")
        return result


def _check_module(module: Any, datamodule: Any) -> None:
    if not isinstance(module, LightningModule):
        raise SpecError(
            f"module is a {type(module).__name__}, must be a LightningModule of the package "
            "lightning (not pytorch_lightning)"
        )
    if not module.automatic_optimization:
        raise SpecError(
            f"{type(module).__name__} optimizes manually (automatic_optimization=False), and a "
            "step that is undone and done again must not write to weights by itself: return the "
            "loss, or write the loop with ctx.steps"
        )
    instead = "Put it into training_step or validation_step, or write the loop with ctx.steps"
    check_overrides(module, LightningModule, NOT_CALLED, instead)
    if datamodule is not None:
        check_overrides(datamodule, LightningDataModule, NOT_CALLED + OF_DATAMODULES, instead)
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
    for each in (datamodule, module):
        if each is not None:
            each.prepare_data()
            each.setup("fit")
    module.configure_model()
    owner = module if datamodule is None else datamodule
    if train is None:
        if not is_overridden("train_dataloader", owner):
            raise SpecError(f"{type(owner).__name__} has no train_dataloader: define it")
        train = owner.train_dataloader()
    _check_dataloader("train", train)
    if validation is None and is_overridden("val_dataloader", owner):
        validation = owner.val_dataloader()
    if validation is None or not is_overridden("validation_step", module):
        return train, None
    _check_dataloader("validation", validation)
    size, rows = validation.batch_size, validation.dataset
    numbered = StackDataset(range(len(rows)), rows)  # type: ignore[arg-type]
    return train, MapStyleData(
        Subset(numbered, range(len(rows) - validation.drop_last * (len(rows) % size))),
        micro_batch_size=size,
        collate_fn=functools.partial(_collated_by_number, validation.collate_fn, size),
        workers=validation.num_workers,
        shuffle=False,
        epochs=1,
        tail="short",
    )


def _check_dataloader(name: str, loader: Any) -> None:
    if (
        not isinstance(loader, DataLoader)
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
        or loader.batch_size is None
        or getattr(loader.sampler, "replacement", False)
        or len(loader.sampler) != len(loader.dataset)  # type: ignore[arg-type]
        or not len(loader)
    ):
        raise SpecError(
            f"the {name} dataloader is a {type(loader).__name__}, must be one torch DataLoader of "
            "a map-style dataset with rows, with batch_size= and shuffle= and no sampler of its "
            "own: rows are dealt to virtual workers by arithmetic"
        )


def _collated(collate_fn: Any, rows: Any) -> Any:
    """Returns (batch_idx, number of rows, batch); the number of a training batch is its step's."""
    return None, len(rows), collate_fn(rows)


def _collated_by_number(collate_fn: Any, batch_size: int, rows: Any) -> Any:
    return rows[0][0] // batch_size, len(rows), collate_fn([row for _, row in rows])


# ------------------------------------------------------------------------------- in a worker


def _train(module: Any, ctx: TrainContext, *, of_steps: dict[str, Any], **settings: Any) -> None:
    module.trainer = view = _TrainerView(ctx)
    module.to(ctx.device)  # in its own mode: parts of it may be frozen
    try:
        optimizers, schedulers, monitor = _configure_optimizers(module.configure_optimizers())
        if len(optimizers) != 1:
            raise SpecError(
                f"configure_optimizers returned {len(optimizers)} optimizers, but a step has one: "
                "give its parameter groups different settings"
            )
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        view.optimizers, view.strategy._lightning_optimizers = optimizers, optimizers
        view.lr_scheduler_configs = configs
        body = _Body(module, ctx, configs, **settings)
        module.log = body.log  # log_dict calls it, too
        state = {f"scheduler{i}": config.scheduler for i, config in enumerate(configs)}
        state["lightning"] = body

        def loss_fn(_: Any, batch: Any) -> Any:
            return body.loss(batch)

        for step in ctx.steps(module, optimizers[0], loss_fn, state=state, **of_steps):
            body.run(step)
    finally:
        vars(module).pop("log", None)
        module.trainer = None


class _TrainerView:
    """What `module.trainer` is: the facts that a run has."""

    def __init__(self, ctx: TrainContext) -> None:
        self.estimated_stepping_batches = ctx.total_steps or math.inf
        self.max_steps, self.num_training_batches = ctx.total_steps, ctx.steps_per_epoch
        self.global_step = self.current_epoch = 0
        self.logger, self.loggers = None, list[Any]()
        self.optimizers, self.lr_scheduler_configs = list[Any](), list[Any]()
        self.strategy = types.SimpleNamespace()  # `module.optimizers()` reads those of this one

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.{name} does not exist in a run of elastic_dp; it has: {', '.join(vars(self))}"
        )


@dataclass(eq=False)
class _Body:
    """What Lightning does in and around a step: logging, schedulers and validation. Its state is
    what workers that join need."""

    module: Any
    ctx: TrainContext
    schedulers: list[Any]
    validation: MapStyleData | None
    batches_of_step: int
    validate_every: int
    log_every: int
    _logged: dict[str, Any] = field(default_factory=dict)  # by the present call of a step, by key
    _by_step: bool = True  # that is training_step
    # Of this epoch: values times weights, and weights
    _sums: dict[str, list[float]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"step": self.module.trainer.global_step, "sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin_after(state["step"])
        self._sums = {name: list(pair) for name, pair in state["sums"].items()}

    def _begin_after(self, step: int) -> None:
        self.module.trainer.global_step = step
        self.module.trainer.current_epoch = step // self.ctx.steps_per_epoch

    def _steps_of_epoch(self) -> int:
        return int(self.module.trainer.global_step) % self.ctx.steps_per_epoch

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **ignored: Any,
    ) -> None:
        """Takes the place of `LightningModule.log`. Values travel as metrics, whose keys begin with
        "step" or "epoch" for where they count: every worker has to know it."""
        if unknown := ignored.keys() - _LOG_OPTIONS:
            raise TypeError(f"self.log got {', '.join(sorted(unknown))}, which it does not take")
        by_step = self._by_step if on_step is None else on_step
        by_epoch = not self._by_step if on_epoch is None else on_epoch
        is_mean = reduce_fx in ("mean", torch.mean) and not isinstance(value, Metric | Mapping)
        if not is_mean or (by_step and not self._by_step):
            raise LossError(
                f"self.log({name!r}, on_step={by_step}, reduce_fx={reduce_fx!r}) got a "
                f"{type(value).__name__}: log a number or a tensor with one element, the mean over "
                "the batch, and on_epoch alone in validation_step, whose batches are dealt over "
                "workers"
            )
        if by_step:
            self._logged[f"step {name}{'_step' * by_epoch}"] = value
        if by_epoch:
            self._logged[f"epoch {name}{'_epoch' * by_step}"] = value

    def _call(self, step: Any, batch: Any, batch_idx: int) -> Any:
        """`batch_idx` may be left out in a module."""
        self._logged, self._by_step = {}, step == self.module.training_step
        takes_it = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        return step(batch, batch_idx) if takes_it else step(batch)

    def loss(self, counted: Any) -> Any:
        """The loss function of `ctx.steps`."""
        _, rows, batch = counted
        outputs = self._call(self.module.training_step, batch, self._steps_of_epoch())
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            raise LossError(f"training_step returned a dict of {', '.join(outputs)} without 'loss'")
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is None:  # the batch is left out
            return torch.zeros(()), 0.0
        return loss, rows, self._logged

    def _validation_loss(self, _: Any, numbered: Any) -> Any:
        number, rows, batch = numbered
        self._call(self.module.validation_step, batch, number)
        return torch.zeros(()), rows, self._logged

    def run(self, step: Step) -> None:
        by_step: dict[str, float] = {}
        for key, value in step.metrics.items():
            where, _, name = key.partition(" ")
            if where == "step":
                by_step[name] = value
                continue
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += value * step.weight
            total[1] += step.weight
        record = {} if step.number % self.log_every else by_step.copy()
        is_due = step.epoch_end and (step.epoch + 1) % self.validate_every == 0
        if is_due and self.validation is not None:
            means = self.ctx.evaluate(self._validation_loss, self.validation)
            del means["eval_loss"]
            record |= {key.removeprefix("eval_epoch "): value for key, value in means.items()}
        if step.epoch_end or step.number == self.ctx.total_steps:
            record |= {name: total / weight for name, (total, weight) in self._sums.items()}
            self._sums = {}
        self._step_schedulers(step, by_step | record)
        self._begin_after(step.number)
        if record:
            self.ctx.log({"epoch": step.epoch, **record})

    def _step_schedulers(self, step: Step, logged: Mapping[str, float]) -> None:
        """As in Lightning, where steps are counted in batches, from the start of the epoch."""
        batches = (self._steps_of_epoch() + 1) * self.batches_of_step
        counts = {"step": batches, "epoch": step.epoch + 1}
        for config in self.schedulers:
            is_due = config.interval == "step" or step.epoch_end
            if not is_due or counts[config.interval] % config.frequency:
                continue
            if not config.reduce_on_plateau:
                config.scheduler.step()
            elif config.monitor in logged:
                config.scheduler.step(logged[config.monitor])
            elif config.strict:
                raise LoopError(
                    f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, "
                    f"which is not logged when it is due; logged are: {', '.join(logged)}"
                )
