"""Runs a `transformers.Trainer` on workers that come and go: `TransformersTrainer(trainer).fit()`
in place of `trainer.train()`.

The Trainer gives the loss, the optimizer, the scheduler, evaluation, logging, saving and callbacks,
by its own methods; `ctx.steps` is the loop. Each worker holds a copy of the Trainer, which believes
to be alone. All that Trainer does after an optimizer step runs in the loop's body, so it runs once
per committed step in every worker, and on the worker of rank 0 as the world process zero.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import operator
import os
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainerState
from transformers.optimization import GreedyLR
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, align_special_tokens

from elastic_dp import ElasticTrainer, MapStyleData, Result, Step, TrainContext
from elastic_dp.errors import LoopError, LossError, SpecError
from elastic_dp.integrations.adapter import (
    check_left_alone,
    check_overrides,
    names,
    on_host,
    refuse,
    scaling_of,
)

# Fields that are used, and fields that have no effect here. Any other must have its default.
ACCEPTED = names("""
output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps seed
learning_rate optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type
lr_scheduler_kwargs warmup_steps max_grad_norm label_smoothing_factor bf16 fp16 use_cache
activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing label_names
gradient_checkpointing_kwargs logging_strategy logging_steps logging_first_step log_level
report_to logging_nan_inf_filter log_level_replica run_name project trackio_space_id
trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_accumulation_steps
include_for_metrics batch_eval_metrics save_strategy save_steps save_total_limit
load_best_model_at_end metric_for_best_model greater_is_better dataloader_drop_last
dataloader_num_workers remove_unused_columns train_sampling_strategy bf16_full_eval fp16_full_eval
torch_empty_cache_steps log_on_each_node disable_tqdm save_only_model eval_use_gather_object
restore_callback_states_from_checkpoint full_determinism use_cpu data_seed accelerator_config
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
dataloader_multiprocessing_context dataloader_in_order length_column_name ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision do_train do_eval
do_predict local_rank
""")
_ONE_DEVICE = "each worker holds the whole model"
# What to do instead; "leave it out" for the others.
REMEDIES = {
    "tf32": "set torch.backends in the model's constructor, on each worker",
    "average_tokens_across_devices": "a step is the mean over the tokens of all workers",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "apply the kernels in model_init"),
    "neftune_noise_alpha": "add the noise in the model's forward",
    "auto_find_batch_size": "a batch that depended on the device's memory would depend on the "
    "workers: lower per_device_train_batch_size, and raise gradient_accumulation_steps",
    "eval_on_start": "call trainer.evaluate() before the run",
    "save_on_each_node": "one worker writes to output_dir: make it a shared path",
    "enable_jit_checkpoint": "a worker that must leave hands its work over without a checkpoint",
    "push_to_hub": "call trainer.push_to_hub() after the run",
    "ignore_data_skip": "a run always goes on at the row where it was",
    **dict.fromkeys(("parallelism_config", "fsdp", "fsdp_config", "deepspeed"), _ONE_DEVICE),
    "resume_from_checkpoint": "leave it out: a run that is started again under the same name goes "
    "on from its newest checkpoint",
}
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
_OF_ACCELERATOR = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")
# Methods of Trainer that are not called: a subclass that overrides one would be ignored.
NOT_CALLED = names("""
train training_step hyperparameter_search create_optimizer_and_scheduler get_train_dataloader
get_batch_samples floating_point_ops get_total_train_batch_size set_initial_training_values
_inner_training_loop _run_epoch _prepare_for_training _finalize_training _get_train_sampler
_clip_grad_norm _get_grad_norm _track_num_input_tokens _save_optimizer_and_scheduler
_save_rng_state _save_scaler _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state
_load_scaler
""")
# Events within a step. It may be undone and done again, so callbacks do not see them.
NOT_FIRED = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
_KEY = "trainer"  # of what the loop's body changes, in `state=`
# What differs between workers, which must agree on the state: roles, and readings of a clock.
_OF_PROCESS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "train_loss")
_OF_CLOCK = ("_runtime", "_per_second", "_preparation_time")


class TransformersTrainer(ElasticTrainer):
    """A run of a `transformers.Trainer`. Its model, data and settings come from `trainer`.

    `options` are the other arguments of `ElasticTrainer`: `name`, `storage_path`, `scaling`,
    `checkpoint` and so on. The global batch is the one that `max_workers` processes would have in
    Trainer: `per_device_train_batch_size` x `gradient_accumulation_steps` x `max_workers`. With
    `ScalingConfig.virtual_workers`, these take the place of the last two factors.

    Raises SpecError for what Trainer offers and this class does not, before anything starts.
    """

    def __init__(self, trainer: transformers.Trainer, **options: Any) -> None:
        _check_trainer(trainer)
        args = trainer.args
        scaling = scaling_of(
            "TransformersTrainer",
            options,
            taken={"the Trainer and its arguments": ("train", "data", "max_steps")},
            precision="fp16" if args.fp16 else None,
            accumulated=args.gradient_accumulation_steps,
        )
        rows, collate_fn = _rows_and_collator(trainer)
        data = MapStyleData(
            rows,
            micro_batch_size=args.per_device_train_batch_size,
            collate_fn=collate_fn,
            shuffle=args.train_sampling_strategy != "sequential",
            seed=args.seed,
            tail="drop" if args.dataloader_drop_last else "short",
            workers=args.dataloader_num_workers,
        )
        options.setdefault("name", args.run_name)
        sent = _without_process_state(trainer, rows)
        sent.elastic_workers = scaling.max_workers
        super().__init__(
            types.MethodType(_train, sent),
            data=data,
            max_steps=_total_steps(args, len(rows), scaling.num_virtual_workers),
            **options | {"scaling": scaling},
        )
        self._trainer, self._sent = trainer, sent

    def fit(self, local: bool = False) -> Result:
        """Train to the end, as `ElasticTrainer.fit` does, and put the outcome into the Trainer:
        its model has the final weights (or the best, with `load_best_model_at_end`), its `state`
        the log history."""
        if local:  # as a worker, which has a copy
            sent = copy.copy(self._sent)
            parts = sent.model, sent.optimizer, sent.lr_scheduler
            sent.model, sent.optimizer, sent.lr_scheduler = copy.deepcopy(parts)
            self.train = types.MethodType(_train, sent)
        result = super().fit(local)
        trainer, final = self._trainer, result.load_state()
        trainer.model.load_state_dict(final.model)
        _Progress(trainer).load_state_dict(final.user[_KEY])
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
        return result


def _check_environment() -> None:
    """Raise SpecError where Accelerate would compile the model; also called in the workers, whose
    environment is that of their node."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("", "no"):
        raise SpecError(
            f"ACCELERATE_DYNAMO_BACKEND is {backend!r} in the environment, so Accelerate would "
            "compile the model, which is not supported: unset it"
        )


