"""Host memory for copies of a state, which is used again and again.

If a device holds some of the state, the memory is registered with it in the background
(device/host_copies.py).
"""

from __future__ import annotations

import threading

import torch

from elastic_dp.checkpoint.layout import ROOM_ALIGNED_TO
from elastic_dp.device.host_copies import HostCopies


class SnapshotMemory:
    """One thread makes room and launches `copies`; another one may call `register`."""

    def __init__(self, copies: HostCopies | None = None) -> None:
        self.copies = HostCopies() if copies is None else copies
        self.content = torch.empty(0, dtype=torch.uint8)
        self._on_device = self._registered = False  # of the present memory
        self._changing = threading.Lock()  # held while the memory is replaced or registered

    def make_room(self, nbytes: int, *, on_device: bool) -> None:
        """Replaces the memory unless it is large enough. `on_device`: a device holds some of what
        is copied."""
        if nbytes > self.content.numel():
            with self._changing:
                self.copies.unregister()
                self.content = torch.empty(0, dtype=torch.uint8)  # not two of them at once
                self.content = _aligned(nbytes)
                self._registered = False
        self._on_device = on_device

    def register(self) -> None:
        """Registers the memory with the device, which makes later copies of its state faster."""
        with self._changing:
            if self._on_device and not self._registered:
                self._registered = True
                self.copies.register(self.content)

    def close(self) -> None:
        """Unregisters the memory. Nothing may be copied or read afterwards."""
        with self._changing:
            self.copies.unregister()


def _aligned(nbytes: int) -> torch.Tensor:
    """Returns new memory that begins at a page."""
    room = torch.empty(nbytes + ROOM_ALIGNED_TO, dtype=torch.uint8)
    first = -room.data_ptr() % ROOM_ALIGNED_TO
    return room[first : first + nbytes]
