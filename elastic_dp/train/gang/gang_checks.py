"""What `ctx.steps` takes where a worker has several processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from elastic_dp.config.scaling_config import TENSOR_PARALLEL
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
    if gang.compares:
        _check_tensor_parallel(gang, model)
    if gang.num_losses > 1 or not gang.compares:
        _check_fully_sharded(gang, model)
    if gang.compares:
        _check_same_values(gang, model)
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
    dimension, mesh = gang.dimensions[0], _name_of(gang, 0)
    for name, p in model.named_parameters():
        if dimension not in (_dimensions_of(p, gang) or ()):
            raise ModelError(
                f"model.{name} is not sharded over {mesh}: call fully_shard(model, mesh={mesh}) "
                "for the whole model, before the optimizer is made"
            )
        if local_of(p).device.type != gang.mesh.device_type:
            raise ModelError(
                f"the local part of model.{name} is on {local_of(p).device}, and ctx.mesh is of "
                f"{gang.mesh.device_type} devices: leave out CPUOffloadPolicy, which does not work "
                "with processes_per_worker"
            )
    from torch.distributed.fsdp import FSDPModule  # takes a second, and few jobs need it

    if not isinstance(model, FSDPModule):
        raise ModelError(
            "the model is not one that fully_shard has returned. Processes of a worker have rows "
            "or positions of their own, so the gradients must be averaged among them, as "
            "fully_shard does; for tensor parallelism alone, in which all have the same, set "
            "ScalingConfig.tensor_parallel_size to processes_per_worker"
        )
    gathered = _gathered_by_fully_shard(model)
    for name, p in model.named_parameters():
        if p not in gathered:
            raise ModelError(
                f"model.{name} is a DTensor over {mesh}, but not one of fully_shard, as with "
                "ignored_params or tensor parallelism: its gradient would not be averaged among "
                "the processes of a worker, which have different rows or positions. Let "
                "fully_shard have it"
            )


def _check_tensor_parallel(gang: Gang, model: nn.Module) -> None:
    mesh = _name_of(gang, -1)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # it takes a second to import
    if (
        gang.num_losses == 1
        and fsdp is not None
        and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())
    ):
        raise ModelError(
            "the model is one of fully_shard, which averages gradients among processes with "
            "different rows, and with this tensor_parallel_size all have the same rows: make it "
            "less than processes_per_worker, or leave out fully_shard"
        )
    for name, p in model.named_parameters():
        if _dimensions_of(p, gang) is None:
            raise ModelError(
                f"model.{name} is a DTensor, but neither sharded nor replicated over {mesh}: "
                f"call parallelize_module(model, {mesh}, plan)"
            )
    if not any(TENSOR_PARALLEL in (_dimensions_of(p, gang) or ()) for p in model.parameters()):
        raise ModelError(
            f"no parameter of the model is sharded over {mesh}, so the processes of a worker with "
            f"the same rows would compute the same: call parallelize_module(model, {mesh}, plan) "
            "before the optimizer is made"
        )
    for name, buffer in model.named_buffers():
        if is_sharded(buffer):
            raise ModelError(
                f"the buffer model.{name} is a DTensor, which does not work: register a plain one"
            )


def _check_same_values(gang: Gang, model: nn.Module) -> None:
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    differing = gang.differing(values, values)
    if differing is not None:
        raise ModelError(
            f"model.{differing} is not sharded by tensor parallelism, and the processes of a "
            "worker begin with different values: make the model with the same random numbers in "
            "all of them"
        )


def _dimensions_of(p: Any, gang: Gang) -> set[str] | None:
    """Returns the dimensions of ctx.mesh over which a parameter is sharded. Returns None if it is
    divided in a way in which neither `fully_shard` nor `parallelize_module` divides one."""
    if not is_sharded(p):
        return set()
    from torch.distributed.tensor import Shard  # takes a second, and few jobs have one

    mesh = p.device_mesh
    if mesh not in [gang.mesh, *(gang.mesh[name] for name in gang.dimensions)]:
        return None
    placed = dict(zip(mesh.mesh_dim_names, p.placements, strict=True))
    if any(placement.is_partial() for placement in placed.values()):
        return None
    sharded = {name for name, placement in placed.items() if not placement.is_replicate()}
    # What `fully_shard` divides after tensor parallelism is not a plain `Shard`.
    plain = TENSOR_PARALLEL not in sharded or type(placed[TENSOR_PARALLEL]) is Shard
    return sharded if plain else None


def _name_of(gang: Gang, dimension: int) -> str:
    """Returns how users write this dimension of the mesh."""
    names = gang.dimensions
    return "ctx.mesh" if len(names) == 1 else f'ctx.mesh["{names[dimension]}"]'


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
