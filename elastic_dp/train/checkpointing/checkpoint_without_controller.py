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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from elastic_dp.checkpoint.catalog import Catalog, CommitName
from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.lease import Held, Lease, Record
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.checkpoint.uploader import WRITES_IN_FLIGHT
from elastic_dp.errors import LeaseLost, StorageError


def commit_without_controller(
    catalog: Catalog,
    snapshot: Snapshot,
    metadata: CommitMetadata,
    *,
    worker: str,
    token: str,
    lease_s: float,
) -> str:
    """Writes and commits the snapshot. Returns the outcome as a text for the log. `token` is that
    of the controller's lease. `metadata`: what the worker knows of it. The function waits for the
    lease up to `lease_s`, or a multiple of that if there are other orphans."""
    lease = Lease(catalog.store, f"orphan {worker}", f"{token}.{worker}", lease_s)
    try:
        why = _take_lease(lease, token)
        if why:
            return f"no last checkpoint: {why}"
        try:
            return _commit(catalog, snapshot, metadata, lease, worker)
        finally:
            with contextlib.suppress(StorageError):
                lease.release()
    except (LeaseLost, StorageError, OSError) as error:
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
    catalog: Catalog,
    snapshot: Snapshot,
    metadata: CommitMetadata,
    lease: Lease,
    worker: str,
) -> str:
    names = catalog.names()
    newest: CommitName | None = names[-1] if names else None
    if newest is not None and newest.step >= snapshot.step:
        return f"step {newest.step} is already committed"
    fence = lease.fence
    catalog.claim(fence, newest)
    with ThreadPoolExecutor(WRITES_IN_FLIGHT, "last-checkpoint") as executor:
        names_of_all = snapshot.manifest(executor).headers
        blobs = write_blobs(
            catalog, snapshot, executor, writer=worker, members=[worker], names=names_of_all
        )
    if not lease.is_valid():
        lease.renew()  # raises LeaseLost if another worker was faster
    write_commit(catalog, [blobs], fence, replace(metadata, saved_at=time.time()))
    return f"checkpoint of step {snapshot.step} is committed, without a controller"
