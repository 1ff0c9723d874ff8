"""The part of a tensor that this process holds.

A parameter may be a `DTensor`, as torch's `fully_shard` makes it. Its other parts are then with
other processes of this worker. Sums, copies and digests here are of the local parts: an operation
on the whole tensor would be a collective that all of those processes must call.

The mesh of a tensor has all processes of the worker, and is of one dimension.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist


def is_sharded(tensor: Any) -> bool:
    """Returns whether this is a `DTensor`, without an import of what defines it."""
    return hasattr(tensor, "_local_tensor")


def local_of(tensor: Any) -> Any:
    """Returns the local part of a `DTensor`, and everything else as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_of(tensor: Any) -> Any:
    """Returns everything but a `DTensor` as it is. The processes that hold one all call this: the
    first of them gets the whole, on the host, and the others None. The parts travel through the
    host. Otherwise the whole model would come together in the memory of one device, for which it is
    too large."""
    if not is_sharded(tensor):
        return tensor
    mine = tensor._local_tensor.detach().cpu().contiguous()
    if dist.get_rank() > 0:
        if mine.numel():
            dist.send(mine, 0)
        return None
    if mine.shape == tensor.shape:
        return mine
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for process in range(dist.get_world_size()):
        part, arrived = _view_of(whole, tensor, process), mine
        if process > 0 and part.numel():
            arrived = torch.empty_like(part, memory_format=torch.contiguous_format)
            dist.recv(arrived, process)
        if part.numel():
            part.copy_(arrived)
    return whole


def gathered(tensor: Any) -> Any:
    """Returns the whole of a `DTensor` in each of the processes that hold it, which all call this,
    and everything else as it is."""
    return tensor.full_tensor() if hasattr(tensor, "_local_tensor") else tensor


def reshard(model: torch.nn.Module) -> None:
    """Puts the local parts of parameters back into a model that has run without a backward pass:
    `fully_shard` leaves the whole of some of them in their place."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def part_of(whole: torch.Tensor, like: torch.Tensor, process: int) -> torch.Tensor:
    """Returns the part of `whole` that a process would hold, if it were sharded as `like` is. It is
    contiguous, as the local part of a tensor is."""
    return _view_of(whole, like, process).contiguous() if is_sharded(like) else whole


def _view_of(whole: torch.Tensor, like: Any, process: int) -> torch.Tensor:
    (placement,) = like.placements
    parts = torch.chunk(whole, like.device_mesh.size(), placement.dim)
    return parts[process] if process < len(parts) else whole.narrow(placement.dim, 0, 0)


def placed_like(gradient: Any, parameter: Any) -> Any:
    """Returns a gradient that is sharded as its parameter is. torch leaves that of a replicated
    parameter with parts of a sequence as terms of a sum, which all processes add up here."""
    if not is_sharded(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def sharded_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `local` as the local part of a tensor that is sharded as `like` is, or as it is.
    Torch moves it to the device of the mesh, if it is on the host."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor  # takes a second, and few jobs have one

    given: Any = like
    return DTensor.from_local(
        local,
        given.device_mesh,
        given.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
