"""The kind of a worker of several processes: that of their machines, and on GPUs the order in which
sums among them are added.

NCCL adds along rings that it finds by the links between the GPUs of a node. Workers whose GPUs are
linked in another way may round the mean of a gradient in another way, so they are of another kind.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from elastic_dp.device.gpu import is_gpu
from elastic_dp.errors import ClusterError
from elastic_dp.train.gang import Gang

# Elements that are added. By the size NCCL chooses how many rings share the work.
_SIZES = (1 << 12, 1 << 18, 1 << 24)


def kind_of_gang(gang: Gang, own: str, device: torch.device) -> str:
    """Returns the kind of the worker. `own` is that of this process's machine. All processes call
    it. Raises ClusterError if theirs differ."""
    kinds = dict.fromkeys(told.decode() for told in gang.exchange(own.encode()))
    if len(kinds) > 1:
        raise ClusterError(
            "the processes of a worker must have GPUs of one kind, and these differ: "
            f"{' | '.join(kinds)}. Keep such nodes out with ScalingConfig.label_selector"
        )
    if not is_gpu(device):
        return own
    digest = hashlib.blake2b(b"".join(gang.exchange(_sums(gang, device))), digest_size=4)
    return f"{own}; sums of {gang.size} processes {digest.hexdigest()}"


@torch.no_grad()
def _sums(gang: Gang, device: torch.device) -> bytes:
    """Returns a digest of this process's parts of sums over all of them, as `fully_shard` adds
    them."""
    # The former name is deprecated from torch 2.13 on, which has the new one.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    draws = torch.Generator().manual_seed(gang.number)
    digest = hashlib.blake2b(digest_size=16)
    for numel in _SIZES:
        part = torch.empty(numel // gang.size, device=device)
        given = torch.randn(len(part) * gang.size, generator=draws).to(device)
        reduce_scatter(part, given, op=dist.ReduceOp.AVG, group=gang.mesh.get_group())
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
