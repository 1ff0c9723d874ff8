"""One communicator of NCCL between the GPUs of a generation.

- Connecting ends by itself after `timeout_s`. Meanwhile torch holds a lock that an abort needs, so
  whoever aborts waits that long.
- It happens in first, tiny collectives: `eager_connect_single_device` fails where connecting does
  not block. There is one of each kind, since each connects peers in its own way when it is first
  launched. So no launch in a step waits for a peer, who may be gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d as c10d

# A collective may wait for a peer that is in a long loop body, so only aborts end it.
_OPERATION_TIMEOUT = timedelta(hours=24)
_CONNECTING_LIMIT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"  # seconds; read when the first one connects
_POLL_S = 0.005


def options_of_mesh(timeout: timedelta) -> Any:
    """Returns the options of NCCL for a group that connects when it is made: torch's way to do that
    fails where connecting does not block, as the environment may ask for."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 1
    return options


class NcclCommunicator:
    """Implements `Communicator`."""

    def __init__(
        self, store: Any, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        os.environ.setdefault(_CONNECTING_LIMIT, str(max(1, round(timeout_s))))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _OPERATION_TIMEOUT
        options.config.blocking = 0
        # Torch indexes it when the group is split; it is empty for a group without a default one.
        options.global_ranks_in_group = list(range(world_size))
        self._device, self._world_size = device, world_size
        torch.cuda.set_device(device)  # of this thread
        self._backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)

    def connect(self, check: Callable[[], None]) -> None:
        torch.cuda.set_device(self._device)
        # On a stream of its own, since the training goes on meanwhile.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            one, sizes = torch.zeros(1, device=self._device), [1] * self._world_size
            given, taken = (torch.zeros(self._world_size, device=self._device) for _ in range(2))
            self.all_to_all(taken, given, sizes, sizes).wait()
            self.all_gather(taken, one).wait()
            self.all_reduce(one).wait()
            event = torch.cuda.Event()
            event.record()
            while not event.query():
                check()
                time.sleep(_POLL_S)

    def abort(self) -> None:
        self._backend.abort()

    def failure(self) -> str | None:
        # Torch's watchdog thread asks NCCL for it, whatever it is told to do then.
        error = self._backend.get_error()
        return None if error == ErrorType.SUCCESS else f"NCCL reports {error.name}"

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._backend.allreduce([tensor], c10d.AllreduceOptions())

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Any:
        return self._backend.alltoall_base(
            output, input, list(output_sizes), list(input_sizes), c10d.AllToAllOptions()
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        return self._backend._allgather_base(output, input, c10d.AllgatherOptions())
