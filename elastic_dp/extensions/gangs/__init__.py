"""Workers of several processes, over which `fully_shard` divides the model."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from elastic_dp.distributed.local_shards import local_of
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.extensions.gangs.gang_kind import kind_of_gang
from elastic_dp.extensions.gangs.gang_step import GangReduction, GradientOrders, refuses_none
from elastic_dp.train.gang import Gang
from elastic_dp.train.step.leaf_runner import OnePass
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    """Checks the arguments. Raises ModelError and SpecError.

    All processes of a worker call it: parts of the model are gathered, one after another.
    """
    gang = build.gang
    assert gang is not None
    orders = GradientOrders(gang)
    check_gang(gang, build.given.model, build.given.precision)
    build.note_gradient = orders.note
    build.kind_of = lambda own: kind_of_gang(gang, own, build.device)
    build.new_exchange = partial(GangReduction, gang)
    build.new_leaf = lambda: OnePass(build.micro_batches, build.rows, refuses_none(gang))
    build.new_participants.append(lambda: orders)


def check_gang(gang: Gang, model: nn.Module, precision: str | None) -> None:
    _check_fully_sharded(gang, model)
    if precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss, which does not work with processes_per_worker; '
            'use "bf16"'
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