def _check_trainer(trainer: Any) -> None:
    _check_environment()
    if not isinstance(trainer, transformers.Trainer):
        raise SpecError(f"trainer is a {type(trainer).__name__}, must be a transformers.Trainer")
    args, optimizer, rows = trainer.args, trainer.optimizer, trainer.train_dataset
    _check_arguments(args)
    alone = "start the script once, without torchrun or accelerate launch, and set "
    alone += "ScalingConfig.max_workers"
    spread = trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers
    for is_so, sentence in (
        (args.world_size > 1, f"the script runs in {args.world_size} processes: {alone}"),
        (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
            f"the environment asks for FSDP or DeepSpeed, but {_ONE_DEVICE}: {alone}",
        ),
        (spread, "the model is spread over devices, but a worker has one: load it on one"),
        (
            optimizer is not None and optimizer.state,
            "the Trainer's optimizer has taken steps: make a new Trainer, or set trainer.optimizer "
            "and trainer.lr_scheduler to None, so that new ones are made",
        ),
        (rows is None, "trainer has no train_dataset"),
        (
            not hasattr(rows, "__len__"),
            f"train_dataset is a {type(rows).__name__} without a length, whose rows have no "
            "numbers: pass a map-style dataset, or write shards, and the loop with ctx.steps and "
            "DataConfig",
        ),
        (hasattr(rows, "__len__") and not len(rows), "train_dataset has no rows"),
    ):
        if is_so:
            raise SpecError(sentence)
    instead = (
        "Change the loss in compute_loss, rows in the dataset or the data collator, and optimizers "
        "in create_optimizer"
    )
    check_overrides(trainer, transformers.Trainer, NOT_CALLED, instead)
    for callback in trainer.callback_handler.callbacks:
        check_overrides(callback, TrainerCallback, NOT_FIRED, "Use on_step_end")


