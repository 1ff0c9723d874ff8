"""The train function of `LightningTrainer`: a `LightningModule` in `ctx.steps`.

`training_step` is the loss function of `ctx.steps`, `validation_step` that of `ctx.evaluate`. What
they log is the mean over the rows of the whole step, or of the validation. Hooks and schedulers run
in the loop's body, so once per committed step in every worker. Rank 0 is the global zero.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torchmetrics import Metric

from elastic_dp import Step, TrainContext
from elastic_dp.errors import LoopError, LossError, SpecError

_BEGUN = ("on_fit_start", "on_train_start")


class _Log:
    """Takes the place of `LightningModule.log`. Values of a step travel as metrics, whose names say
    whether they are for the step and for the epoch: every worker has to know it."""

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None
        self._defaults = (False, True)

    @contextlib.contextmanager
    def collecting(self, *, on_step: bool, on_epoch: bool) -> Iterator[dict[str, Any]]:
        before = self._values, self._defaults
        self._values, self._defaults = {}, (on_step, on_epoch)
        try:
            yield self._values
        finally:
            self._values, self._defaults = before

    def __call__(
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
        if self._values is None:
            raise LoopError(f"self.log({name!r}) was called outside of a step and of a hook")
        if reduce_fx not in ("mean", torch.mean):
            raise LossError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): only means are supported"
            )
        if isinstance(value, Metric | Mapping):
            raise LossError(
                f"self.log({name!r}) got a {type(value).__name__}, must be a number or a tensor "
                "with one element: the mean over the batch"
            )
        by_step, by_epoch = self._defaults
        by_step = by_step if on_step is None else on_step
        by_epoch = by_epoch if on_epoch is None else on_epoch
        self._values[f"{by_step:d}{by_epoch:d}{name}"] = value


class _TrainerView:
    """What `module.trainer` is, and what hooks get as their trainer: the facts that a run has."""

    def __init__(self, settings: Mapping[str, Any], ctx: TrainContext) -> None:
        shown = (
            *("max_epochs", "max_steps", "accumulate_grad_batches", "check_val_every_n_epoch"),
            *("log_every_n_steps", "gradient_clip_val", "callbacks"),
        )
        vars(self).update({name: settings[name] for name in shown})
        self.estimated_stepping_batches = ctx.total_steps or math.inf
        self.num_training_batches = ctx.steps_per_epoch
        self.val_check_interval = 1.0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.global_step = self.current_epoch = self.global_rank = self.world_size = 0
        self.is_global_zero = self.should_stop = self.validating = False
        self.sanity_checking = self.fast_dev_run = self.barebones = False
        self.training, self.logger = True, None
        self.loggers: list[Any] = []
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.state = types.SimpleNamespace(fn=TrainerFn.FITTING)
        # Every worker decides by the same values. `module.optimizers()` reads the other one.
        self.strategy = types.SimpleNamespace(
            reduce_boolean_decision=lambda value, all=True: value, _lightning_optimizers=[]
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.{name} does not exist in a run of elastic_dp; it has: {', '.join(vars(self))}"
        )


def train_module(settings: Mapping[str, Any], module: Any, ctx: TrainContext) -> None:
    view, log = _TrainerView(settings, ctx), _Log()
    module.trainer = view
    module.log = log  # log_dict calls it, too
    module.to(ctx.device)
    module.train()
    try:
        optimizers, schedulers, monitor = _configure_optimizers(module.configure_optimizers())
        if len(optimizers) != 1:
            raise SpecError(
                f"configure_optimizers returned {len(optimizers)} optimizers, but a step has one: "
                "give its parameter groups different settings"
            )
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        view.optimizers, view.lr_scheduler_configs = optimizers, configs
        view.strategy._lightning_optimizers = optimizers
        for callback in view.callbacks:
            callback.setup(view, module, "fit")
        body = _LightningBody(settings, module, ctx, view, log)
        state = {f"scheduler{i}": config.scheduler for i, config in enumerate(configs)}
        for step in ctx.steps(
            module,
            optimizers[0],
            _loss_function(module, view, log, ctx.steps_per_epoch),
            clip_norm=settings["gradient_clip_val"],
            precision=settings["precision"],
            state={"lightning": body, **state},
        ):
            body.run(step)
        body.end()
    finally:
        del module.log
        module.trainer = None


def _loss_function(module: Any, view: _TrainerView, log: _Log, steps_per_epoch: int) -> Any:
    step = _with_batch_idx(module.training_step)

    def loss_fn(_: Any, numbered: Any) -> Any:
        _, rows, batch = numbered
        batch = _moved(module, batch)
        with log.collecting(on_step=True, on_epoch=False) as logged:
            outputs = step(batch, view.global_step % steps_per_epoch)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is None:  # the batch is left out
            return torch.zeros(()), 0.0
        return loss, rows, logged

    return loss_fn


def _with_batch_idx(step: Any) -> Any:
    names = list(inspect.signature(step).parameters)
    if "dataloader_iter" in names:
        raise SpecError(f"{step.__name__} takes dataloader_iter; it must take batch and batch_idx")
    return step if len(names) > 1 else lambda batch, batch_idx: step(batch)


def _moved(module: Any, batch: Any) -> Any:
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, module.device, 0)
    return module.on_after_batch_transfer(batch, 0)


def _lengths_of_lists(module: Any) -> dict[str, int]:
    """Returns the lengths of the lists that the module and its parts hold, also in dicts."""
    return {
        f"{prefix}.{name}".lstrip(".") + ("" if key is None else f"[{key!r}]"): len(one)
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        for key, one in (value if isinstance(value, dict) else {None: value}).items()
        if isinstance(one, list)
    }


class _LightningBody:
    """What Lightning does around a step: hooks, schedulers, validation and logging. Its state is
    what workers that join need."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        module: Any,
        ctx: TrainContext,
        view: _TrainerView,
        log: _Log,
    ) -> None:
        self._settings, self._module, self._ctx = settings, module, ctx
        self._view, self._log = view, log
        self._sums: dict[str, list[float]] = {}  # of this epoch: values times weights, weights
        self._has_begun = self._has_validated = False

    def state_dict(self) -> dict[str, Any]:
        view = self._view
        return {
            "step": view.global_step,
            "epoch": view.current_epoch,
            "sums": {name: list(pair) for name, pair in self._sums.items()},
            "metrics": {name: float(value) for name, value in view.callback_metrics.items()},
            "callbacks": [callback.state_dict() for callback in view.callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        view = self._view
        view.global_step, view.current_epoch = state["step"], state["epoch"]
        self._sums = {name: list(pair) for name, pair in state["sums"].items()}
        view.callback_metrics = {k: torch.tensor(v) for k, v in state["metrics"].items()}
        for callback, held in zip(view.callbacks, state["callbacks"], strict=True):
            callback.load_state_dict(held)

    def run(self, step: Step) -> None:
        view, ctx = self._view, self._ctx
        view.global_step, view.current_epoch = step.number - 1, step.epoch
        self._take_rank()
        in_epoch = (step.number - 1) % ctx.steps_per_epoch
        record: dict[str, Any] = {}
        if in_epoch == 0:
            self._fire("on_train_epoch_start", record)
        view.global_step = step.number
        of_step = self._take_metrics(step)
        self._step_schedulers("step", step.number)
        if step.epoch_end:
            self._step_schedulers("epoch", step.epoch + 1)
        self._fire("on_train_batch_end", record, {"loss": torch.tensor(step.loss)}, None, in_epoch)
        log_every = self._settings["log_every_n_steps"]
        if log_every and step.number % log_every == 0:
            record |= of_step
        self._step_schedulers("step", step.number, by_metric=True)
        if step.epoch_end or step.number == ctx.total_steps or view.should_stop:
            self._end_epoch(step, record)
        if record:
            ctx.log({"epoch": step.epoch, **record})
        if view.should_stop and step.number != ctx.total_steps:
            ctx.stop("a callback set trainer.should_stop")

    def end(self) -> None:
        if self._has_begun:
            for hook in ("on_train_end", "on_fit_end"):
                self._fire(hook, {})
            for callback in self._view.callbacks:
                callback.teardown(self._view, self._module, "fit")
            self._module.teardown("fit")

    def _take_rank(self) -> None:
        """Rank 0 is the global zero. A worker that becomes it later sees on_fit_start and
        on_train_start again, where callbacks open what that process alone has."""
        view, rank = self._view, self._ctx.rank
        becomes_zero = rank == 0 and not view.is_global_zero
        view.global_rank, view.world_size = rank, self._ctx.world_size
        view.is_global_zero = rank == 0
        rank_zero_only.rank = rank
        if not self._has_begun or becomes_zero:
            for hook in _BEGUN:
                self._fire(hook, {})
        self._has_begun = True

    def _fire(self, hook: str, record: dict[str, Any], *args: Any) -> None:
        with self._log.collecting(on_step=False, on_epoch=True) as logged:
            for callback in self._view.callbacks:
                getattr(callback, hook)(self._view, self._module, *args)
            getattr(self._module, hook)(*args)
        values = {name[2:]: float(value) for name, value in logged.items()}
        self._view.callback_metrics |= {k: torch.tensor(v) for k, v in values.items()}
        record |= values

    def _take_metrics(self, step: Step) -> dict[str, float]:
        """Returns the values of this step; adds to those of the epoch."""
        of_step, metrics = {}, self._view.callback_metrics
        for key, value in step.metrics.items():
            on_step, on_epoch, name = key[0] == "1", key[1] == "1", key[2:]
            if on_step:
                of_step[f"{name}_step" if on_epoch else name] = value
                metrics[name] = torch.tensor(value)
            if on_epoch:
                total = self._sums.setdefault(f"{name}_epoch" if on_step else name, [0.0, 0.0])
                total[0] += value * step.weight
                total[1] += step.weight
        metrics |= {name: torch.tensor(value) for name, value in of_step.items()}
        return of_step

    def _end_epoch(self, step: Step, record: dict[str, Any]) -> None:
        has_validation = step.epoch_end and self._settings["validation"] is not None
        if has_validation and (step.epoch + 1) % self._settings["check_val_every_n_epoch"] == 0:
            self._validate(record)
        of_epoch = {name: total / weight for name, (total, weight) in self._sums.items()}
        self._sums = {}
        for name, value in of_epoch.items():
            self._view.callback_metrics[name] = torch.tensor(value)
            self._view.callback_metrics[name.removesuffix("_epoch")] = torch.tensor(value)
        record |= of_epoch
        self._fire("on_train_epoch_end", record)
        if step.epoch_end:
            self._step_schedulers("epoch", step.epoch + 1, by_metric=True)
            self._view.current_epoch += 1

    def _validate(self, record: dict[str, Any]) -> None:
        module, view = self._module, self._view
        call = _with_batch_idx(module.validation_step)
        # A list that the first batch adds to would have a part of the batches in each worker.
        lengths = None if self._has_validated else _lengths_of_lists(module)
        self._has_validated = True

        def validate(_: Any, numbered: Any) -> Any:
            nonlocal lengths
            number, rows, batch = numbered
            with self._log.collecting(on_step=False, on_epoch=True) as logged:
                call(_moved(module, batch), number)
            before, lengths = lengths, None
            after = {} if before is None else _lengths_of_lists(module)
            for name, length in after.items():
                if before is not None and length > before.get(name, 0):
                    raise LossError(
                        f"validation_step adds to self.{name}, but its batches are dealt over "
                        "workers, so each worker has a part of them: log values, and the mean over "
                        "all rows is taken"
                    )
            if by_step := [name[2:] for name in logged if name[0] == "1"]:
                raise LossError(
                    f"validation_step logs {by_step[0]!r} with on_step=True, but its batches are "
                    "dealt over workers: leave it out, and the mean over all rows is logged"
                )
            return torch.zeros(()), rows, logged

        view.training, view.validating = False, True
        self._fire("on_validation_start", record)
        self._fire("on_validation_epoch_start", record)
        means = self._ctx.evaluate(validate, self._settings["validation"])
        of_batches = {key[len("eval_00") :]: v for key, v in means.items() if key != "eval_loss"}
        view.callback_metrics |= {name: torch.tensor(v) for name, v in of_batches.items()}
        record |= of_batches
        self._fire("on_validation_epoch_end", record)
        self._fire("on_validation_end", record)
        view.training, view.validating = True, False

    def _step_schedulers(self, interval: str, count: int, *, by_metric: bool = False) -> None:
        metrics = self._view.callback_metrics
        for config in self._view.lr_scheduler_configs:
            if (config.interval, config.reduce_on_plateau) != (interval, by_metric):
                continue
            if count % config.frequency:
                continue
            if not by_metric:
                config.scheduler.step()
            elif config.monitor in metrics:
                config.scheduler.step(float(metrics[config.monitor]))
            elif config.strict:
                raise LoopError(
                    f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, "
                    f"which is not logged; logged are: {', '.join(metrics)}"
                )
