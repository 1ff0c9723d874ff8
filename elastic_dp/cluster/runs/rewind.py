"""Rewinds a run that is not live: it goes on from an earlier checkpoint, without the rows of a bad
stretch of steps.

The decision is a claim in the history of the run's checkpoints (`checkpoint/catalog.py`), so each
later start has it, and the weights are the same bits on any fleet.
"""

from __future__ import annotations

import secrets
import time

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.lease import Held, Lease
from elastic_dp.cluster.runs.run_history import last_start, total_steps_of
from elastic_dp.config.field_checks import check_rewind
from elastic_dp.errors import CheckpointError, RunMismatch
from elastic_dp.run_record import delete_result
from elastic_dp.storage import Store

_LEASE_S = 60.0
MOST_STEPS = 10**11  # names of checkpoints have twelve digits


def rewind(url: str, to_step: int, leave_out: tuple[int, int] | None = None) -> int:
    """Lets the run in the folder `url` go on from its newest checkpoint of step `to_step` or
    earlier; 0: from the start. From there on, it leaves out the rows of steps `leave_out`, the
    first and the last one, in the run as it is. Later steps take their places.

    Returns the step. Raises SpecError for wrong numbers, CheckpointError without such a checkpoint,
    RunMismatch while the run is live, StorageError. Waits for the lease of a run that was killed.
    """
    store = Store(url)
    start, total = last_start(store), total_steps_of(url)
    grows = start is not None and bool(start.growth)
    check_rewind(to_step, leave_out, total=total, grows=grows)
    if leave_out is not None:
        leave_out = leave_out[0], min(leave_out[1], MOST_STEPS if total is None else total)
    catalog = Catalog(store)
    lease = Lease.of_this_process(store, secrets.token_hex(8), _LEASE_S, used=catalog.highest_fence)
    seen = None
    while isinstance(held := lease.acquire(), Held):
        if held.by != (seen := seen or held.by):
            raise RunMismatch(
                f"the run at {catalog.store.url} is live: {held.by.holder} holds it. End it first "
                "(`elastic-dp stop`)"
            )
        time.sleep(min(held.wait_s, 1.0))
    try:
        names = catalog.names()
        base = max((name for name in names if name.step <= to_step), default=None)
        if base is None and to_step and names:  # without any, the run begins again in any case
            there = ", ".join(str(name.step) for name in names) or "none"
            raise CheckpointError(
                f"the run at {catalog.store.url} has no checkpoint of step {to_step} or earlier; "
                f"it has: {there}. to_step=0 begins again; with a higher num_to_keep more are kept"
            )
        catalog.claim(lease.fence, base, leave_out)
        delete_result(url)
    finally:
        lease.release()
    return 0 if base is None else base.step
