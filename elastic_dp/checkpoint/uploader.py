"""Uploads in the background: training goes on when the copy is made.

- One upload at a time, since there is one snapshot's memory. `take` waits for the one before: who
  asks for the next one when the last is committed (train/checkpointing/checkpoint_schedule.py)
  never waits; one of a fixed step, or that is asked for (a drain, `ctx.checkpoint`) does.
- The store may be away for minutes: who must go on asks `ready` first, which has `PATIENCE_S` in
  all for one upload.
- What goes wrong in the background is raised by the next `take` or by `wait`, never lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_writer import Share, write_parts, write_share
from elastic_dp.checkpoint.commit_record import Manifest
from elastic_dp.checkpoint.snapshot import Snapshot

WRITES_IN_FLIGHT = 4
PATIENCE_S = 5.0  # that training stands for one upload: longer than one needs that is only slow


@dataclass(frozen=True)
class Upload:
    """One checkpoint's share of this member. `stall_s`: how long `take` kept the training waiting;
    `waited_s`: of that, for the upload before."""

    step: int
    stall_s: float
    waited_s: float
    share: Future[Share]


class Uploader:
    """Of one member. `take` from the training thread; everything else happens on threads of its
    own.

    `on_written(share, manifest)`: called on such a thread with what the committer needs; the
    manifest is all members' own.
    """

    def __init__(self, catalog: Catalog, on_written: Callable[[Share, Manifest], None]) -> None:
        self.snapshot = Snapshot()
        self._catalog, self._on_written = catalog, on_written
        self._one = ThreadPoolExecutor(1, "checkpoint")
        self._writers = ThreadPoolExecutor(WRITES_IN_FLIGHT, "checkpoint-part")
        self._running: Future[Share] | None = None
        self._last: Future[Any] | None = None  # that one, or parts of it that were asked for since
        self._patience_s = 0.0  # what is left for it
        # Into the snapshot, or out of it for parts that are asked for later.
        self._copying = threading.Lock()

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    @property
    def late(self) -> bool:
        """Whether an upload is under way that nobody waits for any longer."""
        return self._patience_s <= 0.0 and not self._is_over()

    def ready(self) -> bool:
        """Whether the next one can be taken at once. Waits for the one before, while there is
        patience."""
        if self._last is not None and self._patience_s > 0.0:
            begun_at = time.perf_counter()
            wait_for([self._last], self._patience_s)
            self._patience_s -= time.perf_counter() - begun_at
        return self._is_over()

    def take(self, step: int, tree: Any, rank: int, world_size: int, *, writer: str = "") -> Upload:
        """Copy the state and begin to write a share of it. Raises StateError, or what ended the
        last upload."""
        begun_at = time.perf_counter()
        self.wait()
        waited_s = time.perf_counter() - begun_at
        with self._copying:
            self.snapshot.take(step, tree)
        self._patience_s = PATIENCE_S
        self._last = self._running = self._one.submit(self._write, rank, world_size, writer)
        self._one.submit(self.snapshot.register)  # behind it, when nobody waits any more
        return Upload(step, time.perf_counter() - begun_at, waited_s, self._running)

    def write(self, step: int, numbers: Sequence[int], *, writer: str = "") -> None:
        """Write these parts as well, if the snapshot is still that of the step. Any thread may call
        it."""
        self._last = self._one.submit(self._write_more, step, numbers, writer)

    def wait(self) -> Share | None:
        """For the upload under way; what it told, None if there was none. Raises what ended it,
        once."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        """Waits for what is being written; nothing more begins."""
        self._one.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self.snapshot.close()

    def _is_over(self) -> bool:
        return self._last is None or self._last.done()

    def _write(self, rank: int, world_size: int, writer: str) -> Share:
        share = write_share(
            self._catalog, self.snapshot, rank, world_size, self._writers, writer=writer
        )
        self._on_written(share, self.snapshot.manifest())
        return share

    def _write_more(self, step: int, numbers: Sequence[int], writer: str) -> None:
        with self._copying:
            if self.snapshot.step == step:
                share = write_parts(
                    self._catalog, self.snapshot, numbers, self._writers, writer=writer
                )
                self._on_written(share, self.snapshot.manifest())
