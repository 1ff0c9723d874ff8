"""The memory that a worker shares with its heartbeat sidecar, and the start of that process.

The worker writes its step, its phase and the controller's address; the sidecar sends the first two,
and writes back when the controller last answered. The layout is described in `heartbeat_sidecar`,
which runs without this package.
"""

from __future__ import annotations

import contextlib
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
        os.ftruncate(self._file, heartbeat_sidecar.PAGE_BYTES)
        self._page = mmap.mmap(self._file, heartbeat_sidecar.PAGE_BYTES)
        heartbeat_sidecar.write_times(self._page, self._clock.state)
        self.write(0, 0, "start")
        heartbeat_sidecar.write_renewed_at(self._page, time.monotonic())

    def write(self, generation: int, step: int, phase: str) -> None:
        heartbeat_sidecar.WHERE.pack_into(self._page, 0, generation, step, phase.encode())
        if self._clock.enter(phase.partition(" ")[0], time.monotonic()):
            heartbeat_sidecar.write_times(self._page, self._clock.state)

    def write_speed(self, virtual_s: float) -> None:
        heartbeat_sidecar.SPEED.pack_into(self._page, heartbeat_sidecar.WHERE.size, virtual_s)

    def write_fault(self, kind: str, text: str) -> None:
        heartbeat_sidecar.write_fault(self._page, kind, text)

    def count_retry(self) -> None:
        """Count a request to a store that is retried. Any thread may call it."""
        self._count(1, 0, 0)

    def count_cached(self, from_cache: int, from_store: int) -> None:
        """Count bytes of data that were read through the cache on the disk. Any thread may call
        it.
        """
        self._count(0, from_cache, from_store)

    def _count(self, *more: int) -> None:
        with self._counting:
            counts = map(sum, zip(heartbeat_sidecar.read_counts(self._page), more, strict=True))
            heartbeat_sidecar.write_counts(self._page, *counts)

    def renewed_at(self) -> float:
        return heartbeat_sidecar.read_renewed_at(self._page)

    def point_at(self, address: ControllerAddress) -> None:
        """Send heartbeats to this address from now on."""
        heartbeat_sidecar.write_address(self._page, *address)

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
