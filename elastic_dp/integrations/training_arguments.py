"""What becomes of each field of `transformers.TrainingArguments`.

A field is used, refused unless it has one of the values that change nothing, or ignored, with a
reason. The tests compare the table with the fields of the installed version, so that a new field is
a decision and not an accident.
"""

from __future__ import annotations

from typing import Any

from elastic_dp.errors import SpecError

_CALLBACK = "read by the callbacks that report to trackers"
_EVALUATION = "by `Trainer.evaluate`"
_OPTIMIZER = "by `Trainer.create_optimizer`"
_SCHEDULER = "by `Trainer.create_scheduler`"
_NO_DDP = "there is no DistributedDataParallel"
_NO_HUB = "it matters with `push_to_hub` only"

USED: dict[str, str] = {
    "output_dir": "`checkpoint-<step>` is written there, by one worker; on several hosts it must "
    "be a shared path",
    "per_device_train_batch_size": "the micro-batch of a virtual worker",
    "gradient_accumulation_steps": "times `max_workers`, the number of virtual workers",
    "num_train_epochs": "the number of steps",
    "max_steps": "the number of steps",
    "learning_rate": _OPTIMIZER,
    "optim": f"{_OPTIMIZER}; {{optimizers}}. Others are refused",
    "optim_args": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "lr_scheduler_type": _SCHEDULER,
    "lr_scheduler_kwargs": _SCHEDULER,
    "warmup_steps": _SCHEDULER,
    "max_grad_norm": "`clip_norm`; 0 does not clip",
    "label_smoothing_factor": "by `Trainer.compute_loss`",
    "bf16": "autocast, by Accelerate",
    "fp16": "autocast, by Accelerate, with this package's loss scale",
    "activation_checkpointing": "by the model's `activation_checkpointing_enable`",
    "activation_checkpointing_kwargs": "by the model's `activation_checkpointing_enable`",
    "gradient_checkpointing": "the former name of `activation_checkpointing`",
    "gradient_checkpointing_kwargs": "the former name of `activation_checkpointing_kwargs`",
    "use_cache": "by the Trainer's constructor",
    "logging_strategy": "when `Trainer.log` is called",
    "logging_steps": "when `Trainer.log` is called",
    "logging_first_step": "when `Trainer.log` is called",
    "logging_nan_inf_filter": f"{_EVALUATION}; in training a loss that is not finite fails the run",
    "log_level": "of the library's logger in a worker",
    "log_level_replica": "of the library's logger in a worker",
    "report_to": "chooses the callbacks that report to trackers; one worker reports",
    "run_name": "the default of `name`",
    "project": _CALLBACK,
    "trackio_space_id": _CALLBACK,
    "trackio_bucket_id": _CALLBACK,
    "trackio_static_space_id": _CALLBACK,
    "eval_strategy": "when `Trainer.evaluate` is called",
    "eval_steps": "when `Trainer.evaluate` is called",
    "eval_delay": "when `Trainer.evaluate` is called",
    "per_device_eval_batch_size": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "save_strategy": "when a checkpoint is taken",
    "save_steps": "when a checkpoint is taken",
    "save_total_limit": "the number of `checkpoint-<step>` folders",
    "load_best_model_at_end": "in the script's process, after the run",
    "metric_for_best_model": "ranks evaluations",
    "greater_is_better": "ranks evaluations",
    "seed": "the order of rows and the random numbers of each micro-batch; `model_init`",
    "dataloader_drop_last": '`tail="drop"`, else `tail="short"`; refused with gradient '
    "accumulation",
    "dataloader_num_workers": "processes that fetch and collate ahead of the step",
    "remove_unused_columns": "as in `Trainer.get_train_dataloader`",
    "label_names": "by the Trainer's constructor",
    "train_sampling_strategy": '"random" or "sequential"; others are refused',
}

# Allowed values, and the way out for others.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tf32": ((None,), "set torch.backends in the model's constructor, on each worker"),
    "optim_target_modules": ((None,), "GaLore and APOLLO are not supported"),
    "average_tokens_across_devices": (
        (True,),
        "a step is always the mean over the tokens of all workers; leave it at True",
    ),
    "torch_compile": ((False,), "leave it out"),
    "torch_compile_backend": ((None,), "leave it out"),
    "torch_compile_mode": ((None,), "leave it out"),
    "use_liger_kernel": ((False,), "apply the kernels in model_init"),
    "liger_kernel_config": ((None,), "apply the kernels in model_init"),
    "neftune_noise_alpha": ((None,), "add the noise in the model's forward"),
    "auto_find_batch_size": (
        (False,),
        "a batch that depended on the device's memory would depend on the workers: lower "
        "per_device_train_batch_size, and raise gradient_accumulation_steps",
    ),
    "include_num_input_tokens_seen": (("no",), "leave it out"),
    "eval_on_start": ((False,), "call trainer.evaluate() before the run"),
    "save_on_each_node": ((False,), "one worker writes to output_dir: make it a shared path"),
    "enable_jit_checkpoint": (
        (False,),
        "leave it out: a worker that is told to leave hands its work over without a checkpoint",
    ),
    "push_to_hub": ((False,), "call trainer.push_to_hub() after the run"),
    "ignore_data_skip": ((False,), "a run always goes on at the row where it was"),
    "parallelism_config": ((None,), "each worker holds the whole model"),
    "fsdp": ((None, "", False, ()), "each worker holds the whole model"),
    "fsdp_config": ((None,), "each worker holds the whole model"),
    "deepspeed": ((None,), "each worker holds the whole model"),
    "debug": (((), ""), "leave it out"),
    "skip_memory_metrics": ((True,), "leave it at True"),
    "resume_from_checkpoint": (
        (None,),
        "leave it out: a run that is started again under the same name goes on from its newest "
        "checkpoint",
    ),
}

