"""What `ctx.steps` takes where a worker has several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic_dp.distributed.local_shards import is_sharded, local_of
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.train.gang.gang import Gang


def check_gang(gang: Gang | None, given: Any) -> None:
    """Checks the `StepsArguments`. Raises ModelError and SpecError.

    All processes of a worker call it: parts of the model are gathered, one after another.
    """
    model: nn.Module = given.model
    if gang is None:
        _refuse_shards(model)
        return
    _check_fully_sharded(gang, model)
    if given.precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss, which does not work with processes_per_worker; '
            'use "bf16"'
        )
    if given.noise_scale_every is not None:
        raise SpecError(
            "noise_scale_every needs the whole gradient, of which each process has a part with "
            "processes_per_worker: leave out one of the two"
        )


def _check_fully_sharded(gang: Gang, model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if getattr(p, "device_mesh", None) != gang.mesh:
            raise ModelError(
                f"model.{name} is not sharded over ctx.mesh: call fully_shard(model, "
                "mesh=ctx.mesh) for the whole model, before the optimizer is made"
            )
        if local_of(p).device.type != gang.mesh.device_type:
            raise ModelError(
                f"the local part of model.{name} is on {local_of(p).device}, and ctx.mesh is of "
                f"{gang.mesh.device_type} devices: leave out CPUOffloadPolicy, which does not work "
                "with processes_per_worker"
            )
    from torch.distributed.fsdp import FSDPModule  # takes a second, and few jobs need it

    gathered = _gathered_by_fully_shard(model) if isinstance(model, FSDPModule) else set()
    for name, p in model.named_parameters():
        if p not in gathered:
            raise ModelError(
                f"model.{name} is a DTensor over ctx.mesh, but not one of fully_shard, as with "
                "ignored_params or parallelize_module: its gradient would not be averaged among "
                "the processes of a worker, which have different rows. Let fully_shard have it"
            )


def _refuse_shards(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if is_sharded(p):
            raise ModelError(
                f"model.{name} is a DTensor, of which other processes hold a part: set "
                "ScalingConfig.processes_per_worker, and shard the model over ctx.mesh"
            )


def _gathered_by_fully_shard(model: nn.Module) -> set[torch.nn.Parameter]:
    """Returns the parameters in whose place `fully_shard` puts whole ones for a forward pass."""
    from torch.distributed.fsdp import FSDPModule

    before = dict(model.named_parameters())
    gathered = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            now = dict(model.named_parameters())
            gathered |= {p for name, p in before.items() if now[name] is not p}
            module.reshard()
    return gathered
