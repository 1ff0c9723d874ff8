"""Gloo's listening socket, closed to connections while no group forms.

Gloo itself accepts a connection from any process at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class GlooDevice:
    """A listening socket and an event loop, for all generations of this process until forming one
    fails or is aborted.

    Gloo keeps every connection to its port, and ends the process when no file descriptor is left.
    It takes a connection that names a pair for the peer of this pair, now or later. If the
    operation in its first bytes names no buffer, Gloo waits for the buffer and never reads that the
    connection is closed (measured). So the operating system drops what arrives at the port while no
    group forms.
    """

    def __init__(self, address: str | None) -> None:
        before = _listeners()
        if address is None:
            self.device = dist.ProcessGroupGloo.create_default_device()
        else:
            self.device = dist.ProcessGroupGloo.create_device(hostname=address)
        self.address = address
        found = [fd for fd in _listeners() - before if address in (None, _host_of(fd))]
        self._port = found[0] if len(found) == 1 else None  # an ambiguous one stays open
        self.spent = False  # strangers may hold connections that its next pairs would take
        self._forming = 0
        self._lock = threading.Lock()
        self._shut(True)

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        """A context that yields the device, whose port accepts connections meanwhile."""
        with self._lock:
            self._forming += 1
            self._shut(False)
        try:
            yield self.device
        except Exception:
            self.spent = True
            raise
        finally:
            with self._lock:
                self._forming -= 1
                self._shut(not self._forming)

    def _shut(self, shut: bool) -> None:
        """Attaches or detaches a packet filter that drops everything. Linux only."""
        if self._port is None:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._port)) as port:
            port.setsockopt(socket.SOL_SOCKET, *((_ATTACH, _DROP_ALL) if shut else (_DETACH, 0)))


_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_RETURN_0 = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_RETURN_0))  # struct sock_fprog


def _listeners() -> set[int]:
    """Returns the descriptors of this process's listening sockets. Linux only."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(fd).st_mode) and _listens(fd):
                    found.add(fd)
    return found


def _listens(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _host_of(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as one:
        return str(one.getsockname()[0])
