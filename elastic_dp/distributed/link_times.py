"""For how long what this process sends is under way, as the kernel knows it of TCP connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping

_TCP_INFO, _SIZE = 11, 192
_TIMES, _TIMES_AT = struct.Struct("QQ"), 168  # tcpi_busy_time, tcpi_rwnd_limited: microseconds

# The default of `socket.setdefaulttimeout` would make others' sockets non-blocking.
_AS_IT_IS = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)

Connections = Mapping[tuple[int, int], bool]  # by descriptor and inode: it leaves the machine


def socket_of(descriptor: int) -> socket.socket:
    """Return an object for this socket, to look at it. The socket remains as it is."""
    return socket.socket(type=_AS_IT_IS, fileno=descriptor)


def connections() -> dict[tuple[int, int], bool]:
    """Return the TCP connections of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            one = socket_of(int(name))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    key = int(name), os.fstat(int(name)).st_ino
                    found[key] = one.getpeername()[0] != one.getsockname()[0]
            finally:
                one.detach()
    return found


def sending_s(links: Connections) -> float:
    """Return the seconds in which something that was sent had not arrived, without waits for the
    receiver, of the connection with the least. If they are many, this process' own link is slow.
    Connections that leave the machine count, if there are any."""
    times = []
    for number, _ in [key for key, leaves in links.items() if leaves] or links:
        with contextlib.suppress(OSError, struct.error):
            one = socket_of(number)
            try:
                info = one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _SIZE)
            finally:
                one.detach()
            busy, waits = _TIMES.unpack_from(info, _TIMES_AT)
            times.append(busy - waits)
    return min(times, default=0) / 1e6
