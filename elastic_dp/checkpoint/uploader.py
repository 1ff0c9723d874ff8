"""Uploads checkpoints in the background: training continues as soon as the snapshot is made.

- One upload runs at a time, since there is memory for one snapshot. `take` waits for the upload
  before it. An automatic schedule (`CheckpointSchedule`) asks for the next
  checkpoint after the last one is committed and never waits. A checkpoint at a fixed step, or one
  that is requested (a drain, `ctx.checkpoint`), may wait.
- The store may be unreachable for minutes. A caller that must continue calls `ready` first, which
  waits at most `PATIENCE_S` in total for one upload.
- An error in the background is raised by the next `take` or by `wait`. It is never lost.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs, write_blobs
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.snapshot import HeldState, Snapshot

WRITES_IN_FLIGHT = 4
_UNKNOWN = CommitMetadata()
SOON_READY_BYTES = 32 << 20  # memory of this size takes some milliseconds
PATIENCE_S = 5.0  # how long training waits for one upload: enough for one that is merely slow


class Uploader:
    """The uploads of one member. The training thread calls `take`; the rest runs on threads of the
    uploader.

    `on_written` is called on such a thread.
    """

    def __init__(self, catalog: Catalog, on_written: Callable[[WrittenBlobs], None]) -> None:
        self.snapshot = Snapshot()
        self._catalog, self._on_written = catalog, on_written
        self._one = ThreadPoolExecutor(1, "checkpoint")
        self._writers = ThreadPoolExecutor(WRITES_IN_FLIGHT, "checkpoint-part")
        self._running: Future[WrittenBlobs] | None = None
        self._last: Future[Any] | None = None  # the same, or parts of it that were requested later
        self._making: Future[None] | None = None  # the memory ready for the first snapshot
        self._began_at = self._stall_s = 0.0  # of the newest snapshot, as the next line
        self._shared: dict[str, Any] = {}  # arguments of `write_blobs`
        self._about: dict[str, Any] = {}  # of the reports
        self._patience_s = 0.0  # what is left of PATIENCE_S for the upload under way
        # Held while the snapshot is filled, and while parts that were requested later are written.
        self._copying = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether an upload is under way."""
        return self._running is not None and not self._running.done()

    @property
    def late(self) -> bool:
        """Whether an upload is under way for which `ready` no longer waits."""
        return self._patience_s <= 0.0 and not self._is_over()

    def ready(self, *, must: bool = False) -> bool:
        """Returns whether the next checkpoint can be taken without waiting.

        It waits for the upload under way until its patience is used up, and for memory if the
        checkpoint `must` be taken.
        """
        if must:
            self._wait_for_memory()
        if self._last is not None and self._patience_s > 0.0:
            begun_at = time.perf_counter()
            wait_for([self._last], self._patience_s)
            self._patience_s -= time.perf_counter() - begun_at
        return self._is_over()

    def prepare(self, tree: Any, held: HeldState | None = None) -> None:
        """Makes ready for the first snapshot of such a state, in the background where it takes
        time: until then it is late. Raises StateError."""
        with self._copying:
            self.snapshot.take(-1, tree, held, most_new=-1)
        self._make_ready()

    def _make_ready(self) -> None:
        self._making = self._one.submit(self.snapshot.memory.make_ready)
        if self.snapshot.memory.content.numel() > SOON_READY_BYTES:
            self._last = self._making

    def _wait_for_memory(self) -> None:
        if self._making is not None:
            self.snapshot.memory.hurry()
            self._making.result()

    def take(
        self,
        step: int,
        tree: Any,
        held: HeldState | None = None,
        *,
        writer: str,
        members: Sequence[str],
        must: bool = True,
        metadata: CommitMetadata = _UNKNOWN,
        lineage_id: int = 0,
    ) -> bool:
        """Copies the state and starts to write what `writer` is to write, one of `members`. Returns
        False if the state has grown, and the memory for it is made ready first, unless the
        checkpoint `must` be taken.

        `held`: see `Snapshot.take`. `metadata` and `lineage_id`: see `WrittenBlobs`. Raises
        StateError if the state cannot be stored, or the error of the previous upload.
        """
        began_at = time.monotonic()
        self.wait()
        self._wait_for_memory()
        most_new = math.inf if must else SOON_READY_BYTES
        with self._copying:
            taken = self.snapshot.take(step, tree, held, most_new=most_new)
        if not taken:
            self._make_ready()
            return False
        self._began_at, self._stall_s = began_at, time.monotonic() - began_at
        self._shared = {"writer": writer, "members": members}
        self._about = {"metadata": metadata, "lineage_id": lineage_id}
        self._patience_s = PATIENCE_S
        self._last = self._running = self._one.submit(self._write)
        self._one.submit(self.snapshot.memory.make_ready)  # after it, when nobody waits any more
        return True

    def write(self, step: int, names: Sequence[str]) -> None:
        """Also writes the blobs with these names, if the snapshot still holds this step. Any
        thread may call it."""
        self._last = self._one.submit(self._write_more, step, names)

    def wait(self) -> WrittenBlobs | None:
        """Waits for the upload under way and returns its share, or None if there is none.

        Raises the error of that upload, once.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        """Waits for the writes that were begun or requested."""
        self.snapshot.memory.close()  # first: nobody needs memory that is not ready
        self._one.shutdown()
        self._writers.shutdown()

    def _is_over(self) -> bool:
        return self._last is None or self._last.done()

    def _write(self, names: Sequence[str] | None = None) -> WrittenBlobs:
        written = write_blobs(
            self._catalog, self.snapshot, self._writers, names=names, **self._shared
        )
        written = replace(
            written,
            stall_s=self._stall_s + self.snapshot.copied_s,
            took_s=time.monotonic() - self._began_at,
            **self._about,
        )
        self._on_written(written)
        return written

    def _write_more(self, step: int, names: Sequence[str]) -> None:
        with self._copying:
            if self.snapshot.step == step:
                self._write(names)