def _check_arguments(args: Any) -> None:
    fields = (f for f in dataclasses.fields(args) if f.name not in ACCEPTED)
    given = [(field.name, getattr(args, field.name), field.default) for field in fields]
    check_left_alone("TrainingArguments.", given, REMEDIES, {"fsdp": (False,)})
    drops, accumulated = args.dataloader_drop_last, args.gradient_accumulation_steps
    checks = {
        "optim": (
            args.optim.value in OPTIMIZERS,
            f"use one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs to the Trainer",
        ),
        "num_train_epochs": (
            args.max_steps > 0 or args.num_train_epochs > 0,
            "a run has at least one step",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy in ("random", "sequential"),
            "use 'random'",
        ),
        "data_seed": (args.data_seed in (None, args.seed), "a run has one seed: leave it out"),
        "dataloader_drop_last": (
            not drops or accumulated == 1,
            "with gradient accumulation, Trainer drops rows that fill no micro-batch, and this "
            "package rows that fill no step: leave it out, and no row is dropped",
        ),
        "mixed_precision": (args.mixed_precision in ("no", "bf16", "fp16"), "use bf16 or fp16"),
    }
    for name in _OF_ACCELERATOR:
        value = getattr(args.accelerator_config, name)
        checks[f"accelerator_config.{name}"] = not value, "leave it out"
    for name, (is_supported, remedy) in checks.items():
        if not is_supported:
            value = operator.attrgetter(name)(args)
            refuse(f"TrainingArguments.{name}", getattr(value, "value", value), remedy)


def _rows_and_collator(trainer: Any) -> tuple[Any, Any]:
    """Returns the rows to train on and their collator, as `Trainer.get_train_dataloader` makes
    them."""
    if hasattr(trainer.train_dataset, "remove_columns"):  # of the library datasets
        rows = trainer._remove_unused_columns(trainer.train_dataset, "training")
        return rows, trainer.data_collator
    collator = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    return trainer.train_dataset, collator


def _total_steps(args: Any, rows: int, virtual_workers: int) -> int:
    if args.max_steps > 0:
        return args.max_steps
    batch = args.per_device_train_batch_size * virtual_workers
    steps = rows // batch if args.dataloader_drop_last else math.ceil(rows / batch)
    return max(1, math.ceil(args.num_train_epochs * steps))


def _without_process_state(trainer: Any, rows: Any) -> Any:
    """Returns a copy that can be sent to workers: what belongs to a process is made there."""
    sent = copy.copy(trainer)
    for name in ("accelerator", "gather_function"):
        del vars(sent)[name]
    sent.train_dataset = rows  # the object that is in the data of the job: it is sent once
    sent.args = copy.copy(trainer.args)
    sent.args.output_dir = os.path.abspath(trainer.args.output_dir)
    sent.args.save_only_model = True  # the rest is in the run's own checkpoints
    sent.args.hub_token = None
    sent.args.distributed_state = None
    vars(sent.args).pop("_setup_devices", None)
    sent.callback_handler = copy.copy(trainer.callback_handler)
    sent.callback_handler.callbacks = [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback) not in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback)  # `fit` prints
    ]
    model = trainer.model if trainer.model_init is None else None  # each worker makes it
    parts = on_host(model, trainer.optimizer, trainer.lr_scheduler)
    sent.model, sent.optimizer, sent.lr_scheduler = parts
    handler = sent.callback_handler
    sent.model_wrapped = handler.model = sent.model
    handler.optimizer, handler.lr_scheduler = sent.optimizer, sent.lr_scheduler
    return sent


def _train(trainer: Any, ctx: TrainContext) -> None:
    """The train function. It is a method of the Trainer, so that the code of a subclass counts as
    the user's."""
    trainer = copy.copy(trainer)  # `fit(local=True)` may be called again
    trainer.args, handler = copy.copy(trainer.args), copy.copy(trainer.callback_handler)
    recorder = _Recorder(ctx)
    handler.callbacks = [*handler.callbacks, recorder]
    trainer.callback_handler = handler
    _prepare(trainer, ctx)
    progress = _Progress(trainer)
    by_metric = isinstance(
        trainer.lr_scheduler,
        torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR,
    )
    state: dict[str, Any] = {_KEY: progress}
    if by_metric:  # Trainer.evaluate is followed by its step, in the loop's body
        state["scheduler"] = trainer.lr_scheduler

    def loss_fn(_: Any, batch: Any) -> Any:
        return _loss(trainer, batch)

    args, body = trainer.args, _Body(trainer, ctx, recorder)
    for step in ctx.steps(
        trainer.model,
        trainer.optimizer,
        loss_fn,
        scheduler=None if by_metric else trainer.lr_scheduler,
        clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        precision="fp16" if args.fp16 else None,  # Accelerate has the forward under autocast
        state=state,
    ):
        body.run(step)
    trainer.is_in_train = False
    body.end()


