"""Hosts on one machine: network namespaces with addresses of their own, on one bridge, that can be
cut off.

Needs root and Debian's iproute2; `available` says whether there are both. A cut drops frames in
silence, as a pulled cable does: nobody gets an error, and whoever waits goes on waiting. Everything
a network made is gone when it closes; what one left that was killed goes when the next one is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache

# Of a bridge; the names of its hosts and of their cables go on with "-2" and "p2"; the number is
# the owner's process.
_NAME = re.compile(r"edp(\d+)(?:$|[-p])")


@cache
def available() -> bool:
    """Whether this machine lets us make hosts."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"edp{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    _run("ip", "netns", "delete", name)
    return True


class Host:
    """One namespace: its processes, and its cable."""

    def __init__(self, name: str, port: str, address: str) -> None:
        self.name, self.address = name, address
        self._port = port  # the bridge's end of the cable; ours is eth0
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        with open(log, "ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def enter(self) -> None:
        """This thread, and what it starts, is on this host from now on."""
        with open(f"/var/run/netns/{self.name}", "rb") as network:
            assert not ctypes.CDLL(None).setns(network.fileno(), 0)

    def pids(self, pattern: str = "") -> list[int]:
        """Return the processes whose command line contains `pattern`."""
        found = []
        for word in _run("ip", "netns", "pids", self.name).split():
            with contextlib.suppress(OSError), open(f"/proc/{word}/cmdline", "rb") as file:
                if pattern in file.read().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(int(word))
        return found

    def signal(self, number: signal.Signals, pattern: str = "") -> list[int]:
        """Signal all processes of the host, or those whose command line contains `pattern`; returns
        which."""
        pids = self.pids(pattern)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def cut(self, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Drop what it would hear, what it says, or both."""
        if outgoing:
            _run(
                *("ip", "netns", "exec", self.name),
                *["tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "0"],
            )
        if incoming:
            _run(*f"tc qdisc replace dev {self._port} root pfifo limit 0".split())

    def slow(self, rate: str, *, incoming: bool = False) -> None:
        """Let so much pass of what it says, or would hear, like "20mbit"."""
        where = f"dev {self._port}" if incoming else "dev eth0"
        inside = "" if incoming else f"ip netns exec {self.name} "
        how = f"tbf rate {rate} burst 32kbit latency 400ms"
        _run(*f"{inside}tc qdisc replace {where} root {how}".split())

    def heal(self) -> None:
        for command in (
            f"ip netns exec {self.name} tc qdisc delete dev eth0 root",
            f"tc qdisc delete dev {self._port} root",
        ):
            subprocess.run(command.split(), capture_output=True)  # it may not have been cut

    def kill(self) -> None:
        while self.signal(signal.SIGKILL):
            for process in self._processes:
                process.poll()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        self.kill()
        # At once, for the next network of this process: a namespace takes its end with it only some
        # time after it is gone.
        subprocess.run(["ip", "link", "delete", self._port], capture_output=True)
        _run("ip", "netns", "delete", self.name)


class Network:
    """A bridge with as many hosts as are asked for; itself the first address."""

    def __init__(self) -> None:
        _bury()
        self._tag, self._prefix = f"edp{os.getpid()}", _free_prefix()
        self.address, self.hosts = f"{self._prefix}.1", list[Host]()
        _run("ip", "link", "add", self._tag, "type", "bridge")
        _run("ip", "address", "add", f"{self._prefix}.1/24", "dev", self._tag)
        _run("ip", "link", "set", self._tag, "up")

    def host(self) -> Host:
        number = len(self.hosts) + 2
        name, port = f"{self._tag}-{number}", f"{self._tag}p{number}"
        address = f"{self._prefix}.{number}"
        _run("ip", "netns", "add", name)
        _run(*f"ip link add {port} type veth peer name eth0 netns {name}".split())
        _run(*f"ip link set {port} master {self._tag} up".split())
        inside = f"ip netns exec {name} ip"
        _run(*f"{inside} address add {address}/24 dev eth0".split())
        _run(*f"{inside} link set eth0 up".split())
        _run(*f"{inside} link set lo up".split())
        self.hosts.append(Host(name, port, address))
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        for host in self.hosts:
            host.close()
        _run("ip", "link", "delete", self._tag)


def folder() -> str:
    """For a cluster, short, since Ray's sockets lie below it; or to mount a disk on."""
    return tempfile.mkdtemp(prefix=f"edp{os.getpid()}-")


def _free_prefix() -> str:
    """Find a prefix of addresses, which no other network of this machine has."""
    taken = _run("ip", "-o", "-4", "address")
    prefixes = (f"10.231.{(os.getpid() + more) % 250}" for more in range(250))
    return next(prefix for prefix in prefixes if f" {prefix}." not in taken)


def _bury() -> None:
    """What networks left whose owners are dead. Another process may be doing the same."""
    for line in _run("ip", "netns", "list").splitlines():
        if _is_orphan(name := line.split()[0]):
            with contextlib.suppress(AssertionError):
                Host(name, "", "").close()
    for bridge in filter(_is_orphan, os.listdir("/sys/class/net")):
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)
    for name in filter(_is_orphan, os.listdir(tempfile.gettempdir())):
        path = os.path.join(tempfile.gettempdir(), name)
        subprocess.run(["umount", "--lazy", path], capture_output=True)  # it may be a disk
        shutil.rmtree(path, ignore_errors=True)


def _is_orphan(name: str) -> bool:
    found = _NAME.match(name)
    return found is not None and not os.path.exists(f"/proc/{found[1]}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
