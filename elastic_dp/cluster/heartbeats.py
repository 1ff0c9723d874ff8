"""Both ends of a heartbeat that live in our processes: the worker's page and the controller's socket."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from elastic_dp.cluster import pulse
from elastic_dp.coordinator.messages import Cause, StacksTaken, WorkerHeard, WorkerId, WorkerLost
from elastic_dp.threads import background

STACKS_S = 2.0  # a pulse that was asked for stacks has killed its worker by then
_RECEIVE_BUFFER_BYTES = (
    8 << 20
)  # the system gives what it allows: a burst of strangers must not drown heartbeats
_SAID_EVERY_S = 60.0  # how often it is said, at most, that strangers send to this port


class Address(NamedTuple):
    """Of a controller's socket. `nonce`: never used before; without it a datagram to that socket is not genuine."""

    host: str
    port: int
    nonce: bytes


class Page:
    """Where a worker writes its place for the pulse beside it. Implements `train.controller_link.HeartbeatStatus`."""

    def __init__(self) -> None:
        self._file, self._stacks = _nameless(), _nameless()
        os.ftruncate(self._file, pulse.PAGE.size)
        self._page = mmap.mmap(self._file, pulse.PAGE.size)
        self.write(0, 0, "start")
        pulse.write_renewed_at(self._page, time.monotonic())

    def write(self, generation: int, step: int, phase: str) -> None:
        pulse.WHERE.pack_into(self._page, 0, generation, step, phase.encode())

    def write_speed(self, virtual_s: float) -> None:
        pulse.SPEED.pack_into(self._page, pulse.WHERE.size, virtual_s)

    def renewed_at(self) -> float:
        return pulse.read_renewed_at(self._page)

    def point_at(self, address: Address) -> None:
        """Where the controller hears from now on."""
        pulse.write_address(self._page, *address)

    def start_pulse(
        self, worker: WorkerId, secret: bytes, interval_s: float
    ) -> subprocess.Popen[bytes]:
        """The process beside this one, told before where to send; it ends by itself when this one does."""
        faulthandler.register(signal.SIGUSR2, file=self._stacks)
        files = (self._file, self._stacks)
        started = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", pulse.__file__, *map(str, files)),
                *(worker, str(interval_s), str(os.getpid())),
            ],
            stdin=subprocess.PIPE,  # `ps` shows arguments to everybody
            pass_fds=files,
            process_group=0,  # Ray kills the group of a worker that died, and its last words are still to be said
        )
        assert started.stdin is not None
        with contextlib.suppress(BrokenPipeError), started.stdin:
            started.stdin.write(secret)
        return started


def _nameless() -> int:
    """The descriptor of a file that the pulse inherits: nothing is left of a worker that is killed before that has started. In memory, where
    there is such a thing, since writing to a mapped page of a full disk ends the process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("elastic_dp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class HeartbeatServer:
    """One UDP socket for all workers. A lost datagram costs nothing: there are several per timeout.

    Whatever arrives, this goes on: only datagrams that are signed with the run's secret are parsed, each of them once; the
    others are counted, and said by `say` once a minute.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        heard: Callable[[WorkerHeard | WorkerLost | StacksTaken], None],
        last_words: Callable[[WorkerId, str], None] = lambda worker, words: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`host`: the address of this machine at which workers reach it."""
        self._secret, self._heard, self._last_words, self._say = secret, heard, last_words, say
        self._socket = socket.socket(pulse.family_of(host), socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.bind((host, 0))
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(16))
        self._in = pulse.Channel(secret, self.address.nonce, "")
        self._peers: dict[WorkerId, _Peer] = {}
        self.refused = 0  # datagrams that were not genuine, or not new
        self._said_at = -math.inf
        self._closed = False
        self._thread = background("heartbeats", self._serve)

    def start(self) -> None:
        self._thread.start()

    def renew(self, worker: WorkerId, beat: int) -> None:
        """Answer one heartbeat: the lease runs from when that was sent (`beat`, in microseconds)."""
        self._answer(worker, {"at": beat / 1e6})

    def condemn(self, worker: WorkerId, stuck: bool) -> None:
        """Let the worker's own pulse kill it; of a stuck one it sends the stacks before."""
        self._answer(worker, {"die": True, "stuck": stuck})

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()

    def take(self, datagram: bytes, source: Any) -> None:
        """Pass on what it says, if it is genuine and new. Raises nothing, whatever the datagram holds."""
        try:
            message = self._opened(datagram, source)
        except Exception:  # of a worker of another version
            message = None
        if message is None:
            self._refuse(source)
            return
        try:
            message()
        except Exception:  # a bug of ours costs this message, and not all heartbeats from now on
            traceback.print_exc()

    def _opened(self, datagram: bytes, source: Any) -> Callable[[], None] | None:
        opened = self._in.open(datagram)
        if opened is None:
            return None
        counter, message = opened
        worker = str(message["worker"])
        peer = self._peers.get(worker)
        if peer is None:
            peer = self._peers[worker] = _Peer(
                pulse.Channel(self._secret, self.address.nonce, worker)
            )
        if not peer.replays.is_new(counter):
            return None
        peer.source = source
        if "words" in message:
            return functools.partial(self._last_words, worker, str(message["words"]))
        return functools.partial(self._heard, _event_of(worker, message))

    def _refuse(self, source: Any) -> None:
        self.refused += 1
        now = time.monotonic()
        if now >= self._said_at + _SAID_EVERY_S:
            self._said_at = now
            self._say(
                f"Datagrams that no worker of this run has sent, or that repeat an earlier one, reach the heartbeat port "
                f"{self.address.host}:{self.address.port}: {self.refused} so far, the last one from {source[0]}. "
                "They are ignored"
            )

    def _answer(self, worker: WorkerId, message: dict[str, object]) -> None:
        peer = self._peers.get(worker)
        if peer is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(peer.out.sign(0, message), peer.source)

    def _serve(self) -> None:
        while not self._closed:
            try:
                datagram, source = self._socket.recvfrom(pulse.MAX_DATAGRAM_BYTES)
            except OSError:
                if self._socket.fileno() < 0:
                    return  # closed
                continue
            if not self._closed:
                self.take(datagram, source)


class _Peer:
    """A worker's pulse: where it was heard last, and what was heard of it."""

    __slots__ = ("out", "replays", "source")

    def __init__(self, out: pulse.Channel) -> None:
        self.out, self.replays = out, pulse.Replays()
        self.source: Any = None  # set by each genuine datagram


def _event_of(worker: WorkerId, message: dict[str, Any]) -> WorkerHeard | WorkerLost | StacksTaken:
    if message.get("exits"):
        return _lost(worker, message)
    if "stacks" in message:
        return StacksTaken(worker, str(message["stacks"]))
    return WorkerHeard(
        worker,
        int(message["generation"]),
        int(message["step"]),
        str(message["phase"]),
        int(float(message["at"]) * 1e6),
        float(message["cpu_s"]),
        float(message["virtual_s"]),
    )


def _lost(worker: WorkerId, message: dict[str, Any]) -> WorkerLost:
    """A worker's death, as its pulse tells it."""
    phase, _, number = str(message["phase"]).partition(" ")
    at = None
    if phase in ("data", "compute") and number:
        at = int(message["step"]) + 1, int(number)
    where = "" if at is None else f" in virtual worker {at[1]} of step {at[0]}"
    if message["out_of_memory"]:
        reason = f"the kernel killed a process for want of memory, and it exits{where}"
        return WorkerLost(worker, reason, Cause.OUT_OF_MEMORY, at)
    return WorkerLost(worker, f"its process exits{where}", micro_batch=at)
