"""The last checkpoint of a worker that has lost its controller: it writes and commits all of it
alone.

The worker briefly acts as the controller did. It takes the run's lease after that has expired,
makes a claim that continues from the newest checkpoint, writes all parts, commits them, and
releases the lease.

- It does so only if its own controller held the lease last. If the lease was renewed, released, or
  belongs to another controller, the run has ended or continues elsewhere, and the worker writes
  nothing.
- Several such workers take turns. A worker that finds a checkpoint as new as its own state writes
  nothing.
- A worker that is suspended in the middle does no harm: its claim is not part of the history of its
  successors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from elastic_dp.checkpoint.catalog import Catalog, CommitName
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs, write_commit
from elastic_dp.checkpoint.lease import Held, Lease, Record
from elastic_dp.errors import LeaseLost, StateError, StorageError


def commit_without_controller(
    catalog: Catalog,
    step: int,
    write: Callable[[], WrittenBlobs | None],
    *,
    worker: str,
    token: str,
    lease_s: float,
) -> str:
    """Commits what `write` writes, the whole state of `step`, unless it returns None. Returns the
    outcome as a text for the log. `token` is that of the controller's lease. The function waits for
    the lease up to `lease_s`, or a multiple of that if there are other orphans."""
    lease = Lease(catalog.store, f"orphan {worker}", f"{token}.{worker}", lease_s)
    try:
        why = _take_lease(lease, token)
        if why:
            return f"no last checkpoint: {why}"
        try:
            return _commit(catalog, step, write, lease)
        finally:
            with contextlib.suppress(StorageError):
                lease.release()
    except (LeaseLost, StateError, StorageError, OSError) as error:
        return f"no last checkpoint: {error}"


def _take_lease(lease: Lease, token: str) -> str:
    """Acquires the lease. Returns an empty text, or why this worker must not hold it."""
    first = None
    while isinstance(held := lease.acquire(), Held) and _may_follow(held.by, token):
        first = first or held.by
        if held.by.token == token and held.by != first:
            return "a controller leads the run"
        time.sleep(min(held.wait_s, 1.0))
    if lease.held is not None:
        if lease.followed is not None and _may_follow(lease.followed, token):
            return ""
        lease.release()
    return "the run has ended or continues elsewhere"


def _may_follow(record: Record, token: str) -> bool:
    """Returns whether our controller, or an orphan of it, held the lease last and still does."""
    return (record.token == token and record.state == "held") or record.token.startswith(
        f"{token}."
    )


def _commit(
    catalog: Catalog, step: int, write: Callable[[], WrittenBlobs | None], lease: Lease
) -> str:
    names = catalog.names()
    newest: CommitName | None = names[-1] if names else None
    if newest is not None and newest.step >= step:
        return f"step {newest.step} is already committed"
    fence = lease.fence
    catalog.claim(fence, newest)
    written = write()
    if written is None:
        return "no last checkpoint: the state cannot be stored"
    if not lease.is_valid():
        lease.renew()  # raises LeaseLost if another worker was faster
    write_commit(catalog, [written], fence, replace(written.metadata, saved_at=time.time()))
    return f"checkpoint of step {step} is committed, without a controller"
