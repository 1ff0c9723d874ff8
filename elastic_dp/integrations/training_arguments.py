"""What becomes of each field of `transformers.TrainingArguments`.

A field is used, refused unless it has one of the values that change nothing, or ignored. The tests
compare the names with the fields of the installed version, so that a new field is a decision and
not an accident.
"""

from __future__ import annotations

from typing import Any

from elastic_dp.errors import SpecError

# docs/transformers.md says how
USED = (
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_train_epochs", "max_steps", "learning_rate", "optim", "optim_args", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_steps", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "use_cache", "logging_strategy", "logging_steps"),
    *(
        "logging_first_step",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "report_to",
    ),
    *("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size"),
    *("prediction_loss_only", "eval_do_concat_batches", "eval_accumulation_steps"),
    *("include_for_metrics", "batch_eval_metrics", "save_strategy", "save_steps"),
    *("save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("seed", "dataloader_drop_last", "dataloader_num_workers", "remove_unused_columns"),
    *("label_names", "train_sampling_strategy"),
)

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

# docs/transformers.md says why
IGNORED = (
    *("bf16_full_eval", "fp16_full_eval", "torch_empty_cache_steps", "log_on_each_node"),
    *("disable_tqdm", "eval_use_gather_object", "save_only_model"),
    *("restore_callback_states_from_checkpoint", "full_determinism", "use_cpu", "data_seed"),
    *("accelerator_config", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("length_column_name", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
    *("ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "hub_token"),
    *("hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *("do_train", "do_eval", "do_predict", "local_rank"),
)

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


def _refuse(field: str, value: Any, way_out: str) -> None:
    raise SpecError(f"TrainingArguments.{field} is {value!r}, which is not supported: {way_out}")
