"""Two hosts on this machine, joined by a link of any speed and latency.

    with hosts(rate_bits_s=1e9, delay_s=0.005) as (here, there): ...

A host is a network namespace with one network device; the two devices are a pair of TUN devices,
and a process for each direction carries the packets from one to the other. It sends a packet on
when those before it have passed at the link's rate, and delivers it one way's `delay_s` later.
Nothing is dropped, so what is measured is the rate and the latency, and not the losses of a queue.
(`tc` limits rates only where the kernel has `netem` for delays, which many do not.)

Packets are as large as a TUN device allows, so that they cost little of the cores that they share
with what is measured: up to 1 Gb/s. Needs root and Debian's iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEVICE = "far0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_MTU = 65_000
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEVICE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF, IFF_TUN | IFF_NO_PI
_LATE_S = 0.0005  # packets due within this time are delivered: `select` is not finer


@dataclass(frozen=True)
class Host:
    address: str
    holder: int  # id of a process in its network

    def enter(self) -> None:
        """This thread, and what it starts, is on this host from now on."""
        with open(f"/proc/{self.holder}/ns/net", "rb") as network:
            _checked("setns", network.fileno(), _NEW_NETWORK)


@contextlib.contextmanager
def hosts(*, rate_bits_s: float | None, delay_s: float) -> Iterator[tuple[Host, Host]]:
    """`rate_bits_s`: None is as fast as packets can be carried. `delay_s`: one way."""
    with contextlib.ExitStack() as stack:
        found, devices = [], []
        for address in ADDRESSES:
            mine, theirs = socket.socketpair()
            command = [sys.executable, "-m", "benchmarks.slow_link", str(theirs.fileno()), address]
            with mine:
                with theirs:
                    holder = subprocess.Popen(command, pass_fds=[theirs.fileno()])
                stack.callback(_end, holder)
                _, (device,), *_ = socket.recv_fds(mine, 16, 1)
            stack.callback(os.close, device)
            found.append(Host(address, holder.pid))
            devices.append(device)
        for source, target in (devices, devices[::-1]):
            command = [str(x) for x in (source, target, rate_bits_s or 0, delay_s)]
            carrier = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.slow_link", *command], pass_fds=devices
            )
            stack.callback(_end, carrier)
        yield found[0], found[1]


def bytes_sent() -> int:
    """Return what the device of the host has sent that this thread is on."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])
    raise RuntimeError(f"this network has no device {DEVICE}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def hold(channel: int, address: str) -> None:
    """Makes a host, hands its device over, and stays."""
    _checked("unshare", _NEW_NETWORK)
    device = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER)
    fcntl.ioctl(device, _SET_DEVICE, request)
    for command in (
        "ip link set lo up",
        f"ip address add {address}/24 dev {DEVICE}",
        f"ip link set {DEVICE} up mtu {_MTU} txqueuelen 10000",
    ):
        subprocess.run(command.split(), check=True)
    with socket.socket(fileno=channel) as there:
        socket.send_fds(there, [b"device"], [device])
    signal.pause()


def carry(source: int, target: int, rate_bits_s: float, delay_s: float) -> None:
    os.set_blocking(source, False)
    waiting: deque[tuple[float, bytes]] = deque()  # (due at, packet)
    passed_at = 0.0  # when the last packet has passed at the link's rate
    while True:
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now + _LATE_S:
            os.write(target, waiting.popleft()[1])
        wait = None if not waiting else max(0.0, waiting[0][0] - _LATE_S - now)
        select.select([source], [], [], wait)
        with contextlib.suppress(BlockingIOError):
            packet = os.read(source, 1 << 17)
            passed_at = max(passed_at, time.perf_counter())
            if rate_bits_s:
                passed_at += 8 * len(packet) / rate_bits_s
            waiting.append((passed_at + delay_s, packet))


def _checked(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        hold(int(sys.argv[1]), sys.argv[2])
    else:
        one, other, *rest = sys.argv[1:]
        carry(int(one), int(other), float(rest[0]), float(rest[1]))
