"""Runs a `transformers.Trainer` on workers that come and go: `TransformersTrainer(trainer).fit()`
in place of `trainer.train()`.

The Trainer gives the loss, the optimizer, the scheduler and evaluation, by its own methods;
`ctx.steps` is the loop. Each worker holds a copy of the Trainer, which believes to be alone. Logs,
evaluations and checkpoints are due where Trainer's own callback for them says so.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import operator
import os
import types
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import DefaultFlowCallback, SchedulerType, TrainerControl, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import align_special_tokens

from elastic_dp import ElasticTrainer, MapStyleData, Result, Step, TrainContext
from elastic_dp.errors import LossError, SpecError
from elastic_dp.integrations.adapter import RESUMES, check_overrides, names, on_host, scaling_of

# Fields that are used, and fields that change nothing here. Any other must have its default.
ACCEPTED = names("""
output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps seed
learning_rate optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type
lr_scheduler_kwargs warmup_steps max_grad_norm label_smoothing_factor bf16 fp16 use_cache
label_names logging_strategy logging_steps logging_first_step log_level log_level_replica
logging_nan_inf_filter report_to run_name eval_strategy eval_steps eval_delay
per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_accumulation_steps
include_for_metrics batch_eval_metrics save_strategy save_steps
dataloader_drop_last dataloader_num_workers remove_unused_columns train_sampling_strategy
bf16_full_eval fp16_full_eval disable_tqdm full_determinism use_cpu accelerator_config
dataloader_pin_memory do_train do_eval do_predict local_rank hub_strategy activation_checkpointing
gradient_checkpointing
""")
# What to do instead; "leave it out" for the others.
REMEDIES = {
    "auto_find_batch_size": "lower per_device_train_batch_size, and raise "
    "gradient_accumulation_steps",
    "eval_on_start": "call trainer.evaluate() before the run",
    "load_best_model_at_end": "set CheckpointConfig(checkpoint_score_attribute=…), which keeps the "
    "best checkpoint",
    "neftune_noise_alpha": "add the noise in the model's forward",
    "save_total_limit": "set CheckpointConfig.num_to_keep",
    "push_to_hub": "call trainer.push_to_hub() after the run",
    "resume_from_checkpoint": f"leave it out: {RESUMES}",
    "tf32": "set torch.backends in the model's constructor, on each worker",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "apply the kernels in model_init"),
    **dict.fromkeys(("parallelism_config", "fsdp", "deepspeed"), "a worker holds the whole model"),
}
_REFUSED = {
    **dict.fromkeys(("train", "data"), "it comes from the Trainer"),
    "max_steps": "it comes from TrainingArguments",
    "resume_from_checkpoint": REMEDIES["resume_from_checkpoint"],
}
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_VALUES = {  # of accepted fields, and what to do instead of another value
    "optim": (OPTIMIZERS, f"use one of {', '.join(OPTIMIZERS)}, or optimizer_cls_and_kwargs"),
    "lr_scheduler_type": (
        [one.value for one in SchedulerType if one.value not in _BY_METRIC],
        "use one that follows the number of the step",
    ),
    "train_sampling_strategy": (("random", "sequential"), "use 'random'"),
    "save_strategy": (("no", "steps", "epoch"), REMEDIES["load_best_model_at_end"]),
    "activation_checkpointing": ((False,), "call model.activation_checkpointing_enable() before"),
    "mixed_precision": (("no", "bf16", "fp16"), "use bf16 or fp16"),
    "accelerator_config.split_batches": ((False,), "leave it out"),
}
# Methods of Trainer that a subclass may override. Others are not called, or do not do all of it.
CALLED = names("""
__init__ call_model_init compute_loss compute_loss_context_manager create_optimizer create_scheduler
get_decay_parameter_names get_optimizer_cls_and_kwargs get_eval_dataloader get_test_dataloader
evaluate evaluation_loop predict prediction_step num_examples save_model create_model_card
push_to_hub _prepare_input _prepare_inputs _remove_unused_columns _save
_set_signature_columns_if_needed
""")
NOT_CALLED = [
    name
    for name, member in vars(transformers.Trainer).items()
    if inspect.isfunction(member) and name not in CALLED
]
_EMPTY: tuple[Any, ...] = (None, "", [], ())
_QUIET = (DefaultFlowCallback, DEFAULT_PROGRESS_CALLBACK, PrinterCallback)
_OF_CLOCK = ("_runtime", "_per_second", "_preparation_time")  # they differ between workers


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
        accumulated = args.gradient_accumulation_steps
        scaling = scaling_of(
            TransformersTrainer, options, refused=_REFUSED, accumulated=accumulated
        )
        loader = trainer.get_train_dataloader()  # without columns that the model does not take
        data = MapStyleData(
            loader.dataset,
            micro_batch_size=args.per_device_train_batch_size,
            collate_fn=loader.collate_fn,
            shuffle=args.train_sampling_strategy != "sequential",
            seed=args.seed,
            tail="drop" if args.dataloader_drop_last else "short",
            workers=args.dataloader_num_workers,
        )
        self._trainer, self._sent = trainer, _without_process_state(trainer, loader.dataset)
        super().__init__(
            types.MethodType(_train, self._sent),
            data=data,
            max_steps=_total_steps(args, len(loader.dataset), scaling.num_virtual_workers),
            **{"name": args.run_name} | options | {"scaling": scaling},
        )

    def fit(self, local: bool = False) -> Result:
        """Train to the end, as `ElasticTrainer.fit` does, and put the outcome into the Trainer:
        its model has the final weights, its `state` the log history."""
        if local:  # as a worker, which has a copy
            sent = copy.copy(self._sent)
            sent.model = copy.deepcopy(sent.model)
            self.train = types.MethodType(_train, sent)
        result = super().fit(local)
        final = result.load_state()
        self._trainer.model.load_state_dict(final.model)
        self._trainer.state = TrainerState(**json.loads(final.user["trainer"]["state"]))
        return result


def _check_trainer(trainer: Any) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise SpecError(f"trainer is a {type(trainer).__name__}, must be a transformers.Trainer")
    _check_arguments(trainer.args)
    rows = trainer.train_dataset
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    others = [kind.__name__ for kind in kinds if kind not in _QUIET]
    parallel = trainer.args.world_size > 1 or trainer.is_model_parallel
    parallel |= trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    for is_so, sentence in (
        (
            parallel or trainer.is_distributed_loading_by_transformers,
            "the Trainer has several processes or devices, but a worker has one device and the "
            "whole model: start the script once, without torchrun or accelerate launch, and set "
            "ScalingConfig.max_workers",
        ),
        (
            others,
            f"the Trainer has callbacks ({', '.join(others)}), which are not called: pass loggers= "
            "for a tracker, and for others write the loop with ctx.steps",
        ),
        (
            trainer.optimizer is not None or trainer.lr_scheduler is not None,
            "the Trainer has an optimizer or a scheduler, but each worker makes its own: pass "
            "optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler; after "
            "trainer.train(), make a new Trainer",
        ),
        (
            not hasattr(rows, "__len__") or not len(rows),
            f"train_dataset is a {type(rows).__name__}, must be a map-style dataset with rows; for "
            "a stream write shards, and the loop with ctx.steps and DataConfig",
        ),
    ):
        if is_so:
            raise SpecError(sentence)
    instead = (
        "Change the loss in compute_loss, rows in the dataset or the data collator, optimizers in "
        "create_optimizer, and what is logged in compute_metrics"
    )
    check_overrides(trainer, transformers.Trainer, NOT_CALLED, instead)


def _check_arguments(args: Any) -> None:
    # A derived class may have fields of its own, which its methods of Trainer read.
    for field in dataclasses.fields(transformers.TrainingArguments):
        value, default = getattr(args, field.name), field.default
        is_empty = value in _EMPTY and default in _EMPTY
        is_same = type(value) is type(default) and value == default
        if not (field.name in ACCEPTED or is_empty or is_same):
            _refuse(field.name, value, REMEDIES.get(field.name, "leave it out"))
    for name, (supported, remedy) in _VALUES.items():
        value = operator.attrgetter(name)(args)
        value = getattr(value, "value", value)
        if value not in supported:
            _refuse(name, value, remedy)


def _refuse(name: str, value: Any, remedy: str) -> None:
    raise SpecError(f"TrainingArguments.{name} is {value!r}, which is not supported: {remedy}")


def _total_steps(args: Any, rows: int, virtual_workers: int) -> int:
    if args.max_steps > 0:
        return args.max_steps
    batch = args.per_device_train_batch_size * virtual_workers
    steps = rows // batch if args.dataloader_drop_last else math.ceil(rows / batch)
    total = math.ceil(args.num_train_epochs * steps)
    if total < 1:
        raise SpecError(
            f"there is no step to make: TrainingArguments.num_train_epochs is "
            f"{args.num_train_epochs}, dataloader_drop_last is {args.dataloader_drop_last}, a step "
            f"has {batch} rows, and train_dataset {rows}"
        )
    return total


def _without_process_state(trainer: Any, rows: Any) -> Any:
    """Returns a copy that can be sent to workers: what belongs to a process is made there."""
    sent = copy.copy(trainer)
    for name in ("accelerator", "gather_function"):
        del vars(sent)[name]
    sent.train_dataset = rows  # the object that is in the data of the job: it is sent once
    sent.args = copy.copy(trainer.args)
    sent.args.distributed_state = None
    vars(sent.args).pop("_setup_devices", None)
    sent.callback_handler = copy.copy(trainer.callback_handler)
    sent.callback_handler.callbacks = []
    model = trainer.model if trainer.model_init is None else None  # each worker makes it
    sent.model = sent.model_wrapped = sent.callback_handler.model = on_host(model)
    return sent


def _train(trainer: Any, ctx: TrainContext) -> None:
    """The train function. It is a method of the Trainer, so that the code of a subclass counts as
    the user's."""
    trainer = copy.copy(trainer)  # `fit(local=True)` may be called again
    trainer.args = args = copy.copy(trainer.args)
    trainer.callback_handler = copy.copy(trainer.callback_handler)
    _prepare(trainer, ctx)
    body = _Body(trainer, ctx)

    def loss_fn(_: Any, batch: Any) -> Any:
        return _loss(trainer, batch)

    for step in ctx.steps(
        trainer.model,
        trainer.optimizer,
        loss_fn,
        scheduler=trainer.lr_scheduler,
        clip_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        precision="fp16" if args.fp16 else None,  # Accelerate has the forward under autocast
        state={"trainer": body},
    ):
        body.run(step)


