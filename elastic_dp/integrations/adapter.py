"""What the adapters share: options of `ElasticTrainer`, refusals by name, copies on the host."""

from __future__ import annotations

import dataclasses
import inspect
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_dp import ElasticTrainer, ScalingConfig, module_pickling
from elastic_dp.errors import SpecError
from elastic_dp.wording import did_you_mean

RESUMES = "a run that is started again under the same name goes on from its newest checkpoint"


def names(text: str) -> list[str]:
    return text.split()


def check_overrides(owner: Any, base: type, names: Iterable[str], instead: str) -> None:
    """Raises SpecError for a method of `base` that the class of `owner` overrides."""
    for name in names:
        if hasattr(base, name) and getattr(type(owner), name) is not getattr(base, name):
            raise SpecError(
                f"{type(owner).__name__} overrides {name}, which is not called: a step may be "
                f"undone and done again. {instead}"
            )


def scaling_of(
    adapter: type, options: Mapping[str, Any], *, refused: Mapping[str, str], accumulated: int
) -> ScalingConfig:
    """Returns how the run may scale; accumulated batches become virtual workers.

    Raises SpecError for an option in `refused`, which says what to do instead, for one that neither
    `ElasticTrainer` nor the adapter has, and for values that the adapter cannot follow.
    """
    own, inherited = (inspect.signature(one).parameters for one in (adapter, ElasticTrainer))
    known = sorted({*own, *inherited} - {"options", *refused})
    for name in options:
        if name in refused:
            raise SpecError(
                f"{name} is given, which {adapter.__name__} does not take: {refused[name]}"
            )
        if name not in known:
            near = did_you_mean(name, [*known, *refused])
            raise SpecError(f"{adapter.__name__} has no option {name!r}{near}")
    scaling = options.get("scaling") or ScalingConfig()
    if not isinstance(scaling, ScalingConfig):
        raise SpecError(f"scaling is a {type(scaling).__name__}, must be a ScalingConfig")
    if scaling.processes_per_worker > 1 or scaling.grows:
        raise SpecError(
            f"scaling is {scaling}, but {adapter.__name__} works with processes_per_worker=1, as "
            "it shards no model, and with one number of virtual_workers, as epochs are counted in "
            "batches of one size. For others write a train function that loops over ctx.steps"
        )
    virtual_workers = scaling.virtual_workers or scaling.max_workers * accumulated
    return dataclasses.replace(scaling, virtual_workers=virtual_workers)


def on_host(module: torch.nn.Module | None) -> torch.nn.Module | None:
    """Returns the module, or a copy on the host if it is elsewhere. The controller unpickles the
    job, too, and has no GPU."""
    if module is None or all(tensor.device.type == "cpu" for tensor in module.parameters()):
        return module
    file = io.BytesIO()
    torch.save(module, file, pickle_module=module_pickling)
    file.seek(0)
    copied: torch.nn.Module = torch.load(file, map_location="cpu", weights_only=False)
    return copied
