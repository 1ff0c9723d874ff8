"""The right to commit checkpoints of a run.

It belongs to the holder of the run's lease, under a claim that continues from the newest
checkpoint.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Held, Holder, Lease, Record


def _machine() -> str:
    """Returns a name of this boot of this machine and of this namespace of process ids, or "".

    A host name is not enough: pods in the network of their host share it, and not the process ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started_at(pid: int) -> str:
    """Returns when a process of this machine started, or "" if there is none. Process ids are used
    again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _this_process() -> str:
    return f"{socket.gethostname()}/{_machine()}/{os.getpid()}/{_started_at(os.getpid())}"


class RunClaim:
    """The lease on a run and the claim under it.

    All methods except `renew_at_s` and `fence` do I/O. They raise StorageError, and LeaseLost if
    another controller holds the run.
    """

    def __init__(self, catalog: Catalog, lease_s: float, token: str | None) -> None:
        """`token`: see `CheckpointCommitter`."""
        self._catalog = catalog
        self._token = token or secrets.token_hex(8)
        lease = Lease(_this_process(), self._token, lease_s, _is_gone)
        self._holder = Holder(
            catalog.store, lease, time.monotonic, time.time, catalog.highest_fence
        )
        self._was_lost = False  # whether the next `resume` follows a loss of all workers
        self._at_most = sys.maxsize  # later steps are wrong
        self.fence = 0  # until a claim is made

    @property
    def renew_at_s(self) -> float:
        """When to renew the lease, in seconds of `time.monotonic`."""
        return self._holder.lease.renew_at_s()

    @property
    def is_held(self) -> bool:
        """Whether the lease was ever acquired."""
        return self._holder.lease.held is not None

    def acquire(self, tell: Callable[[str], None], wait: Callable[[float], bool]) -> None:
        """Acquires the lease. Waits for its holder, until `wait(seconds)` returns True because the
        run ended."""
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
            self._was_lost = before.state == "held"  # it was never released: its holder died

    def renew(self) -> None:
        self._holder.renew()

    def renew_unless_valid(self) -> None:
        if not self._holder.lease.is_valid(time.monotonic()):
            self._holder.renew()  # raises LeaseLost if another holds the run

    def release(self) -> None:
        self._holder.release()

    def resume(self) -> tuple[int | None, bool]:
        """Makes a claim that continues from the newest checkpoint. Everything that is committed
        from now on descends from it.

        Returns its step, None if there is none, and whether the run continues from it because all
        workers were lost.
        """
        self.fence = self._holder.renew().number
        names = [name for name in self._catalog.names() if name.step <= self._at_most]
        self._at_most = sys.maxsize
        self._catalog.claim(self.fence, names[-1] if names else None)
        after_loss, self._was_lost = self._was_lost and bool(names), True
        return (names[-1].step if names else None), after_loss

    def reject_after(self, step: int) -> None:
        """Ignores checkpoints after this step in the next call of `resume`."""
        self._at_most = step


def _is_gone(record: Record) -> bool:
    """Returns whether the holder was a process of this machine that no longer exists."""
    _, _, rest = record.holder.partition("/")
    machine, _, process = rest.partition("/")
    pid, _, started_at = process.partition("/")
    if not machine or machine != _machine() or not pid.isdecimal() or not started_at:
        return False
    return _started_at(int(pid)) != started_at