def _prepare(trainer: Any, ctx: TrainContext) -> None:
    """Does what `Trainer.train` does before its first epoch, for a process that is alone."""
    _check_environment()
    args = trainer.args
    args.use_cpu = ctx.device.type == "cpu"
    if args.device.type != ctx.device.type:
        raise SpecError(f"Trainer chose the device {args.device}, but the worker has {ctx.device}")
    args._n_gpu = min(args._n_gpu, 1)  # else it would wrap the model in DataParallel
    transformers.logging.set_verbosity(args.get_process_log_level())
    transformers.set_seed(args.seed)
    if trainer.model_init is not None:
        trainer.model = trainer.call_model_init()
        trainer.optimizer = trainer.lr_scheduler = None
    trainer.create_accelerator_and_postprocess()
    trainer._move_model_to_device(trainer.model, ctx.device)
    if args.activation_checkpointing:
        options = dict(args.activation_checkpointing_kwargs or {})
        trainer.model.activation_checkpointing_enable(
            every_n_layers=options.pop("every_n_layers", 1),
            offload=options.pop("offload", False),
            activation_checkpointing_kwargs=options or None,
        )
    if trainer.processing_class is not None and hasattr(trainer.model, "config"):
        align_special_tokens(trainer.model, trainer.processing_class)
    trainer.model = trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.model.train()
    if trainer.lr_scheduler is not None:
        # torch marks the optimizer's step for a scheduler that is made, and a copy has no mark.
        warnings.filterwarnings("ignore", "Seems like `optimizer.step\\(\\)` has been overridden")
    trainer.create_optimizer()
    trainer.create_scheduler(num_training_steps=ctx.total_steps)
    epochs = math.ceil(ctx.total_steps / ctx.steps_per_epoch)
    trainer._init_training_state(ctx.total_steps, ctx.steps_per_epoch, epochs, None, None)
    handler = trainer.callback_handler
    handler.model, handler.optimizer = trainer.model, trainer.optimizer
    handler.lr_scheduler = trainer.lr_scheduler
    trainer.is_in_train = True
    trainer._tr_loss = torch.zeros((), dtype=torch.float64)
    trainer._total_loss_scalar = 0.0
    trainer._globalstep_last_logged = trainer._initial_global_step = 0


def _loss(trainer: Any, batch: Any) -> Any:
    """Returns the mean loss of a micro-batch and its weight.

    Trainer divides the sum over all micro-batches of a step by their number of items. Here each
    micro-batch is divided by its own number of items, and has it as its weight, which is the same.
    """
    inputs = trainer._prepare_inputs(batch)
    items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
    by_items = trainer.loss_is_scaled_for_ga
    if by_items is None:
        by_items = trainer.model_accepts_loss_kwargs and items is not None
        by_items = by_items or trainer.compute_loss_func is not None
    if not by_items:
        return loss
    if items is None:
        raise LossError(
            "the loss is a sum over all micro-batches of a step, but their number of items is not "
            "known, as a batch has no labels: set Trainer.loss_is_scaled_for_ga to False and "
            "return the mean over the micro-batch"
        )
    return loss, items


