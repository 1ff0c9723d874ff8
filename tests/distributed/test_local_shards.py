"""Which part of a tensor a process of a worker holds, and which others hold it: as torch divides
it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_dp.distributed.local_shards import first_holder, local_of, part_of

PLAN = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": SequenceParallel()}
PROCESSES = 8


def model() -> nn.Sequential:
    """Two layers for tensor parallelism, a normalization on a part of the positions, and a layer
    that is not divided among the processes with the same rows."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 20), nn.Linear(20, 6), nn.LayerNorm(6), nn.Linear(6, 5))


@pytest.fixture(params=range(PROCESSES))
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=PROCESSES)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


NAMES = {name for name, _ in model().named_parameters()}


def check(sharded: nn.Module, process: int, shared: set[str]) -> None:
    """Each two neighbours have the same part of the parameters named in `shared`."""
    whole = dict(model().named_parameters())
    for name, p in sharded.named_parameters():
        assert torch.equal(part_of(whole[name], p, process), local_of(p)), name
        firsts = [q - q % 2 if name in shared else q for q in range(PROCESSES)]
        assert [first_holder(p, q) for q in range(PROCESSES)] == firsts, name
        parts = [part_of(whole[name], p, q).numel() for q in set(firsts)]
        assert sum(parts) == whole[name].numel(), name


def test_parts_of_two_dimensions_are_those_of_torch(process: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    sharded = parallelize_module(model(), mesh["tp"], PLAN, src_data_rank=None)
    for layer in sharded:
        fully_shard(layer, mesh=mesh["dp"])
    check(sharded, process, NAMES - {"0.weight", "0.bias", "1.weight"})


def test_parts_of_one_dimension_are_those_of_torch(process: int) -> None:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    check(fully_shard(model(), mesh=mesh), process, set())
    divided = parallelize_module(model(), mesh, PLAN, src_data_rank=None)
    whole = dict(model().named_parameters())
    for name, p in divided.named_parameters():
        assert torch.equal(part_of(whole[name], p, process), local_of(p)), name
