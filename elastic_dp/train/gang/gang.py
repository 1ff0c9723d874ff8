"""What one process knows of the worker that it is a part of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.train.gang.gang_control import GangExchange
from elastic_dp.train.state.weight_comparison import digest_of


@dataclass(frozen=True, slots=True)
class Gang:
    """The processes of one worker. `number` is that of this process, from 0. `tensor_parallel_size`
    neighbours have the same rows."""

    number: int
    size: int
    mesh: DeviceMesh
    control: GangExchange
    helps_to_gather: bool = False  # the first process takes checkpoints
    tensor_parallel_size: int = 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes, in order. All of them call it."""
        return self.control.exchange(payload)

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Returns the first name whose tensor has not the same bytes in all processes, or None. All
        of them call it."""
        own = {name: digest_of([tensor]) for name, tensor in tensors.items()}
        told = [json.loads(given) for given in self.exchange(json.dumps(own).encode())]
        names = [name for one in told for name in one]
        return next((n for n in names if len({one.get(n) for one in told}) > 1), None)

    @property
    def shares_rows(self) -> bool:
        """Whether all processes have the same rows."""
        return self.tensor_parallel_size > 1

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches of one virtual worker."""
        return self.size // self.tensor_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of these this process runs."""
        return self.number // self.tensor_parallel_size

    def key(self, virtual_worker: int) -> int:
        """Returns the number of this process's micro-batch of a virtual worker, among those of
        all."""
        return virtual_worker * self.data_parallel_size + self.data_parallel_rank
