"""Parts become a checkpoint: one write commits it when all of them are there
(pending_checkpoints.py says when).

- Members that hold different states are told by their digests, and nothing is committed then. Who
  is silent for `_PATIENCE_S` is waited for no longer: one that joined at this step was given the
  state and writes nothing.
- A part that nobody has any more leaves its checkpoint uncommitted. The run goes on in any case.
- All of it happens on one thread of its own, in the order in which it was told; storage may take
  its time. It begins with the lease on the run, so nothing is found or committed while another
  holds it; and a lease that is lost is told.
- That thread also keeps the schedule (checkpoint_schedule.py): it knows what checkpoints cost and
  how often everyone was lost.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.checkpoint_writer import write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import CheckpointError, FileDamaged, LeaseLost, StateError, StorageError
from elastic_dp.threads import background
from elastic_dp.train.checkpointing.checkpoint_schedule import CheckpointSchedule
from elastic_dp.train.checkpointing.logged_metrics import LoggedMetrics
from elastic_dp.train.checkpointing.pending_checkpoints import (
    AlreadySealed,
    PartsRequest,
    PendingCheckpoint,
    PendingCheckpoints,
)
from elastic_dp.train.checkpointing.run_claim import RunClaim
from elastic_dp.train.controller_link import WrittenParts

_AGAIN_S = 2.0
_PATIENCE_S = 5.0  # with members that have not told what they wrote
T = TypeVar("T")


def _nothing_to_check() -> None:
    pass


@dataclass(frozen=True, slots=True)
class CommitterActions:
    """What a committer has done by whoever leads the run. All are called on the committer's
    thread."""

    request_parts: Callable[[WorkerId, int, Sequence[int]], None]  # (worker, step, parts)
    request_checkpoint: Callable[[], None]  # of one of the next steps
    tell: Callable[[str], None]  # whoever follows the run
    committed: Callable[[int], None]  # the checkpoint of this step is; may be told twice
    stand_down: Callable[[str], None]  # another holds the run: why
    fail: Callable[
        [Exception], None
    ]  # nothing is found or committed any more: `check`, damage, or a bug
    check: Callable[[], None] = (
        _nothing_to_check  # whether the run is this job's; once, with the lease
    )


class CheckpointCommitter:
    """Of one run."""

    def __init__(
        self,
        catalog: Catalog,
        config: CheckpointConfig,
        actions: CommitterActions,
        *,
        lease_s: float,
        token: str | None = None,
    ) -> None:
        """`token`: of who holds the lease; who takes over goes on with it, and orphans know their
        controller's by it."""
        self._catalog, self._keep, self._actions = catalog, _keep_of(config), actions
        self._claim = RunClaim(catalog, lease_s, token)
        self._pending = PendingCheckpoints()
        self._schedule = CheckpointSchedule(config, time.monotonic())
        self._metrics = LoggedMetrics()
        self._warned_unranked = False
        self._closing = threading.Event()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = background("committer", self._work, actions.fail)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """What a checkpoint of this step is to know."""
        self._metrics.add(step, metrics)

    def wrote(self, worker: WorkerId, written: WrittenParts) -> None:
        self._tasks.put(lambda: self._add(worker, written))

    def lost(self, worker: WorkerId) -> None:
        self._tasks.put(lambda: self._lose(worker))

    def find(self, found: Callable[[int | None], None]) -> None:
        """Call with the step of the newest checkpoint, or None, however long the storage takes. The
        run goes on from it."""
        self._tasks.put(
            lambda: found(self._persist("the checkpoints cannot be listed", self._resume))
        )

    def take_over(self) -> None:
        """Go on in place of one that is gone: what it committed last is committed, though members
        tell of it once more."""

        def resume() -> None:
            newest: int | None = self._persist("the checkpoints cannot be listed", self._resume)
            self._pending.committed(newest or 0)

        self._tasks.put(resume)

    def reject(self, after_step: int, lineage_id: int) -> None:
        """What was made after this step, by those who began in generation `lineage_id` or before,
        is wrong."""

        def reject() -> None:
            self._pending.reject(lineage_id)
            self._claim.reject_after(after_step)

        self._tasks.put(reject)

    def close(self) -> None:
        """When all that was told is done."""
        self._closing.set()
        self._tasks.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------------- thread

    def _work(self) -> None:
        try:
            self._persist("the run's lease cannot be had", self._acquire)
            if not self._claim.is_held:
                return  # the run is over before it was ours
            self._persist("the run's record cannot be read", self._actions.check)
            self._persist("the newest checkpoint cannot be read", self._resume_schedule)
            while (task := self._next()) is not None:
                task()
            for one in self._pending.all():
                self._seal_if_complete(one, waits=False)
            self._persist("the run's lease cannot be given up", self._claim.release)
        except LeaseLost as error:
            self._actions.stand_down(str(error))

    def _next(self) -> Callable[[], None] | None:
        """The next task; in between the lease is renewed, and what is due is requested."""
        while True:
            self._request_missing()
            self._request_due()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=self._idle_s())
            try:
                if time.monotonic() >= self._claim.renew_at_s:
                    self._claim.renew()
            except StorageError as error:
                self._actions.tell(f"the run's lease cannot be renewed: {error}")
                time.sleep(_AGAIN_S)

    def _idle_s(self) -> float:
        """Until something is due that nobody tells."""
        now = time.monotonic()
        missing_at = [one.told_at + _PATIENCE_S for one in self._pending.all()]
        dues = [at for at in missing_at if at > now]
        return max(0.0, min(self._claim.renew_at_s, self._schedule.due_at(now), *dues) - now)

    def _persist(self, what: str, do: Callable[[], T]) -> T | None:
        """Until it is done, whatever the storage says, or the run ends."""
        while True:
            try:
                return do()
            except FileDamaged:  # nobody but a person can fix it
                raise
            except (StorageError, OSError) as error:
                self._actions.tell(f"{what}: {error}")
                if self._closing.wait(_AGAIN_S):
                    return None

    # -------------------------------------------------------------------------------- begin

    def _acquire(self) -> None:
        self._claim.acquire(self._actions.tell, self._closing.wait)

    def _resume_schedule(self) -> None:
        with contextlib.suppress(
            CheckpointError
        ):  # of a later version: whoever restores it says so
            newest = next(self._catalog.commits(), None)
            if newest is not None:
                metadata = newest.metadata
                self._schedule.resume(metadata.losses, metadata.observed_s, time.monotonic())

    def _resume(self) -> int | None:
        newest = self._claim.resume()
        if newest.after_loss:
            self._schedule.lost(time.monotonic())
        self._pending.restart()
        return newest.step

    # -------------------------------------------------------------------------------- parts

    def _add(self, worker: WorkerId, written: WrittenParts) -> None:
        match self._pending.add(worker, written, time.monotonic()):
            case AlreadySealed(step):
                self._actions.committed(step)
            case PendingCheckpoint() as one:
                self._request(self._pending.requests_for_lost(one))
                self._seal_if_complete(one)

    def _lose(self, worker: WorkerId) -> None:
        self._pending.lose(worker)
        for one in self._pending.all():
            self._request(self._pending.requests_after_loss(one, worker))
            self._seal_if_complete(one)

    def _request_missing(self) -> None:
        for one in self._pending.all():
            if time.monotonic() > one.told_at + _PATIENCE_S:
                self._request(self._pending.requests_for_missing(one))
                self._seal_if_complete(one, waits=False)

    def _request_due(self) -> None:
        now = time.monotonic()
        if now >= self._schedule.due_at(now):
            self._schedule.requested(now)
            self._actions.request_checkpoint()

    def _request(self, requests: Sequence[PartsRequest]) -> None:
        for one in requests:
            self._actions.request_parts(one.worker, one.step, one.parts)

    # --------------------------------------------------------------------------------- commit
    # record

    def _seal_if_complete(self, one: PendingCheckpoint, *, waits: bool = True) -> None:
        if self._pending.is_complete(one, waits=waits):
            self._commit(one)

    def _commit(self, one: PendingCheckpoint) -> None:
        step = one.step
        self._pending.begin_seal(step)
        try:
            self._claim.renew_unless_valid()
            metadata = self._about(step, one.first)
            write_commit(self._catalog, one.manifest, one.written, self._claim.fence, metadata)
            self._pending.committed(step)
            self._schedule.committed(one.stall_s, time.monotonic())
            self._actions.tell(f"checkpoint of step {step} is committed")
            self._warn_unranked(step, metadata)
            self._actions.committed(step)
            self._catalog.retain(self._keep, self._claim.fence, writing=self._pending.steps)
        except (StateError, StorageError, CheckpointError, OSError) as error:
            self._actions.tell(f"no checkpoint of step {step}: {error}")
            if isinstance(error, StateError):
                self._pending.refuse(step)

    def _warn_unranked(self, step: int, metadata: CommitMetadata) -> None:
        """Once: a run that evaluates at other steps than it checkpoints would keep no best one,
        without a word."""
        name = self._keep.score_attribute
        if name is not None and name not in metadata.metrics and not self._warned_unranked:
            self._warned_unranked = True
            self._actions.tell(
                f"checkpoint of step {step} has no {name!r} and is not ranked by it: only "
                "what the body of its own "
                "step logs with ctx.log, or gives to ctx.checkpoint, counts"
            )

    def _about(self, step: int, written: WrittenParts) -> CommitMetadata:
        """What is known of a step that is being committed."""
        losses, observed_s = self._schedule.observed(time.monotonic())
        return CommitMetadata(
            job=written.job,
            data=written.data,
            versions=written.versions,
            metrics=self._metrics.of(step),
            naming=written.naming,
            saved_at=time.time(),
            losses=losses,
            observed_s=observed_s,
        )


def _keep_of(config: CheckpointConfig) -> Keep:
    return Keep(
        config.num_to_keep,
        config.keep_every,
        config.checkpoint_score_attribute,
        config.checkpoint_score_order,
    )
