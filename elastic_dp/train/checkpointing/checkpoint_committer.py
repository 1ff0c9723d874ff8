"""Commits checkpoints: one write makes a checkpoint of its parts when all of them are written.

`PendingCheckpoint` says when a checkpoint is complete.

- If members hold different states, the run fails once their checkpoint is committed, with an error
  that names what differs.
- The committer waits `_PATIENCE_S` for members that report nothing: a member that joined at this
  step received the state and writes nothing.
- If no member has a part any more, its checkpoint stays uncommitted. The run continues in any case.
- Everything runs on one thread, in the order of the calls; storage may take its time. The thread
  first acquires the lease on the run, so it neither finds nor commits anything while another
  controller holds the lease. If the lease is lost, it reports that.
- The thread also keeps the schedule, because it knows what checkpoints cost.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.checkpoint_writer import PendingCheckpoint, WrittenBlobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.lease import Held, Lease
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import (
    CheckpointError,
    FileDamaged,
    LeaseLost,
    StateError,
    StorageError,
)
from elastic_dp.threads import background
from elastic_dp.train.checkpointing.checkpoint_schedule import CheckpointSchedule

_AGAIN_S = 2.0
_REMEMBERED = 1_000  # steps whose metrics are kept
_PATIENCE_S = 5.0  # how long to wait for members that have not reported their parts
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CommitterActions:
    """Callbacks of a committer, provided by the controller of the run. All are called on the
    committer's thread."""

    # a worker is to write these blobs, too: the step, and their names
    request_blobs: Callable[[WorkerId, int, Sequence[str]], None]
    request_checkpoint: Callable[[], None]  # for one of the next steps
    tell: Callable[[str], None]  # a message for the user
    # the step and the seconds from its snapshot, 0 if not known; it may be called twice
    committed: Callable[[int, float], None]
    stand_down: Callable[[str], None]  # the reason: another controller holds the run
    # nothing will be found or committed: `check` failed, a file is damaged, or there is a bug
    fail: Callable[[Exception], None]
    # raises unless the run is this job's; called once, under the lease
    check: Callable[[], None] = lambda: None


