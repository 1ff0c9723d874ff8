"""Copies from a device into host memory that is used again and again, beside the work of the
device.

- Nobody waits while a copy is launched: it runs on a stream of its own, behind what the current
  stream has been given so far. The current stream goes on behind the copy, so what is launched
  there later may write the sources. Whoever reads the memory waits for it first.
- The memory is ordinary memory, registered with the driver by `register`, which may take seconds
  and is for a background thread. Torch's pinned memory would be rounded up to a power of two, and
  allocated while the training waits. Until it is registered, the same copies are slower, and
  whoever launches them waits: CUDA returns when a copy to ordinary memory has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts
_SUCCESS = 0


class HostCopies:
    """Into one piece of host memory. `copy` is for one thread; `wait` for any."""

    def __init__(self) -> None:
        self.copied_s = 0.0  # that the last copy took on the device, once it was waited for
        self._stream: torch.cuda.Stream | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._registered: torch.Tensor | None = None

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

    def register(self, memory: torch.Tensor) -> None:
        """From now on copies into this memory need no staging. Where the driver refuses, they go on
        as before."""
        code = torch.cuda.cudart().cudaHostRegister(
            memory.data_ptr(), memory.numel() * memory.element_size(), _PORTABLE
        )
        self._registered = memory if int(code) == _SUCCESS else None

    def unregister(self) -> None:
        """Before the memory is freed."""
        if self._registered is not None:
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._registered.data_ptr())
            self._registered = None
