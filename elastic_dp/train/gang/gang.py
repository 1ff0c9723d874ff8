"""What one process knows of the worker that it is a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.distributed.local_shards import count_parts, first_holder
from elastic_dp.train.gang.gang_control import GangExchange
from elastic_dp.train.state.weight_comparison import digest_of


@dataclass(frozen=True, slots=True)
class Gang:
    """The processes of one worker. `number` is that of this process, from 0. `tensor_parallel_size`
    neighbours have the same rows and positions. `context_parallel_size` of these groups have the
    same rows."""

    number: int
    size: int
    mesh: DeviceMesh
    control: GangExchange
    helps_to_gather: bool = False  # the first process takes checkpoints
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes, in order. All of them call it."""
        return self.control.exchange(payload)

    def differing(self, tensors: Mapping[str, torch.Tensor], like: Mapping[str, Any]) -> str | None:
        """Returns the first name whose tensor has not the same bytes in all processes that have the
        same part of it, or None. All of them call it. `like`: what is divided as these tensors are,
        by name."""
        shared = {n: t for n, t in tensors.items() if self.is_shared(like[n])}
        own = {name: digest_of([tensor]) for name, tensor in shared.items()}
        told = [json.loads(given) for given in self.exchange(json.dumps(own).encode())]
        for name in dict.fromkeys(name for one in told for name in one):
            firsts = [first_holder(like.get(name), process) for process in range(self.size)]
            if any(one.get(name) != told[i].get(name) for one, i in zip(told, firsts, strict=True)):
                return name
        return None

    def is_shared(self, tensor: Any) -> bool:
        """Whether several processes have the same part of a tensor."""
        return count_parts(tensor) < self.size

    def counts(self, tensor: Any) -> bool:
        """Whether this process is the first that has its part of a tensor."""
        return first_holder(tensor, self.number) == self.number

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names of the dimensions of the mesh."""
        return self.mesh.mesh_dim_names or ()

    @property
    def compares(self) -> bool:
        """Whether processes have the same rows and positions, and so the same losses."""
        return self.tensor_parallel_size > 1

    @property
    def num_losses(self) -> int:
        """The number of losses of one virtual worker. Those of different positions count apart."""
        return self.size // self.tensor_parallel_size

    def loss_number(self, virtual_worker: int) -> int:
        """Returns the number of this process's loss of a virtual worker, among those of all."""
        return virtual_worker * self.num_losses + self.number // self.tensor_parallel_size

    def micro_batch_of(self, loss: int) -> int:
        """Returns the number of the micro-batch of a loss, among those of all."""
        return loss // self.context_parallel_size

    def micro_batch(self, virtual_worker: int) -> int:
        """Returns the number of this process's micro-batch of a virtual worker."""
        return self.micro_batch_of(self.loss_number(virtual_worker))
