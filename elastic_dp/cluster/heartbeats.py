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
from elastic_dp.protocol.messages import WorkerHeard, WorkerId


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

    def __init__(self, token: str, heard: Callable[[WorkerHeard], None]) -> None:
        self._token, self._heard = token, heard
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("0.0.0.0", 0))
        self.port: int = self._socket.getsockname()[1]
        self._last: dict[WorkerId, tuple[tuple[str, int], float]] = {}  # address, sent at
        self._thread = threading.Thread(target=self._serve, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def renew(self, worker: WorkerId) -> None:
        """Answer the worker's last heartbeat: its lease runs from when that was sent."""
        self._answer(worker, lambda at: {"at": at})

    def condemn(self, worker: WorkerId) -> None:
        """Let the worker's own pulse kill it."""
        self._answer(worker, lambda _: {"die": True})

    def close(self) -> None:
        self._socket.close()

    def _answer(self, worker: WorkerId, body: Callable[[float], dict[str, object]]) -> None:
        if worker in self._last:
            address, at = self._last[worker]
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps({"token": self._token} | body(at)).encode(), address)

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
                event = WorkerHeard(
                    str(beat["worker"]),
                    int(beat["generation"]),
                    int(beat["step"]),
                    str(beat["phase"]),
                )
                self._last[event.worker] = (address, float(beat["at"]))
            except (ValueError, KeyError, TypeError):
                continue  # not one of ours
            self._heard(event)
