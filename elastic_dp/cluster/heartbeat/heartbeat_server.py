"""The controller's end of heartbeats: one socket that receives from all sidecars and answers
them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from elastic_dp.cluster.heartbeat import heartbeat_sidecar
from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.threads import background

STACKS_S = 2.0  # a sidecar that was asked for stack traces has killed its worker by then
# The system may grant less. A burst of foreign datagrams must not displace heartbeats.
_RECEIVE_BUFFER_BYTES = 8 << 20
_SAID_EVERY_S = 60.0  # between two reports of datagrams that are not authentic


class HeartbeatServer:
    """One UDP socket for all workers. A lost datagram does no harm: there are several per timeout.

    Only datagrams that are signed with the run's secret are parsed, each of them once. Others are
    counted, and reported by `say` at most once a minute. Nothing that arrives ends the thread.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        heard: Callable[[m.HeartbeatReceived | m.WorkerLost | m.StackTracesCaptured], None],
        log_tail: Callable[[WorkerId, str], None] = lambda worker, words: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`host` is the address of this machine at which workers reach it."""
        self._secret, self._heard, self._crash_logs, self._say = secret, heard, log_tail, say
        self._socket = socket.socket(heartbeat_sidecar.family_of(host), socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.bind((host, 0))
        self.address = ControllerAddress(
            host, self._socket.getsockname()[1], secrets.token_bytes(16)
        )
        self._in = heartbeat_sidecar.Channel(secret, self.address.nonce, "")
        self._peers: dict[WorkerId, _Peer] = {}
        self.refused = 0  # datagrams that were not authentic, or not new
        self._said_at = -math.inf
        self._closed = False
        self._thread = background("heartbeats", self._serve)

    def start(self) -> None:
        self._thread.start()

    def renew(self, worker: WorkerId, beat: int) -> None:
        """Answer one heartbeat: the lease runs from its sending time (`beat`, in microseconds)."""
        self._answer(worker, {"at": beat / 1e6})

    def evict(self, worker: WorkerId, stuck: bool) -> None:
        """Let the worker's sidecar kill it; of a stuck worker it sends the stack traces first."""
        self._answer(worker, {"die": True, "stuck": stuck})

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if self._thread.ident is None:  # never started
            self._socket.close()

    def receive(self, datagram: bytes, source: Any) -> None:
        """Pass on the message of an authentic, new datagram. Never raises, whatever the datagram
        holds.
        """
        try:
            message = self._opened(datagram, source)
        except Exception:  # a worker of another version
            message = None
        if message is None:
            self._refuse(source)
            return
        try:
            message()
        except Exception:  # a bug costs this message, not all later heartbeats
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
                heartbeat_sidecar.Channel(self._secret, self.address.nonce, worker)
            )
        if not peer.replays.is_new(counter):
            return None
        peer.source = source
        if "words" in message:
            return functools.partial(self._crash_logs, worker, str(message["words"]))
        return functools.partial(self._heard, _event_of(worker, message))

    def _refuse(self, source: Any) -> None:
        self.refused += 1
        now = time.monotonic()
        if now >= self._said_at + _SAID_EVERY_S:
            self._said_at = now
            self._say(
                "Datagrams that no worker of this run has sent, or that repeat an earlier "
                f"one, reach the heartbeat port {self.address.host}:{self.address.port}: "
                f"{self.refused} so far, the last one from {source[0]}. They are ignored"
            )

    def _answer(self, worker: WorkerId, message: dict[str, object]) -> None:
        peer = self._peers.get(worker)
        if peer is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(peer.out.sign(0, message), peer.source)

    def _serve(self) -> None:
        with self._socket:
            while not self._closed:
                with contextlib.suppress(OSError):
                    datagram, source = self._socket.recvfrom(heartbeat_sidecar.MAX_DATAGRAM_BYTES)
                    if not self._closed:
                        self.receive(datagram, source)


class _Peer:
    """The sidecar of one worker: its latest address, and which of its datagrams were received."""

    __slots__ = ("out", "replays", "source")

    def __init__(self, out: heartbeat_sidecar.Channel) -> None:
        self.out, self.replays = out, heartbeat_sidecar.Replays()
        self.source: Any = None  # the address of the latest authentic datagram


def _event_of(
    worker: WorkerId, message: dict[str, Any]
) -> m.HeartbeatReceived | m.WorkerLost | m.StackTracesCaptured:
    if message.get("exits"):
        return _lost(worker, message)
    if "stacks" in message:
        return m.StackTracesCaptured(worker, str(message["stacks"]))
    return m.HeartbeatReceived(
        worker,
        int(message["generation"]),
        int(message["step"]),
        str(message["phase"]),
        int(float(message["at"]) * 1e6),
        float(message["cpu_s"]),
        float(message["virtual_s"]),
        tuple(float(seconds) for seconds in message.get("times", ())),
        int(message.get("store_retries", 0)),
        float(message.get("sending_s", 0.0)),
        heartbeat_sidecar.unpacked_evaluations(int(message.get("evaluations", 0))),
    )


def _lost(worker: WorkerId, message: dict[str, Any]) -> m.WorkerLost:
    """Return the death of a worker as its sidecar reports it."""
    phase, _, number = str(message["phase"]).partition(" ")
    at = None
    if phase in ("data", "compute") and number:
        at = int(message["step"]) + 1, int(number)
    where = "" if at is None else f" in virtual worker {at[1]} of step {at[0]}"
    if fault := message.get("fault"):
        cause, text = m.Cause(fault[0]), str(fault[1])
        what = "ran out of device memory" if cause is m.Cause.OUT_OF_MEMORY else "its device failed"
        return m.WorkerLost(worker, f"{what}{where}: {text}", cause, at)
    if message["out_of_memory"]:
        reason = f"the kernel killed a process because memory ran out, and it exits{where}"
        return m.WorkerLost(worker, reason, m.Cause.OUT_OF_MEMORY, at)
    return m.WorkerLost(worker, f"its process exits{where}", micro_batch=at)
