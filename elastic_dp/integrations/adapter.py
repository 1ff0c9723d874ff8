"""What the adapters share: options of `ElasticTrainer`, refusals by name, copies on the host."""

from __future__ import annotations

import dataclasses
import inspect
import io
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from elastic_dp import ElasticTrainer, ScalingConfig, module_pickling
from elastic_dp.errors import SpecError
from elastic_dp.wording import did_you_mean

_OF_ELASTIC_TRAINER = set(inspect.signature(ElasticTrainer.__init__).parameters) - {"self"}
_OF_RESUMING = ("ckpt_path", "resume_from_checkpoint")
_EMPTY: tuple[Any, ...] = (None, "", [], ())


def names(text: str) -> list[str]:
    return text.split()


def check_left_alone(
    prefix: str,
    given: Iterable[tuple[str, Any, Any]],
    remedies: Mapping[str, str],
    harmless: Mapping[str, Container[Any]],
) -> None:
    """Raises SpecError for the first of the (name, value, default) with another value than the
    default and those of `harmless`."""
    for name, value, default in given:
        empty = value in _EMPTY and default in _EMPTY
        same = type(value) is type(default) and value == default
        if not (empty or same or value in harmless.get(name, ())):
            refuse(prefix + name, value, remedies.get(name, "leave it out"))


def refuse(name: str, value: Any, remedy: str) -> None:
    raise SpecError(f"{name} is {value!r}, which is not supported: {remedy}")


def check_overrides(owner: Any, base: type, names: Iterable[str], why: str) -> None:
    """Raises SpecError for a method of `base` that the class of `owner` overrides."""
    for name in names:
        if hasattr(base, name) and getattr(type(owner), name) is not getattr(base, name):
            raise SpecError(
                f"{type(owner).__name__} overrides {name}, which is not called: a step may be "
                f"undone and done again. {why}"
            )


def scaling_of(
    adapter: str,
    options: Mapping[str, Any],
    *,
    taken: Mapping[str, Iterable[str]],
    precision: str | None,
    accumulated: int,
    own: Iterable[str] = (),
) -> ScalingConfig:
    """Returns how the run may scale; accumulated batches become virtual workers.

    Raises SpecError for an option that comes from the library's own objects (`taken`), that neither
    `ElasticTrainer` nor the adapter (`own`) has, or that the adapter cannot follow.
    """
    known = {*_OF_ELASTIC_TRAINER, *own}
    for name in options:
        for source, names in taken.items():
            if name in names:
                raise SpecError(f"{name} is given, but it comes from {source}")
        if name in _OF_RESUMING:
            raise SpecError(
                f"{name} is given, which is not supported: leave it out, since a run that is "
                "started again under the same name goes on from its newest checkpoint"
            )
        if name not in known:
            raise SpecError(f"{adapter} has no option {name!r}{did_you_mean(name, sorted(known))}")
    if options.get("sharding") is not None and precision == "fp16":
        raise SpecError(
            'the precision is fp16, whose loss scaling does not work with sharding="optimizer" '
            'yet: use bf16, or leave sharding="optimizer" out'
        )
    scaling = options.get("scaling")
    scaling = ScalingConfig() if scaling is None else scaling
    if not isinstance(scaling, ScalingConfig):
        raise SpecError(f"scaling is a {type(scaling).__name__}, must be a ScalingConfig")
    if scaling.processes_per_worker > 1:
        raise SpecError(
            f"ScalingConfig.processes_per_worker is {scaling.processes_per_worker}, which "
            f"{adapter} does not work with: it does not shard the model. Write a train function, "
            "which calls fully_shard and loops over ctx.steps"
        )
    if scaling.grows:
        raise SpecError(
            f"ScalingConfig.virtual_workers is {scaling.virtual_workers}, but the Trainer "
            "counts its epochs in batches of one size; give one number"
        )
    virtual_workers = scaling.virtual_workers or scaling.max_workers * accumulated
    return dataclasses.replace(scaling, virtual_workers=virtual_workers)


def on_host(module: torch.nn.Module | None, *others: Any) -> tuple[Any, ...]:
    """Returns the module and what refers to its parameters; copies on the host, if the module is
    elsewhere. The controller unpickles the job, too, and has no GPU."""
    if module is None or all(tensor.device.type == "cpu" for tensor in module.parameters()):
        return module, *others
    return copied_to_host(module, *others)


def copied_to_host(*parts: Any) -> tuple[Any, ...]:
    """Returns copies on the host, which refer to each other as the originals do."""
    file = io.BytesIO()
    torch.save(parts, file, pickle_module=module_pickling)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)
