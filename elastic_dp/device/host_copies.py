"""Copies from a device into host memory that is used again and again, beside the work of the
device.

- Nobody waits while a copy is launched: it runs on a stream of its own, behind what the current
  stream has been given so far. The current stream goes on behind the copy, so what is launched
  there later may write the sources. Whoever reads the memory waits for it first.
- The memory is ordinary memory, registered with the driver by `register` in pieces, which is for a
  background thread: a driver that registers 20 GB at once keeps kernels waiting for a second. No
  copy goes to two pieces. Torch's pinned memory would be rounded up to a power of two, and
  allocated while the training waits. Until it is registered, the same copies are slower, and
  whoever launches them waits: CUDA returns when a copy to ordinary memory has ended.
- The system cannot take registered memory back, so at most half of what the container has is
  registered.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
_SUCCESS = 0


class HostCopies:
    """Into host memory. `copy` is for one thread; `wait` for any."""

    def __init__(self) -> None:
        self.copied_s = 0.0  # that the last copy took on the device, once it was waited for
        self._stream: torch.cuda.Stream | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._registered: list[torch.Tensor] = []

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Launch the copies of the sources, wherever they are, into the targets on the host."""
        self._events, self.copied_s = None, 0.0
        if not sources:
            return
        device = next((t.device for t in sources if t.device.type == "cuda"), None)
        if device is None:
            torch._foreach_copy_(list(targets), list(sources))
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        begun, done = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            done.record(self._stream)
        current.wait_event(done)  # so the sources' memory is neither written nor used again
        self._events = begun, done

    def wait(self) -> None:
        """Wait until the last copy that was launched has arrived. Raises what the device raises."""
        if self._events is not None:
            begun, done = self._events
            done.synchronize()
            self.copied_s = begun.elapsed_time(done) / 1e3

    @property
    def registered_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._registered)

    def register(self, piece: torch.Tensor) -> None:
        """From now on copies into this piece of memory need no staging. Where the driver refuses,
        or half of the container's memory is registered, they go on as before."""
        if self.registered_bytes + piece.nbytes > host_memory() // 2:
            return
        cudart = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(piece.data_ptr(), piece.nbytes, _PORTABLE)) == _SUCCESS:
            self._registered.append(piece)

    def unregister(self) -> None:
        """Before the memory is freed."""
        if self._registered:
            self.wait()
        for piece in self._registered:
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        self._registered = []


def host_memory(root: str = "/sys/fs/cgroup") -> int:
    """Returns the bytes of memory that the container may use, or that the host has."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2, 1
        with contextlib.suppress(OSError, ValueError):
            return min(host, int(Path(root, name).read_text(encoding="ascii")))
    return host