class CheckpointCommitter:
    """The committer of one run."""

    def __init__(
        self,
        catalog: Catalog,
        config: CheckpointConfig,
        actions: CommitterActions,
        *,
        lease_s: float,
        token: str | None = None,
    ) -> None:
        """`token` identifies the holder of the lease. A controller that takes over continues with
        the same token, and orphans recognise the lease of their controller by it."""
        self._catalog, self._keep, self._actions = catalog, _keep_of(config), actions
        self._lease = Lease.of_this_process(
            catalog.store, token or secrets.token_hex(8), lease_s, used=catalog.highest_fence
        )
        self._fence = 0  # until a claim is made
        self._at_most = sys.maxsize  # later steps are wrong
        self._pending: dict[int, PendingCheckpoint] = {}  # by step
        self._committed_step = 0  # the newest
        self._lost: set[WorkerId] = set()
        self._abandoned: frozenset[WorkerId] = frozenset()  # lost in an abandoned lineage
        self._rejected = -1  # reports of this lineage or earlier ones are wrong
        self._schedule = CheckpointSchedule(config)
        self._logged: dict[int, dict[str, Any]] = {}  # by step
        self._logging = threading.Lock()
        self._warned_unranked = False
        self._closing = threading.Event()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = background("committer", self._work, actions.fail)
        self._thread.start()

    def training_began(self) -> None:
        """Starts the schedule of checkpoints by time."""
        self._tasks.put(lambda: self._schedule.began(time.monotonic()))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the metrics that a step logged, for the checkpoint of that step: an older value
        says nothing about its weights. Any thread may call it."""
        with self._logging:
            self._logged.setdefault(step, {}).update(metrics)
            if len(self._logged) > _REMEMBERED:
                del self._logged[next(iter(self._logged))]

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        self._tasks.put(lambda: self._add(worker, written))

    def lost(self, worker: WorkerId) -> None:
        self._tasks.put(lambda: self._lose(worker))

    def find(self, found: Callable[[int | None], None]) -> None:
        """Calls `found` with the step of the newest checkpoint, or None, however long the storage
        takes. The run continues from that checkpoint."""
        self._tasks.put(
            lambda: found(self._persist("the checkpoints cannot be listed", self._resume))
        )

    def take_over(self) -> None:
        """Continues in place of a controller that is gone. Its newest committed checkpoint counts
        as committed, even if members report their parts of it again."""

        def resume() -> None:
            newest: int | None = self._persist("the checkpoints cannot be listed", self._resume)
            self._committed_step = newest or 0

        self._tasks.put(resume)

    def reject(self, after_step: int, lineage_id: int) -> None:
        """Discards what was made after this step by members of lineage `lineage_id` or an earlier
        one. It is known to be wrong."""

        def reject() -> None:
            self._pending.clear()
            self._rejected, self._committed_step = lineage_id, 0
            self._at_most = after_step

        self._tasks.put(reject)

    def close(self) -> None:
        """Waits until everything reported so far is done, and ends the thread."""
        self._closing.set()
        self._tasks.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------------- thread

    def _work(self) -> None:
        try:
            self._persist("the run's lease cannot be acquired", self._acquire)
            if self._lease.held is None:
                return  # the run ended before the lease was acquired
            self._persist("the run's record cannot be read", self._actions.check)
            while (task := self._next()) is not None:
                task()
            for one in [*self._pending.values()]:
                self._advance(one, waits=False, at_end=True)
            self._persist("the run's lease cannot be released", self._lease.release)
        except LeaseLost as error:
            self._actions.stand_down(str(error))

    def _next(self) -> Callable[[], None] | None:
        """Returns the next task. Meanwhile it renews the lease and requests what is due."""
        while True:
            self._request_missing()
            self._request_due()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=self._idle_s())
            try:
                if time.monotonic() >= self._lease.renew_at_s():
                    self._lease.renew()
            except StorageError as error:
                self._actions.tell(f"the run's lease cannot be renewed: {error}")
                time.sleep(_AGAIN_S)

    def _idle_s(self) -> float:
        """Returns the time until something is due without a report."""
        now = time.monotonic()
        missing_at = [one.told_at + _PATIENCE_S for one in self._pending.values()]
        dues = [at for at in missing_at if at > now]
        return max(0.0, min(self._lease.renew_at_s(), self._schedule.due_at(), *dues) - now)

    def _persist(self, what: str, do: Callable[[], T]) -> T | None:
        """Retries `do` until it succeeds, whatever the storage answers, or the run ends."""
        while True:
            try:
                return do()
            except FileDamaged:  # only the user can fix it
                raise
            except (StorageError, OSError) as error:
                self._actions.tell(f"{what}: {error}")
                if self._closing.wait(_AGAIN_S):
                    return None

    # -------------------------------------------------------------------------------- begin

    def _acquire(self) -> None:
        """Acquires the lease. Waits for its holder, until the run ends."""
        said = ""
        while True:
            held = self._lease.acquire()
            if not isinstance(held, Held):
                return
            if held.by.holder != said:
                said = held.by.holder
                self._actions.tell(
                    f"the run is held by {said}; waiting for it, or for its lease to run out"
                )
            if self._closing.wait(min(held.wait_s, 1.0)):
                return

    def _resume(self) -> int | None:
        """Makes a claim that continues from the newest checkpoint: everything that is committed
        from now on descends from it. Returns its step, or None."""
        self._fence = self._lease.renew().number
        names = [name for name in self._catalog.names() if name.step <= self._at_most]
        self._at_most = sys.maxsize
        self._catalog.claim(self._fence, names[-1] if names else None)
        self._schedule.lost(time.monotonic())
        self._pending.clear()
        self._committed_step = 0  # the newest one by name may be damaged
        self._abandoned = frozenset(self._lost)
        return names[-1].step if names else None

    # -------------------------------------------------------------------------------- parts

    def _add(self, worker: WorkerId, written: WrittenBlobs) -> None:
        step = written.step
        if step <= self._committed_step:
            self._actions.committed(self._committed_step, 0.0)  # said once more
        elif worker not in self._abandoned and written.lineage_id > self._rejected:
            one = self._pending.setdefault(step, PendingCheckpoint(step))
            one.add(written, time.monotonic())
            self._advance(one)

    def _lose(self, worker: WorkerId) -> None:
        self._lost.add(worker)
        for one in [*self._pending.values()]:
            self._advance(one)

    def _request_missing(self) -> None:
        for one in [*self._pending.values()]:
            if time.monotonic() > one.told_at + _PATIENCE_S:
                self._advance(one, waits=False)

    def _request_due(self) -> None:
        now = time.monotonic()
        if now >= self._schedule.due_at():
            self._schedule.requested(now)
            self._actions.request_checkpoint()

    def _advance(self, one: PendingCheckpoint, *, waits: bool = True, at_end: bool = False) -> None:
        """Says what differs, requests what is missing, and commits what is complete. `waits`: for
        members that have not reported. `at_end`: members write nothing more."""
        if one.error is None and len(one.states()) > 1:
            if waits and one.silent(self._lost):
                return
            one.note_differences()
            self._actions.tell(f"checkpoint of step {one.step}: {one.error}")
        if not at_end:
            missing = not waits or one.error is not None
            for worker, names in one.requests(self._lost, all_missing=missing).items():
                self._actions.request_blobs(worker, one.step, names)
        if one.step not in self._pending or (waits and one.silent(self._lost)):
            return  # a later one was committed meanwhile, or members have not told their digests
        reports = one.whole(at_end=at_end)
        if reports is not None:
            self._commit(one, reports)

    def _commit(self, one: PendingCheckpoint, reports: Sequence[WrittenBlobs]) -> None:
        step = one.step
        self._pending = {s: other for s, other in self._pending.items() if s > step}
        try:
            if not self._lease.is_valid():
                self._lease.renew()  # raises LeaseLost if another controller holds the run
            metadata = self._about(step, one.written[0])
            write_commit(self._catalog, reports, self._fence, metadata)
            duration_s = time.monotonic() - one.began_at
            self._committed_step = step
            self._schedule.committed(one.stall_s, time.monotonic())
            self._actions.tell(f"checkpoint of step {step} is committed")
            self._warn_unranked(step, metadata)
            self._actions.committed(step, duration_s)
            if one.error is not None:
                self._actions.fail(one.error)
            self._catalog.retain(self._keep, self._fence, writing=frozenset(self._pending))
        except (StateError, StorageError, CheckpointError, OSError) as error:
            self._actions.tell(f"no checkpoint of step {step}: {error}")

    def _warn_unranked(self, step: int, metadata: CommitMetadata) -> None:
        """Warns once if a checkpoint lacks the metric by which the best one is chosen. A run that
        evaluates at other steps than it checkpoints would silently retain no best checkpoint."""
        name = self._keep.score_attribute
        if name is not None and name not in metadata.metrics and not self._warned_unranked:
            self._warned_unranked = True
            self._actions.tell(
                f"checkpoint of step {step} has no {name!r} and is not ranked by it: only "
                "what the loop body of the same step passes to ctx.log or ctx.checkpoint counts"
            )

    def _about(self, step: int, written: WrittenBlobs) -> CommitMetadata:
        """Returns the metadata of a step that is being committed."""
        with self._logging:
            logged = dict(self._logged.get(step, {}))
        return replace(
            written.metadata,
            metrics={k: float(v) for k, v in logged.items() if isinstance(v, int | float)},
            saved_at=time.time(),
        )


def _keep_of(config: CheckpointConfig) -> Keep:
    return Keep(
        config.num_to_keep,
        config.keep_every,
        config.checkpoint_score_attribute,
        config.checkpoint_score_order,
    )
