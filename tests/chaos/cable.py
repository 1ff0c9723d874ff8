"""A long or bad cable: `python -m tests.chaos.cable TAP TAP DELAY_S LOSS` hands frames over between
two taps.

Each frame comes out at the other end `DELAY_S` later, in order, but for a share of `LOSS` of them.
The taps are made here, and "there" is printed when they are; they are gone with this process, which
ends with its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LONGEST_FRAME = 65_536


def tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def carry(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    under_way: deque[tuple[float, int, bytes]] = deque()
    ready: list[int] = []
    while 0 not in ready:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([0, *ends], [], [], wait_s)
        for end in set(ready).intersection(ends):
            with contextlib.suppress(OSError):  # an end that is not up yet
                frame = os.read(end, _LONGEST_FRAME)
                if random.random() >= loss:
                    other = ends[1] if end == ends[0] else ends[0]
                    under_way.append((time.monotonic() + delay_s, other, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                os.write(end, frame)


if __name__ == "__main__":
    ends = tap(sys.argv[1]), tap(sys.argv[2])
    print("there", flush=True)
    carry(ends, float(sys.argv[3]), float(sys.argv[4]))
