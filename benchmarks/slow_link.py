"""Two hosts on this machine, joined by a link of any speed and latency.

    with hosts(rate_bits_s=1e9, delay_s=0.005) as (here, there): ...

A host is a network namespace with one network device. Without a limit the two devices are a pair of
the kernel's own (veth). Else they are TUN devices, and a process for each direction carries the
packets from one to the other. It sends a packet on when those before it have passed at the link's
rate, and delivers it one way's `delay_s` later. Nothing is dropped, so what is measured is the rate
and the latency, and not the losses of a queue. (`tc` limits rates only where the kernel has `netem`
for delays, which many do not.)

Packets are as large as a TUN device allows, so that they cost little of the cores that they share
with what is measured: up to 1 Gb/s. `throughput` says what a link carries. Needs root and Debian's
iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

DEVICE = "far0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_MTU = 65_000
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEVICE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # TUNSETIFF, IFF_TUN | IFF_NO_PI
_LATE_S = 0.0005  # packets due within this time are delivered: `select` is not finer
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    address: str
    holder: int  # id of a process in its network

    def enter(self) -> None:
        """This thread, and what it starts, is on this host from now on."""
        with open(f"/proc/{self.holder}/ns/net", "rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")

    def run(self, function: Callable[[], T]) -> T:
        """Call it on this host."""
        with ThreadPoolExecutor(1, initializer=self.enter) as thread:
            return thread.submit(function).result()


@contextlib.contextmanager
def hosts(*, rate_bits_s: float | None, delay_s: float) -> Iterator[tuple[Host, Host]]:
    """`rate_bits_s`: None is as fast as packets can be carried. `delay_s`: one way."""
    with contextlib.ExitStack() as stack:
        here, there = (stack.enter_context(_host(address)) for address in ADDRESSES)
        if rate_bits_s is None and not delay_s:
            places = f"netns {here.holder} type veth peer name {DEVICE} netns {there.holder}"
            _command(f"ip link add {DEVICE} {places}")
        else:
            stack.enter_context(_carriers(here, there, rate_bits_s or 0.0, delay_s))
        for host in (here, there):
            host.run(partial(_set_up, host.address))
        yield here, there


def throughput(here: Host, there: Host, seconds: float = 2.0) -> float:
    """Return how many bits one connection carries in a second."""
    server = here.run(lambda: socket.create_server((here.address, 0)))

    def send() -> None:
        with socket.create_connection(server.getsockname()) as connection:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                connection.sendall(bytes(1 << 20))

    with server, ThreadPoolExecutor(1, initializer=there.enter) as sender:
        sent = sender.submit(send)
        with server.accept()[0] as connection:
            received, memory, begun = 0, bytearray(1 << 20), time.perf_counter()
            while read := connection.recv_into(memory):
                received += read
            took = time.perf_counter() - begun
        sent.result()
    return 8 * received / took


def bytes_sent() -> int:
    """Return what the device of the host has sent that this thread is on."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])
    raise RuntimeError(f"this network has no device {DEVICE}")


@contextlib.contextmanager
def _host(address: str) -> Iterator[Host]:
    command = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    with _started(subprocess.Popen(command, stdout=subprocess.PIPE)) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError("no network namespace can be made: run it as root")
        yield Host(address, holder.pid)


@contextlib.contextmanager
def _carriers(here: Host, there: Host, rate_bits_s: float, delay_s: float) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        devices = [host.run(_tun_device) for host in (here, there)]
        for device in devices:
            stack.callback(os.close, device)
        for source, target in (devices, devices[::-1]):
            command = [str(x) for x in (source, target, rate_bits_s, delay_s)]
            carrier = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.slow_link", *command], pass_fds=devices
            )
            stack.enter_context(_started(carrier))
        yield


@contextlib.contextmanager
def _started(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def _tun_device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    request = struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER)
    fcntl.ioctl(device, _SET_DEVICE, request)
    return device


def _set_up(address: str) -> None:
    _command("ip link set lo up")
    _command(f"ip address add {address}/24 dev {DEVICE}")
    _command(f"ip link set {DEVICE} up mtu {_MTU} txqueuelen 10000")


def _command(command: str) -> None:
    subprocess.run(command.split(), check=True)


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


if __name__ == "__main__":
    one, other, *rest = sys.argv[1:]
    carry(int(one), int(other), float(rest[0]), float(rest[1]))