IGNORED: dict[str, str] = {
    "bf16_full_eval": "as in Trainer, it has no effect while training",
    "fp16_full_eval": "as in Trainer, it has no effect while training",
    "torch_empty_cache_steps": "it changes no result, and slows steps down",
    "log_on_each_node": "each worker's output is in the run's folder",
    "disable_tqdm": "`fit` shows the progress of the run",
    "eval_use_gather_object": "each worker evaluates all rows, and gathers nothing",
    "save_only_model": "`checkpoint-<step>` has the model; the optimizer is in the run's own "
    "checkpoint",
    "restore_callback_states_from_checkpoint": "they are always restored",
    "full_determinism": "`exact=True`, the default, is deterministic",
    "use_cpu": "`ScalingConfig.resources_per_worker` decides",
    "data_seed": "it must be None or equal to `seed`",
    "accelerator_config": "`split_batches`, `dispatch_batches` and "
    "`gradient_accumulation_kwargs` are refused; the rest has no effect",
    "dataloader_pin_memory": "batches are pinned where there is a GPU",
    "dataloader_persistent_workers": "the processes live as long as the worker",
    "dataloader_prefetch_factor": "batches are fetched a step ahead",
    "dataloader_multiprocessing_context": "the processes are started in one way",
    "dataloader_in_order": "the order of rows is fixed by the seed",
    "length_column_name": 'it matters with `train_sampling_strategy="group_by_length"` only',
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "ddp_backend": _NO_DDP,
    "ddp_timeout": _NO_DDP,
    "hub_token": f"{_NO_HUB}; it is not sent to workers",
    "hub_private_repo": _NO_HUB,
    "hub_model_id": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "hub_always_push": _NO_HUB,
    "hub_revision": _NO_HUB,
    "do_train": "only scripts read it",
    "do_eval": "only scripts read it",
    "do_predict": "only scripts read it",
    "local_rank": "workers are not started by torchrun",
}

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd")
_SAMPLING = ("random", "sequential")
_OF_ACCELERATOR = {
    "split_batches": False,
    "dispatch_batches": None,
    "gradient_accumulation_kwargs": None,
}


def check_training_arguments(args: Any) -> None:
    """Raises SpecError for the first field that cannot be had."""
    for field, (allowed, way_out) in REFUSED.items():
        value = getattr(args, field)
        if (tuple(value) if isinstance(value, list) else value) not in allowed:
            _refuse(field, value, way_out)
    if args.optim.value not in OPTIMIZERS:
        _refuse(
            "optim",
            args.optim.value,
            f"use one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs to the Trainer",
        )
    if args.max_steps <= 0 and not args.num_train_epochs > 0:
        _refuse("num_train_epochs", args.num_train_epochs, "a run has at least one step")
    if args.train_sampling_strategy not in _SAMPLING:
        _refuse("train_sampling_strategy", args.train_sampling_strategy, "use 'random'")
    if args.data_seed not in (None, args.seed):
        _refuse("data_seed", args.data_seed, "a run has one seed: leave it out")
    if args.dataloader_drop_last and args.gradient_accumulation_steps > 1:
        _refuse(
            "dataloader_drop_last",
            True,
            "with gradient accumulation, Trainer drops rows that fill no micro-batch, and this "
            "package rows that fill no step: leave it out, and no row is dropped",
        )
    for name, allowed_value in _OF_ACCELERATOR.items():
        value = getattr(args.accelerator_config, name)
        if value != allowed_value:
            _refuse(f"accelerator_config.{name}", value, "leave it out")
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        _refuse("mixed_precision", args.mixed_precision, "use bf16 or fp16")


def fields_table() -> str:
    """Returns the table in docs/transformers.md."""
    optimizers = ", ".join(f'"{name}"' for name in OPTIMIZERS)
    used = {name: how.replace("{optimizers}", optimizers) for name, how in USED.items()}
    rows = {name: ("used", how) for name, how in used.items()}
    for name, (allowed, way_out) in REFUSED.items():
        rows[name] = (f"refused, unless {allowed[0]!r}", way_out)
    rows |= {name: ("ignored", why) for name, why in IGNORED.items()}
    lines = [f"| `{name}` | {word} | {why} |" for name, (word, why) in sorted(rows.items())]
    return "\n".join(["| field | | how, why, or what to do |", "|---|---|---|", *lines])


def _refuse(field: str, value: Any, way_out: str) -> None:
    raise SpecError(f"TrainingArguments.{field} is {value!r}, which is not supported: {way_out}")
