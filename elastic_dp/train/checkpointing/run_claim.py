"""The lease on a run, as a process of this machine holds it: whoever finds it knows whether that
process is still there."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Holder, Lease, Record


def _machine() -> str:
    """Returns a name of this boot of this machine and of this namespace of process ids, or "". A
    host name is not enough: pods in the network of their host share it, and not the process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started_at(pid: int) -> str:
    """Returns when a process of this machine started, or "". Process ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _this_process() -> str:
    return f"{socket.gethostname()}/{_machine()}/{os.getpid()}/{_started_at(os.getpid())}"


def holder_of(catalog: Catalog, lease_s: float, token: str) -> Holder:
    """Returns the holder of a run's lease in this process, which has not acquired it yet."""
    lease = Lease(_this_process(), token, lease_s, _is_gone)
    return Holder(catalog.store, lease, time.monotonic, time.time, catalog.highest_fence)


def _is_gone(record: Record) -> bool:
    """Returns whether the holder was a process of this machine that no longer exists."""
    _, _, rest = record.holder.partition("/")
    machine, _, process = rest.partition("/")
    pid, _, started_at = process.partition("/")
    if not machine or machine != _machine() or not pid.isdecimal() or not started_at:
        return False
    return _started_at(int(pid)) != started_at