class _Body:
    """What Trainer does after an optimizer step: callbacks, logging, evaluation and saving."""

    def __init__(self, trainer: Any, ctx: TrainContext, recorder: _Recorder) -> None:
        self._trainer, self._ctx, self._recorder = trainer, ctx, recorder
        self._has_begun = self._was_zero = False

    def run(self, step: Step) -> None:
        trainer, state, per_epoch = self._trainer, self._trainer.state, self._ctx.steps_per_epoch
        state.global_step = step.number - 1
        self._take_rank()
        if step.number % per_epoch == 1 % per_epoch:
            self._fire("on_epoch_begin")
        self._fire("on_step_begin")
        trainer._tr_loss += step.loss
        state.global_step = step.number
        state.epoch = step.epoch + ((step.number - 1) % per_epoch + 1) / per_epoch
        self._fire("on_step_end")
        self._log_save_evaluate(step)
        stops = trainer.control.should_training_stop
        if step.epoch_end or stops:
            self._fire("on_epoch_end")
            self._log_save_evaluate(step)
        if trainer.control.should_epoch_stop:
            raise LoopError(
                "a callback set control.should_epoch_stop, but an epoch cannot be left early: set "
                "control.should_training_stop"
            )
        if stops and step.number < self._ctx.total_steps:
            self._ctx.stop("a callback set control.should_training_stop")

    def end(self) -> None:
        if self._has_begun:
            self._fire("on_train_end")

    def _take_rank(self) -> None:
        """Rank 0 is the world process zero. A worker that becomes it later sees on_train_begin
        again, where callbacks open what that process alone has."""
        trainer, is_zero = self._trainer, self._ctx.rank == 0
        of_process = trainer.args.distributed_state
        of_process.process_index = of_process.local_process_index = self._ctx.rank
        trainer.state.is_local_process_zero = trainer.state.is_world_process_zero = is_zero
        if not self._has_begun or (is_zero and not self._was_zero):
            self._fire("on_train_begin")
        self._has_begun, self._was_zero = True, is_zero

    def _fire(self, event: str) -> None:
        trainer = self._trainer
        fire = getattr(trainer.callback_handler, event)
        trainer.control = fire(trainer.args, trainer.state, trainer.control)

    def _log_save_evaluate(self, step: Step) -> None:
        trainer = self._trainer
        args, state = trainer.args, trainer.state
        grad_norm = step.grad_norm if trainer.control.should_log else None
        best, logged = state.best_model_checkpoint, len(state.log_history)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, grad_norm, trainer.model, None, step.epoch, None, 0.0, step.lr
        )
        _check_logged(trainer, state.log_history[logged:])
        # Trainer looks whether the folder is there, which another worker may be writing just now.
        if self._recorder.saved_at == state.best_global_step == step.number:
            best = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step.number}")
        state.best_model_checkpoint = best
        if not trainer.model.training:  # after an evaluation
            trainer.model.train()


def _check_logged(trainer: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    """Raise LoopError for a value that the user's `Trainer.log` adds: it is that of the rows that
    this worker has seen, and the workers must agree on what was logged."""
    if type(trainer).log is transformers.Trainer.log or trainer.elastic_workers == 1:
        return
    for name in (name for line in lines for name in line):
        if name not in _LOGGED and not name.startswith("eval_") and not name.endswith(_OF_CLOCK):
            raise LoopError(
                f"{type(trainer).__name__}.log adds {name!r}, which each worker computes from its "
                "own rows alone: return it from compute_metrics, or write the loop with ctx.steps, "
                f"and a loss function that returns (loss, weight, {{{name!r}: ...}})"
            )


class _Recorder(TrainerCallback):
    """Records each log once for the run, and takes a checkpoint of the run where Trainer saves."""

    def __init__(self, ctx: TrainContext) -> None:
        self._ctx, self.saved_at = ctx, 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._ctx.log(logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_at = state.global_step
        self._ctx.checkpoint()


class _Progress:
    """What the loop's body changes, for workers that join and for checkpoints."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {k: v for k, v in vars(trainer.state).items() if k not in _OF_PROCESS}
        state["log_history"] = [
            {name: value for name, value in line.items() if not name.endswith(_OF_CLOCK)}
            for line in trainer.state.log_history
        ]
        return {
            "state": json.dumps(state, default=float),  # what is logged may be a tensor
            "control": json.dumps(trainer.control.state()),
            "callbacks": json.dumps([callback.state() for callback in self._callbacks()]),
            "loss": float(trainer._tr_loss),
            "logged_loss": trainer._total_loss_scalar,
            "logged_step": trainer._globalstep_last_logged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.control = type(trainer.control).from_state(json.loads(state["control"]))
        for callback, held in zip(self._callbacks(), json.loads(state["callbacks"]), strict=True):
            vars(callback).update(vars(type(callback).from_state(held)))
        stateful = [*self._callbacks(), trainer.control]
        trainer.state = TrainerState(**json.loads(state["state"]), stateful_callbacks=stateful)
        trainer._tr_loss = torch.tensor(state["loss"], dtype=torch.float64)
        trainer._total_loss_scalar = state["logged_loss"]
        trainer._globalstep_last_logged = state["logged_step"]

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]
