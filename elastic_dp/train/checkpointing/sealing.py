"""Parts become a checkpoint: who wrote what is counted, what is missing is asked for, and one write seals it.

- A checkpoint is sealed when every part of one state was written, by whomever, and each member that is there has told
  its digest, also one that had nothing to write. Members that hold different states are told by their digests, and
  nothing is sealed then. Who is silent for `_PATIENCE_S` after that is waited for no longer: one that joined at this
  step was given the state and keeps nothing.
- A part whose writer is lost is asked of another member; one that nobody has any more leaves its checkpoint unsealed,
  and says so. The run goes on in any case.
- Steps are sealed in their order: what is told late of a step before the newest seal is of no use to anybody.
- All of it happens on one thread of its own, in the order in which it was told; storage may take its time. It begins
  with the lease on the run, so nothing is found or sealed while another holds it; and a lease that is lost is told.
- That thread also keeps the schedule (checkpoint_schedule.py): it knows what checkpoints cost and how often everyone was lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.lease import Held, Holder, Lease, Record
from elastic_dp.checkpoint.seal import About, Manifest
from elastic_dp.checkpoint.writing import Share, missing, write_seal
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import CheckpointError, FileDamaged, LeaseLost, StateError, StorageError
from elastic_dp.spec import CheckpointConfig
from elastic_dp.threads import background
from elastic_dp.train.checkpointing.checkpoint_schedule import CheckpointSchedule
from elastic_dp.train.controller_link import WrittenParts

_AGAIN_S = 2.0
_PATIENCE_S = 5.0  # with members that have not told what they wrote
_REMEMBERED = 1_000  # steps of which it is known what they logged
_HOST = socket.gethostname()
T = TypeVar("T")


@dataclass
class _Unsealed:
    """A checkpoint of which some parts were written."""

    first: WrittenParts
    shares: dict[WorkerId, list[Share]] = field(default_factory=dict)
    asked: dict[int, WorkerId] = field(default_factory=dict)  # of whom each part was asked
    stall_s: float = 0.0
    told_at: float = 0.0

    @property
    def manifest(self) -> Manifest:
        return self.first.manifest

    @property
    def written(self) -> list[Share]:
        return [share for shares in self.shares.values() for share in shares]


class Sealer:
    """Of one run. `ask(worker, step, parts)` has parts written, `want()` a checkpoint of one of the next steps;
    `tell(text)` is for whoever follows the run."""

    def __init__(
        self,
        catalog: Catalog,
        config: CheckpointConfig,
        *,
        lease_s: float,
        ask: Callable[[WorkerId, int, Sequence[int]], None],
        want: Callable[[], None],
        tell: Callable[[str], None],
        on_seal: Callable[[int], None],
        stand_down: Callable[[str], None],
        fail: Callable[[Exception], None],
        check: Callable[[], None] = lambda: None,
        token: str | None = None,
    ) -> None:
        """`check`: whether the run is this job's, called once under the lease. `fail`: nothing is found or sealed any
        more, for what `check` raised, a damaged file that somebody must look at, or a bug. `token`: of who holds the lease; who takes over goes on with it, and orphans know their controller's by it."""
        self._catalog, self._keep = catalog, _keep_of(config)
        self._ask, self._want, self._tell = ask, want, tell
        self._on_seal, self._stand_down, self._check = on_seal, stand_down, check
        self._fence = 0  # until a claim is made
        self._token = token or secrets.token_hex(8)
        lease = Lease(f"{_HOST}/{os.getpid()}", self._token, lease_s, _is_gone)
        self._holder = Holder(
            catalog.store, lease, time.monotonic, time.time, catalog.highest_fence
        )
        self._schedule = CheckpointSchedule(config, time.monotonic())
        self._was_lost = False  # whether going on from a checkpoint means that everyone was lost
        self._metrics = _Metrics()
        self._said_unranked = False
        self._closing = threading.Event()
        self._unsealed: dict[int, _Unsealed] = {}
        self._sealed = 0
        self._at_most, self._rejected = sys.maxsize, -1
        self._refused: set[int] = set()  # steps of which the members hold different states
        self._lost: set[WorkerId] = set()
        self._given_up: frozenset[WorkerId] = frozenset()  # of a lineage that was left
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = background("sealer", self._work, fail)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """What a checkpoint of this step is to know."""
        self._metrics.add(step, metrics)

    def wrote(self, worker: WorkerId, written: WrittenParts) -> None:
        self._tasks.put(lambda: self._count(worker, written))

    def lost(self, worker: WorkerId) -> None:
        self._tasks.put(lambda: self._lose(worker))

    def find(self, found: Callable[[int | None], None]) -> None:
        """Call with the step of the newest checkpoint, or None, however long the storage takes. The run goes on from it."""
        self._tasks.put(
            lambda: found(self._persist("the checkpoints cannot be listed", self._go_on))
        )

    def take_over(self) -> None:
        """Go on in place of one that is gone: what it sealed last is sealed, though members tell of it once more."""

        def go_on() -> None:
            newest: int | None = self._persist("the checkpoints cannot be listed", self._go_on)
            self._sealed = newest or 0

        self._tasks.put(go_on)

    def reject(self, after_step: int, founded: int) -> None:
        """What was made after this step, by those who began in generation `founded` or before, is wrong."""
        self._tasks.put(lambda: self._reject(after_step, founded))

    def close(self) -> None:
        """When all that was told is done."""
        self._closing.set()
        self._tasks.put(None)
        self._thread.join()

    # ------------------------------------------------------------------------------ private

    def _work(self) -> None:
        try:
            self._persist("the run's lease cannot be had", self._acquire)
            if self._holder.lease.held is None:
                return  # the run is over before it was ours
            self._persist("the run's record cannot be read", self._check)
            self._persist("the newest checkpoint cannot be read", self._resume_pace)
            while (task := self._next()) is not None:
                task()
            for step, one in self._unsealed.items():
                self._seal_if_whole(step, one, waits=False)
            self._persist("the run's lease cannot be given up", self._holder.release)
        except LeaseLost as error:
            self._stand_down(str(error))

    def _next(self) -> Callable[[], None] | None:
        """The next task; in between the lease is renewed, and what is due is asked for."""
        while True:
            self._request_missing()
            self._keep_pace()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=self._idle_s())
            try:
                if time.monotonic() >= self._holder.lease.renew_at_s():
                    self._holder.renew()
            except StorageError as error:
                self._tell(f"the run's lease cannot be renewed: {error}")
                time.sleep(_AGAIN_S)

    def _idle_s(self) -> float:
        """Until something is due that nobody tells."""
        now = time.monotonic()
        hurry_at = [one.told_at + _PATIENCE_S for one in self._unsealed.values()]
        dues = [at for at in hurry_at if at > now]
        return max(
            0.0, min(self._holder.lease.renew_at_s(), self._schedule.due_at(now), *dues) - now
        )

    def _keep_pace(self) -> None:
        now = time.monotonic()
        if now >= self._schedule.due_at(now):
            self._schedule.asked(now)
            self._want()

    def _acquire(self) -> None:
        """The lease; waits for whoever holds it."""
        said = ""
        while True:
            before = self._holder.newest()
            held = self._holder.acquire()
            if not isinstance(held, Held):
                break
            if held.by.holder != said:
                said = held.by.holder
                self._tell(
                    f"the run is held by {said}; waiting for it, or for its lease to run out"
                )
            if self._closing.wait(min(held.wait_s, 1.0)):
                return
        if before is not None and before.token != self._token:
            self._was_lost = before.state == "held"  # it was never given up: its holder died

    def _resume_pace(self) -> None:
        with contextlib.suppress(
            CheckpointError
        ):  # of a later version: whoever restores it says so
            newest = next(self._catalog.seals(), None)
            if newest is not None:
                about = newest.about
                self._schedule.resume(about.losses, about.observed_s, time.monotonic())

    def _go_on(self) -> int | None:
        """From the newest checkpoint, under a claim of our own: what is sealed from now on descends from it."""
        self._fence = self._holder.renew().number
        names = [name for name in self._catalog.names() if name.step <= self._at_most]
        self._at_most = sys.maxsize
        self._catalog.claim(self._fence, names[-1] if names else None)
        if self._was_lost and names:
            self._schedule.lost(time.monotonic())
        self._was_lost = True
        self._unsealed.clear()
        self._sealed = 0  # what is newest by name may be damaged
        self._refused.clear()
        self._given_up = frozenset(self._lost)
        return names[-1].step if names else None

    def _persist(self, what: str, do: Callable[[], T]) -> T | None:
        """Until it is done, whatever the storage says, or the run ends."""
        while True:
            try:
                return do()
            except FileDamaged:  # nobody but a person can mend it
                raise
            except (StorageError, OSError) as error:
                self._tell(f"{what}: {error}")
                if self._closing.wait(_AGAIN_S):
                    return None

    def _reject(self, after_step: int, founded: int) -> None:
        self._unsealed.clear()
        self._at_most, self._rejected, self._sealed = after_step, founded, 0

    def _count(self, worker: WorkerId, written: WrittenParts) -> None:
        share = written.share
        given_up = worker in self._given_up or written.founded <= self._rejected
        if given_up or share.step in self._refused:
            return
        if share.step <= self._sealed:
            self._on_seal(self._sealed)  # whoever asked for it again hears it again
            return
        one = self._unsealed.setdefault(share.step, _Unsealed(written))
        one.stall_s = max(one.stall_s, written.stall_s)
        one.shares.setdefault(worker, []).append(share)
        one.told_at = time.monotonic()
        for lost in self._lost.intersection(one.first.members):
            self._ask_for(share.step, one, self._owed(one, lost))
        self._seal_if_whole(share.step, one)

    def _seal_if_whole(self, step: int, one: _Unsealed, waits: bool = True) -> None:
        """`waits`: for the digests of those who are there and have not told."""
        if step not in self._unsealed:
            return  # a later one was sealed meanwhile
        silent = set(one.first.members).difference(one.shares, self._lost)
        if not missing(one.manifest, one.written) and not (silent and waits):
            self._seal(step, one)

    def _lose(self, worker: WorkerId) -> None:
        self._lost.add(worker)
        for step, one in self._unsealed.items():
            again = [part for part, asked in one.asked.items() if asked == worker]
            for part in again:
                del one.asked[part]
            owed = self._owed(one, worker) if worker in one.first.members else ()
            self._ask_for(step, one, [*again, *owed])
            self._seal_if_whole(step, one)

    def _owed(self, one: _Unsealed, worker: WorkerId) -> Sequence[int]:
        members = one.first.members
        return one.manifest.layout.share(members.index(worker), len(members))

    def _ask_for(self, step: int, one: _Unsealed, parts: Sequence[int]) -> None:
        """Of a member that is there and has told that it holds this state; twice written does no harm."""
        there = [worker for worker in one.shares if worker not in self._lost]
        absent = set(missing(one.manifest, one.written)).intersection(parts).difference(one.asked)
        if there and absent:
            one.asked.update(dict.fromkeys(absent, there[0]))
            self._ask(there[0], step, sorted(absent))

    def _request_missing(self) -> None:
        """What nobody owes is missing, too, where members shared the writing by two memberships."""
        for step, one in self._unsealed.items():
            if time.monotonic() > one.told_at + _PATIENCE_S:
                self._ask_for(step, one, range(len(one.manifest.layout.parts)))
                self._seal_if_whole(step, one, waits=False)

    def _seal(self, step: int, one: _Unsealed) -> None:
        self._unsealed = {s: other for s, other in self._unsealed.items() if s > step}
        try:
            if not self._holder.lease.is_valid(time.monotonic()):
                self._holder.renew()  # or learn that another holds the run
            about = self._about(step, one.first)
            write_seal(self._catalog, one.manifest, one.written, self._fence, about)
            self._sealed = step
            self._schedule.sealed(one.stall_s, time.monotonic())
            self._tell(f"checkpoint of step {step} is sealed")
            self._say_unranked(step, about)
            self._on_seal(step)
            self._catalog.retain(self._keep, self._fence, writing=self._unsealed)
        except (StateError, StorageError, CheckpointError, OSError) as error:
            self._tell(f"no checkpoint of step {step}: {error}")
            if isinstance(error, StateError):
                self._refused.add(step)

    def _say_unranked(self, step: int, about: About) -> None:
        """Once: a run that evaluates at other steps than it checkpoints would keep no best one, without a word."""
        name = self._keep.score_attribute
        if name is not None and name not in about.metrics and not self._said_unranked:
            self._said_unranked = True
            self._tell(
                f"checkpoint of step {step} has no {name!r} and is not ranked by it: only what the body of its own "
                "step logs with ctx.log, or gives to ctx.checkpoint, counts"
            )

    def _about(self, step: int, written: WrittenParts) -> About:
        """What is known of a step that is being sealed."""
        losses, observed_s = self._schedule.observed(time.monotonic())
        return About(
            job=written.job,
            data=written.data,
            versions=written.versions,
            metrics=self._metrics.of(step),
            naming=written.naming,
            saved_at=time.time(),
            losses=losses,
            observed_s=observed_s,
        )


class _Metrics:
    """What the body of each step logged. A checkpoint has the values of its own step and of no other: an older value
    says nothing about its weights, and would rank it by those of another step."""

    def __init__(self) -> None:
        self._logged: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Any thread may, and every worker: what they log is the same."""
        with self._lock:
            self._logged.setdefault(step, {}).update(metrics)
            if len(self._logged) > _REMEMBERED:
                del self._logged[next(iter(self._logged))]

    def of(self, step: int) -> dict[str, float]:
        with self._lock:
            logged = dict(self._logged.get(step, {}))
        return {k: float(v) for k, v in logged.items() if isinstance(v, int | float)}


def _keep_of(config: CheckpointConfig) -> Keep:
    return Keep(
        config.num_to_keep,
        config.keep_every,
        config.checkpoint_score_attribute,
        config.checkpoint_score_order,
    )


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
