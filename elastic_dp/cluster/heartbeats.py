"""Both ends of a heartbeat that live in our processes: the worker's page and the controller's socket."""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from elastic_dp.cluster import pulse
from elastic_dp.protocol.messages import WorkerHeard, WorkerId, WorkerLost


class Page:
    """Where a worker writes its place for the pulse beside it. Implements `train.session.Status`."""

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp(prefix="elastic_dp_pulse_")
        os.ftruncate(handle, pulse.PAGE.size)
        self._page = mmap.mmap(handle, pulse.PAGE.size)
        os.close(handle)
        self.write(0, 0, "start")
        pulse.write_renewed_at(self._page, time.monotonic())

    def write(self, generation: int, step: int, phase: str) -> None:
        pulse.WHERE.pack_into(self._page, 0, generation, step, phase.encode())

    def renewed_at(self) -> float:
        return pulse.read_renewed_at(self._page)

    def start_pulse(
        self, host: str, port: int, worker: WorkerId, token: str, interval_s: float
    ) -> subprocess.Popen[bytes]:
        """The process beside this one; it ends by itself when this one does."""
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", pulse.__file__, self.path, host, str(port)),
                *(worker, token, str(interval_s), str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
        )


class HeartbeatServer:
    """One UDP socket for all workers. A lost datagram costs nothing: there are several per timeout."""

    def __init__(self, token: str, heard: Callable[[WorkerHeard | WorkerLost], None]) -> None:
        self._token, self._heard = token, heard
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

    def condemn(self, worker: WorkerId) -> None:
        """Let the worker's own pulse kill it."""
        self._answer(worker, {"die": True})

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
                payload, address = self._socket.recvfrom(4096)
            except OSError:
                return  # closed
            try:
                beat = json.loads(payload)
                if not hmac.compare_digest(str(beat["token"]), self._token):
                    continue
                if beat.get("exits"):
                    self._heard(WorkerLost(str(beat["worker"]), "its process exits"))
                    continue
                event = WorkerHeard(
                    str(beat["worker"]),
                    int(beat["generation"]),
                    int(beat["step"]),
                    str(beat["phase"]),
                    int(float(beat["at"]) * 1e6),
                )
                self._addresses[event.worker] = address
            except (ValueError, KeyError, TypeError):
                continue  # not one of ours
            self._heard(event)
