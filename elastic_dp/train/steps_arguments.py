"""Checks the arguments of `ctx.steps` before training. Each error names the argument and a
solution."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR, OneCycleLR, StepLR

from elastic_dp.checkpoint.codec import encode
from elastic_dp.config.field_checks import whole_number
from elastic_dp.distributed.gradient_rounding import GradientRounding
from elastic_dp.errors import ModelError, RunMismatch, SpecError, StateError
from elastic_dp.train.state.optimizer_state import check_kind
from elastic_dp.train.step.micro_batch import LossFn
from elastic_dp.train.step.participants import StepParticipant
from elastic_dp.train.step.precision import check_precision


@dataclass(frozen=True)
class StepsArguments:
    """The arguments of `ctx.steps`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    scheduler: Any = None
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: str | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    noise_scale_every: int | None = None
    inner_optimizer: Callable[[torch.nn.Module, int], torch.optim.Optimizer] | None = None
    inner_clip_norm: float | None = None
    participants: Sequence[StepParticipant] = ()
    rounding: Callable[[torch.dtype], GradientRounding] | None = None

    @property
    def rounding_name(self) -> str | None:
        return None if self.rounding is None else getattr(self.rounding, "__qualname__", "other")


def check_clipping(name: str, limit: Any) -> None:
    """Raises SpecError unless `limit`, of the argument `name`, is a largest norm or None."""
    if limit is not None and not (isinstance(limit, Real) and float(limit) > 0):
        raise SpecError(f"{name} is {limit!r}, must be a number of more than 0, or None")


def check_steps_arguments(given: StepsArguments) -> None:
    """Raises SpecError, ModelError or StateError for arguments that cannot be used."""
    check_precision(given.precision)
    check_clipping("clip_norm", given.clip_norm)
    check_clipping("clip_value", given.clip_value)
    if given.clip_norm is not None and given.clip_value is not None:
        raise SpecError("clip_norm and clip_value are both set: leave out one of the two")
    if not isinstance(given.model, nn.Module):
        raise ModelError(
            f"ctx.steps got a {type(given.model).__name__} as model, must be a torch.nn.Module; "
            "several go into one nn.ModuleDict"
        )
    _check_model(given.model)
    if not isinstance(given.optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"ctx.steps got a {type(given.optimizer).__name__} as optimizer, must be a "
            "torch.optim.Optimizer; a step has one, whose parameter groups may differ in lr "
            "and the like"
        )
    check_optimizer("optimizer", given.optimizer, given.model)
    check_loss_fn("loss_fn", given.loss_fn)
    if given.scheduler is not None:
        _check_scheduler(given.scheduler)
    if not isinstance(given.state, Mapping):
        raise SpecError(
            f"state is a {type(given.state).__name__}, must be a dict of what the body changes, "
            'e.g. {"ema": ema}'
        )
    for key, value in given.state.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise SpecError(
                f"state[{key!r}] is a {type(value).__name__}, and needs state_dict() and "
                "load_state_dict(), as a model or a scheduler has them; a dict of tensors can "
                "be the buffers of an nn.Module"
            )
        _check_state_dict(f"state[{key!r}]", value)
    whole_number("noise_scale_every", given.noise_scale_every, 1)
    for one in given.participants:
        if not isinstance(one, StepParticipant):
            raise SpecError(
                f"participants has a {type(one).__name__}, must have objects of classes that are "
                "derived from elastic_dp.StepParticipant"
            )
        if hasattr(one, "send"):
            raise SpecError(f"{type(one).__name__}.send of participants is gone: send in begin()")


def check_loss_fn(name: str, given: Any) -> None:
    """Raises SpecError unless `given` can be called with a model and a batch."""
    check_function(name, given, 2, "(model, batch)")


def check_function(name: str, given: Any, arguments: int, told: str) -> None:
    """Raises SpecError unless `given` can be called with this number of arguments. `told` describes
    them in the error."""
    must = f"must be a function of {told}"
    if not callable(given):
        raise SpecError(f"{name} is a {type(given).__name__}, {must}")
    with contextlib.suppress(ValueError):  # some callables of extension modules have no signature
        signature = inspect.signature(given)
        try:
            signature.bind(*[None] * arguments)
        except TypeError as error:
            raise SpecError(f"{name} takes {signature}, {must}: {error}") from None
    if inspect.iscoroutinefunction(given) or inspect.isgeneratorfunction(given):
        raise SpecError(
            f"{name} has async or yield, so that a call of it runs nothing; {must} that returns"
        )


