"""Both ends of a heartbeat that live in our processes: the worker's page and the controller's socket."""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_dp.cluster import pulse
from elastic_dp.protocol.messages import Cause, StacksTaken, WorkerHeard, WorkerId, WorkerLost

STACKS_S = 2.0  # a pulse that was asked for stacks has killed its worker by then
_MAX_DATAGRAM_BYTES = 65536


class Page:
    """Where a worker writes its place for the pulse beside it. Implements `train.session.Status`."""

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

    def point_at(self, host: str, port: int) -> None:
        """Where the controller hears from now on."""
        pulse.write_address(self._page, host, port)

    def start_pulse(
        self, worker: WorkerId, token: str, interval_s: float
    ) -> subprocess.Popen[bytes]:
        """The process beside this one, told before where to send; it ends by itself when this one does."""
        faulthandler.register(signal.SIGUSR2, file=self._stacks)
        files = (self._file, self._stacks)
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", pulse.__file__, *map(str, files)),
                *(worker, token, str(interval_s), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            process_group=0,  # Ray kills the group of a worker that died, and its last words are still to be said
        )


def _nameless() -> int:
    """The descriptor of a file that the pulse inherits: nothing is left of a worker that is killed before that has started. In memory, where
    there is such a thing, since writing to a mapped page of a full disk ends the process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("elastic_dp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class HeartbeatServer:
    """One UDP socket for all workers. A lost datagram costs nothing: there are several per timeout."""

    def __init__(
        self,
        token: str,
        heard: Callable[[WorkerHeard | WorkerLost | StacksTaken], None],
        last_words: Callable[[WorkerId, str], None] = lambda worker, words: None,
    ) -> None:
        self._token, self._heard, self._last_words = token, heard, last_words
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("0.0.0.0", 0))
        self.port: int = self._socket.getsockname()[1]
        self._addresses: dict[WorkerId, tuple[str, int]] = {}
        self._thread = threading.Thread(target=self._serve, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def renew(self, worker: WorkerId, beat: int) -> None:
        """Answer one heartbeat: the lease runs from when that was sent (`beat`, in microseconds)."""
        self._answer(worker, {"at": beat / 1e6})

    def condemn(self, worker: WorkerId, stuck: bool) -> None:
        """Let the worker's own pulse kill it; of a stuck one it sends the stacks before."""
        self._answer(worker, {"die": True, "stuck": stuck})

    def close(self) -> None:
        self._socket.close()

    def _answer(self, worker: WorkerId, body: dict[str, object]) -> None:
        if worker in self._addresses:
            with contextlib.suppress(OSError):
                answer = json.dumps({"token": self._token} | body).encode()
                self._socket.sendto(answer, self._addresses[worker])

    def _serve(self) -> None:
        while True:
            try:
                payload, address = self._socket.recvfrom(_MAX_DATAGRAM_BYTES)
            except OSError:
                return  # closed
            try:
                beat = json.loads(payload)
                if not hmac.compare_digest(str(beat["token"]), self._token):
                    continue
                if beat.get("exits"):
                    self._heard(_lost(beat))
                    continue
                if "words" in beat:
                    self._last_words(str(beat["worker"]), str(beat["words"]))
                    continue
                if "stacks" in beat:
                    self._heard(StacksTaken(str(beat["worker"]), str(beat["stacks"])))
                    continue
                event = WorkerHeard(
                    str(beat["worker"]),
                    int(beat["generation"]),
                    int(beat["step"]),
                    str(beat["phase"]),
                    int(float(beat["at"]) * 1e6),
                    float(beat["cpu_s"]),
                    float(beat["virtual_s"]),
                )
                self._addresses[event.worker] = address
            except (ValueError, KeyError, TypeError):
                continue  # not one of ours
            self._heard(event)


def _lost(beat: dict[str, Any]) -> WorkerLost:
    """A worker's death, as its pulse tells it."""
    phase, _, number = str(beat["phase"]).partition(" ")
    at = (int(beat["step"]) + 1, int(number)) if phase in ("data", "compute") and number else None
    where = "" if at is None else f" in virtual worker {at[1]} of step {at[0]}"
    if beat["out_of_memory"]:
        reason = f"the kernel killed a process for want of memory, and it exits{where}"
        return WorkerLost(str(beat["worker"]), reason, Cause.OUT_OF_MEMORY, at)
    return WorkerLost(str(beat["worker"]), f"its process exits{where}", micro_batch=at)
