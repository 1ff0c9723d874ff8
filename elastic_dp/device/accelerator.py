"""What a step needs of the device that computes it: events, memory on the host, and a
communicator.

A device is asynchronous if the host only launches its work. Whatever the device computes is read by
`DeviceTransport.read`, after an event behind it has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from elastic_dp.device.nccl_communicator import NcclCommunicator


class Communicator(Protocol):
    """Collectives between the devices of one generation. Each returns a handle whose `wait` only
    orders later work of the device behind it."""

    def connect(self, check: Callable[[], None]) -> None:
        """Blocks until all members are connected. Calls `check`, which may raise, meanwhile."""
        ...

    def abort(self) -> None:
        """Ends every operation, at any time and on any thread. May block."""
        ...

    def failure(self) -> str | None:
        """Returns what went wrong in the background, such as a connection to a peer; None if
        nothing did. Operations then may never end. Does not block."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Any: ...
    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> Any: ...
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Any: ...


class Accelerator:
    """The host's own processor, and what others are derived from. It is not asynchronous, so nobody
    calls its methods."""

    asynchronous = False

    def record(self) -> Any:
        """Returns an event behind everything that this thread has launched. Its `query` returns
        whether the device has done all of that."""
        raise NotImplementedError

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory of the host that the device can copy to and from by itself."""
        raise NotImplementedError

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launches a copy. `target` is valid once an event behind it has passed."""
        raise NotImplementedError

    def communicator(
        self, store: Any, rank: int, world_size: int, timeout_s: float
    ) -> Communicator:
        raise NotImplementedError


class CudaAccelerator(Accelerator):
    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def communicator(
        self, store: Any, rank: int, world_size: int, timeout_s: float
    ) -> Communicator:
        return NcclCommunicator(store, rank, world_size, self._device, timeout_s)


_HOST = Accelerator()
_installed: Accelerator | None = None


def install(accelerator: Accelerator | None) -> None:
    """Has this process use `accelerator` for tensors of every device; None: as usual. For tests
    without a device."""
    global _installed
    _installed = accelerator


def accelerator_of(device: torch.device) -> Accelerator:
    if _installed is not None:
        return _installed
    return CudaAccelerator(device) if device.type == "cuda" else _HOST


def has_own_communicator(gpus: float) -> bool:
    """Returns whether workers with this many GPUs each connect their devices. Workers that share
    one cannot."""
    return gpus >= 1 or _installed is not None