def _check_model(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "model is a TorchScript module, whose parameters and buffers cannot be watched; "
            "train the module that it was made from, and script that one after the training"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"model.{name} is a SyncBatchNorm, which needs a collective in forward. Use "
                "BatchNorm: its statistics are per virtual worker, so they do not depend on the "
                "number of workers"
            )
        if _observes(module):
            raise ModelError(
                f"model.{name} is an observer of quantization-aware training that is switched on: "
                "it changes with the rows of each micro-batch. Run some batches through the model "
                "before the loop, and call model.apply(torch.ao.quantization.disable_observer)"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(f"model.{name} makes sparse gradients; use sparse=False")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ModelError(
                f"model.{name} has max_norm={module.max_norm:g}: its forward pass writes to its "
                "weight, for the rows of its micro-batch, so weights would differ between "
                "workers. Scale what it returns instead (torch.renorm)"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"model.{name} has no shape yet, since its module is a lazy one; run a batch "
                "through the model before the optimizer is made"
            )
        if tensor.is_complex() and isinstance(tensor, nn.Parameter):
            raise ModelError(
                f"model.{name} is of type {tensor.dtype}, and complex gradients are not "
                "supported; keep it as torch.view_as_real returns it, and call "
                "torch.view_as_complex in forward"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ModelError(
                f"model.{name} is not a dense tensor ({tensor.layout}, {tensor.dtype}), and only "
                "those are sent to a worker that joins. Register what it consists of (indices "
                "and values), or keep it as a plain attribute, if it never changes"
            )
        if any(
            stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
        ):
            raise ModelError(
                f"model.{name} is an expanded tensor, of which several elements are one in memory; "
                "give it memory of its own before the optimizer is made, as .clone() does"
            )
        if tensor.is_inference():
            raise ModelError(
                f"model.{name} was made under torch.inference_mode(), so writes to it cannot be "
                "detected; make the model outside of it, or replace it by a .clone()"
            )
        if tensor.is_meta:
            raise ModelError(
                f"model.{name} is on the meta device and holds no values; give it memory before "
                "the optimizer is made: model.to_empty(device=ctx.device), then its initial values"
            )


def _observes(module: nn.Module) -> bool:
    """Returns whether a module is a FakeQuantize whose observer is switched on."""
    is_fake = type(module).__module__.startswith("torch.ao.quantization")
    switch = getattr(module, "observer_enabled", None)
    return is_fake and isinstance(switch, torch.Tensor) and bool(switch.flatten()[0])


def check_optimizer(name: str, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ModelError for an optimizer that cannot be used. `name`: in messages."""
    check_kind(name, optimizer, set(model.parameters()))
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise ModelError(
            f"{name} is a {type(optimizer).__name__}, whose step() needs arguments ({error}); "
            "it is called without a closure, once per step"
        ) from None
    _check_fused_sgd(name, optimizer)


def _check_fused_sgd(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises ModelError for what torch's fused SGD does not train on processors
    (https://github.com/pytorch/pytorch/issues/191763)."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for p in group["params"] if group.get("fused") else ():
            if p.device.type == "cpu" and p.dtype in (torch.bfloat16, torch.float16):
                raise ModelError(
                    f"{name} is SGD with fused=True, which on a processor does not update "
                    f"parameters of type {p.dtype}, and writes memory that was never set to their "
                    "momentum: leave fused out, or use elastic_dp.MasterWeights, whose masters are "
                    "in fp32"
                )


def _check_scheduler(scheduler: Any) -> None:
    kind = type(scheduler).__name__
    for method in ("step", "state_dict", "load_state_dict"):
        if not callable(getattr(scheduler, method, None)):
            raise SpecError(
                f"scheduler is of type {kind}, which has no {method}(); it must be like those of "
                "torch.optim.lr_scheduler"
            )
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError as error:
        raise SpecError(
            f"scheduler is of type {kind}, whose step() needs arguments ({error}). Call it in "
            "the loop's body, e.g. scheduler.step(step.loss), and pass it as "
            'state={"scheduler": scheduler} instead'
        ) from None


def check_schedule_lasts(scheduler: Any, steps: int, restored: int | None = None) -> None:
    """Raises an error if a schedule ends before the run: RunMismatch if it is that of the
    checkpoint of step `restored`, else SpecError. `steps`: of the run, or 0."""
    if not isinstance(scheduler, OneCycleLR) or scheduler.total_steps >= steps:
        return
    ends = f"OneCycleLR ends after total_steps={scheduler.total_steps}, and the run has {steps}"
    if restored is None:
        raise SpecError(f"scheduler={ends}: write OneCycleLR(…, total_steps=ctx.total_steps)")
    raise RunMismatch(
        f"the checkpoint of step {restored} has a schedule of fewer steps: {ends} now. Its rates "
        f"were made for {scheduler.total_steps}: set max_steps={scheduler.total_steps} to get that "
        "run's result, or start a new run from its weights, with a new name= and "
        "elastic_dp.load_state"
    )


def decay_by_epochs(scheduler: Any, steps_per_epoch: int, steps: int) -> str | None:
    """Returns a warning if a schedule that decays by a factor was written for a step in each epoch.
    `steps`: of the run, or 0.

    Such a schedule leaves less than a thousandth of the learning rate within the first epoch and
    the first half of the run. One that was written for steps leaves that much near the run's end,
    and one that is not monotone may come back, so only the three kinds that are both are looked at.
    """
    after = min(steps_per_epoch, steps // 2)
    if type(scheduler) is StepLR:
        decays = after // scheduler.step_size
    elif type(scheduler) is MultiStepLR:
        decays = sum(step <= after for step in scheduler.milestones.elements())
    elif type(scheduler) is ExponentialLR:
        decays = after
    else:
        return None
    if scheduler.gamma**decays >= 1e-3:
        return None
    return (
        f"scheduler= is a {type(scheduler).__name__} that leaves {scheduler.gamma**decays:.1g} of "
        f"the learning rate after {after} of {steps} steps: it is stepped after each optimizer "
        f"step. If it counts epochs, of {steps_per_epoch} steps, call scheduler.step() in the "
        'loop\'s body where step.epoch_end is True, and pass state={"scheduler": scheduler}'
    )


def _check_state_dict(name: str, holder: Any) -> None:
    """Raises SpecError unless the state can be sent to a worker and stored in a checkpoint."""
    try:
        encode(holder.state_dict())
    except StateError as error:
        raise SpecError(
            f"{name}.state_dict() cannot be sent to a worker that joins: {error.path} is "
            f"{error.reason}"
        ) from None
