"""The memory that a worker shares with its heartbeat sidecar, and the start of that process.

The worker writes its step, its phase and the controller's address; the sidecar sends the first two,
and writes back when the controller last answered. `heartbeat_sidecar`, which runs without this
package, has the layout.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from elastic_dp.cluster.heartbeat import heartbeat_sidecar
from elastic_dp.cluster.heartbeat.heartbeat_sidecar import Page
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.telemetry.phase_clock import PhaseClock


class ControllerAddress(NamedTuple):
    """The address of a controller's socket. A datagram to it is only authentic with the `nonce`,
    which is never used twice.
    """

    host: str
    port: int
    nonce: bytes


class SharedMemoryPage:
    """Where a worker writes its step and phase for its sidecar.

    Implements `train.controller_link.HeartbeatStatus`.
    """

    def __init__(self) -> None:
        self._file, self._stacks = _nameless(), _nameless()
        self._clock = PhaseClock()
        self._counting = threading.Lock()
        size = ctypes.sizeof(Page)
        os.ftruncate(self._file, size)
        self._page = Page.from_buffer(mmap.mmap(self._file, size))
        self._page.times[:] = self._clock.state
        self.write(0, 0, "start")
        self._page.renewed_at = time.monotonic()

    def write(self, generation: int, step: int, phase: str) -> None:
        page = self._page
        page.generation, page.step, page.phase = generation, step, phase.encode()[:16]
        if self._clock.enter(phase.partition(" ")[0], time.monotonic()):
            page.times[:] = self._clock.state

    def write_evaluations(self, body: int, count: int, *, ended: bool) -> None:
        self._page.evaluations = heartbeat_sidecar.packed_evaluations(body, count, ended)

    def write_speed(self, virtual_s: float) -> None:
        self._page.virtual_s = virtual_s

    def write_sending(self, sending_s: float) -> None:
        self._page.sending_s = sending_s

    def write_fault(self, kind: str, text: str) -> None:
        self._page.fault_text = text.encode(errors="replace")[:1024]
        self._page.fault_kind = kind.encode()

    def count_retry(self) -> None:
        """Count a request to a store that is retried. Any thread may call it."""
        with self._counting:
            self._page.store_retries += 1

    def renewed_at(self) -> float:
        return float(self._page.renewed_at)

    def point_at(self, address: ControllerAddress) -> None:
        """Send heartbeats to this address from now on."""
        self._page.controller = f"{address.host} {address.port} {address.nonce.hex()}".encode()

    def start_sidecar(
        self, worker: WorkerId, secret: bytes, interval_s: float, others: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start the sidecar, after `point_at`. It ends by itself when this process does. `others`
        are further processes of this worker."""
        faulthandler.register(signal.SIGUSR2, file=self._stacks)
        files = (self._file, self._stacks)
        started = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", heartbeat_sidecar.__file__, *map(str, files)),
                *(worker, str(interval_s), *map(str, (os.getpid(), *others))),
            ],
            stdin=subprocess.PIPE,  # `ps` shows arguments to everybody
            pass_fds=files,
            # Ray kills the process group of a worker that died, but the sidecar must still report.
            process_group=0,
        )
        assert started.stdin is not None
        with contextlib.suppress(BrokenPipeError), started.stdin:
            started.stdin.write(secret)
        return started


def _nameless() -> int:
    """Return the descriptor of an unnamed file, which the sidecar inherits.

    A worker that is killed before its sidecar has started leaves nothing behind. The file is in
    memory if the system supports that: a write to a mapped page ends the process when the disk is
    full.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("elastic_dp")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
