"""Who may commit checkpoints of a run: the holder of its lease, under a claim that goes on from the
newest checkpoint."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Held, Holder, Lease, Record

_HOST = socket.gethostname()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """`step`: of the newest checkpoint, None: there is none. `after_loss`: everyone was lost, so it
    is gone on from."""

    step: int | None
    after_loss: bool


class RunClaim:
    """Its methods but `renew_at_s` and `fence` do I/O: they raise StorageError, and LeaseLost where
    another holds the run."""

    def __init__(self, catalog: Catalog, lease_s: float, token: str | None) -> None:
        """`token`: see `CheckpointCommitter`."""
        self._catalog = catalog
        self._token = token or secrets.token_hex(8)
        lease = Lease(f"{_HOST}/{os.getpid()}", self._token, lease_s, _is_gone)
        self._holder = Holder(
            catalog.store, lease, time.monotonic, time.time, catalog.highest_fence
        )
        self._was_lost = False  # whether going on from a checkpoint means that everyone was lost
        self._at_most = sys.maxsize  # steps behind it are wrong
        self.fence = 0  # until a claim is made

    @property
    def renew_at_s(self) -> float:
        return self._holder.lease.renew_at_s()

    @property
    def is_held(self) -> bool:
        """Whether the lease was ever acquired."""
        return self._holder.lease.held is not None

    def acquire(self, tell: Callable[[str], None], wait: Callable[[float], bool]) -> None:
        """The lease; waits for whoever holds it, until `wait(seconds)` returns True: the run has
        ended."""
        said = ""
        while True:
            before = self._holder.newest()
            held = self._holder.acquire()
            if not isinstance(held, Held):
                break
            if held.by.holder != said:
                said = held.by.holder
                tell(f"the run is held by {said}; waiting for it, or for its lease to run out")
            if wait(min(held.wait_s, 1.0)):
                return
        if before is not None and before.token != self._token:
            self._was_lost = before.state == "held"  # it was never given up: its holder died

    def renew(self) -> None:
        self._holder.renew()

    def renew_unless_valid(self) -> None:
        if not self._holder.lease.is_valid(time.monotonic()):
            self._holder.renew()  # or learn that another holds the run

    def release(self) -> None:
        self._holder.release()

    def resume(self) -> ResumePoint:
        """From the newest checkpoint, under a claim of our own: what is committed from now on
        descends from it."""
        self.fence = self._holder.renew().number
        names = [name for name in self._catalog.names() if name.step <= self._at_most]
        self._at_most = sys.maxsize
        self._catalog.claim(self.fence, names[-1] if names else None)
        after_loss, self._was_lost = self._was_lost and bool(names), True
        return ResumePoint(names[-1].step if names else None, after_loss)

    def reject_after(self, step: int) -> None:
        """The run goes on from a checkpoint of this step or before."""
        self._at_most = step


def _is_gone(record: Record) -> bool:
    """Whether its holder was a process of this machine that is no more."""
    host, _, pid = record.holder.rpartition("/")
    if host != _HOST:
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, OSError):
        return False
    return False