def _prepare(trainer: Any, ctx: TrainContext) -> None:
    """Does what `Trainer.train` does before its first epoch, for a process that is alone."""
    args = trainer.args
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"  # as in the script's process
    args.use_cpu = ctx.device.type == "cpu"
    if args.device.type != ctx.device.type:
        raise SpecError(f"Trainer chose the device {args.device}, but the worker has {ctx.device}")
    args._n_gpu = min(args._n_gpu, 1)  # else it would wrap the model in DataParallel
    transformers.logging.set_verbosity(args.get_process_log_level())
    transformers.set_seed(args.seed)
    if trainer.model_init is not None:
        trainer.model = trainer.call_model_init()
    trainer.create_accelerator_and_postprocess()
    trainer._move_model_to_device(trainer.model, ctx.device)
    if trainer.processing_class is not None and hasattr(trainer.model, "config"):
        align_special_tokens(trainer.model, trainer.processing_class)
    trainer.model = trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.model.train()
    trainer.create_optimizer()
    trainer.create_scheduler(num_training_steps=ctx.total_steps)
    trainer.is_in_train = True


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
    """What Trainer does after an optimizer step: logs, evaluations and checkpoints. Its state is
    what workers that join need."""

    def __init__(self, trainer: Any, ctx: TrainContext) -> None:
        self._trainer, self._ctx, self._flow = trainer, ctx, DefaultFlowCallback()
        self._loss_sum, self._logged_step = 0.0, 0  # of the steps after the last log
        self._set_state(TrainerState())
        trainer.log = self._log  # evaluate calls it, too

    def _set_state(self, state: TrainerState) -> None:
        """Limits and intervals are those of this start, which may differ from those before."""
        trainer, steps = self._trainer, self._ctx.total_steps
        epochs = math.ceil(steps / self._ctx.steps_per_epoch)
        state.compute_steps(trainer.args, steps)
        state.init_training_references(trainer, steps, epochs, None)
        trainer.state = state

    def state_dict(self) -> dict[str, Any]:
        state = vars(self._trainer.state) | {"stateful_callbacks": None}
        loss = {"loss_sum": self._loss_sum, "logged_step": self._logged_step}
        return {"state": json.dumps(state, default=float), **loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._set_state(TrainerState(**json.loads(state["state"])))
        self._loss_sum, self._logged_step = state["loss_sum"], state["logged_step"]

    def run(self, step: Step) -> None:
        trainer, per_epoch = self._trainer, self._ctx.steps_per_epoch
        args, state = trainer.args, trainer.state
        self._loss_sum += step.loss
        state.global_step = step.number
        state.epoch = step.epoch + ((step.number - 1) % per_epoch + 1) / per_epoch
        control = trainer.control = self._flow.on_step_end(args, state, TrainerControl())
        if step.epoch_end or step.number == self._ctx.total_steps:
            control = self._flow.on_epoch_end(args, state, control)
        if control.should_log:
            loss = self._loss_sum / (step.number - self._logged_step)
            self._log({"loss": loss, "grad_norm": step.grad_norm, "learning_rate": step.lr})
            self._loss_sum, self._logged_step = 0.0, step.number
        if control.should_evaluate:
            trainer.evaluate()
            trainer.model.train()
        if control.should_save:
            self._ctx.checkpoint()
        if control.should_training_stop and step.number < state.max_steps:
            self._ctx.stop("the Trainer's control says so")

    def _log(self, logs: Mapping[str, Any], *_: Any) -> None:
        state = self._trainer.state
        logs = {name: value for name, value in logs.items() if not name.endswith(_OF_CLOCK)}
        logs |= {"epoch": state.epoch}
        state.log_history.append({**logs, "step": state.global_step})
        self._ctx.log(logs)
