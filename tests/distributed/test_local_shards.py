"""Which part of a tensor a process of a worker holds: as torch divides it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_dp.distributed.local_shards import local_of, part_of

PROCESSES = 8


def model():
    """With dimensions that are divided evenly, unevenly, and among some processes only."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 6), nn.LayerNorm(16))


@pytest.mark.parametrize("process", range(PROCESSES))
@pytest.mark.parametrize("dim", [0, -1])
def test_parts_are_those_of_torch(process, dim):
    dist.init_process_group("fake", store=FakeStore(), rank=process, world_size=PROCESSES)
    try:
        mesh = init_device_mesh("cpu", (PROCESSES,))
        placed = None if dim == 0 else (lambda p: Shard(p.dim() - 1 if p.shape[-1] == 16 else 0))
        sharded = fully_shard(model(), mesh=mesh, shard_placement_fn=placed)
        whole = dict(model().named_parameters())
        for name, p in sharded.named_parameters():
            assert torch.equal(part_of(whole[name], p, process), local_of(p)), name
            parts = [part_of(whole[name], p, other).numel() for other in range(PROCESSES)]
            assert sum(parts) == whole[name].numel(), name
    finally:
        dist.destroy_process_group()
