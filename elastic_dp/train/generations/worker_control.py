"""What a worker's control thread tells its training thread, and the one lock between them.

The control thread may call at any time, also while the training thread is inside a collective or is
about to commit. Three invariants hold. A step commits only through `commit`, which excludes
`abort`: before it the worker is at step k and cannot apply k+1 any more, after it the worker is at
k+1. A worker that left a generation never returns to it. Of several planned ends of one generation
the smallest counts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_dp.coordinator.messages import Membership, WorkerId
from elastic_dp.errors import GroupAborted


class Released(BaseException):
    """Ends the user's train function in a worker that is released. It is not an Exception, so user
    code does not catch it."""


@dataclass(frozen=True, slots=True)
class ConfirmLeft:
    """The controller asks a waiting worker to confirm that it has left `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Orphaned:
    """No controller has answered for `orphan_timeout_s`."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Write a checkpoint of the state held since `generation`, with the other `writers`."""

    generation: int
    writers: tuple[WorkerId, ...]


_LOOK_AGAIN_S = 0.02
ORPHANED = "no controller has answered for orphan_timeout_s"


@dataclass
class WorkerControl:
    """The control thread calls the methods above the line, the training thread those below it."""

    lease_s: float = math.inf
    orphan_timeout_s: float = math.inf
    # When the last heartbeat that a controller answered was sent (of `time.monotonic`).
    renewed_at: Callable[[], float] | None = None
    release_reason: str | None = None
    idle: bool = False  # the training thread only waits, so a planned end is immediate
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _generation: int = 0  # the one the training thread is in, or was in last
    _inside: bool = False
    _ended: int = 0  # this generation and all before it are over
    _planned: dict[int, int] = field(default_factory=dict)  # generation -> last step
    _attempting: int | None = None
    _asked: int = 0  # the generation to confirm in the next `wait`
    _to_enter: Membership | None = None
    _checkpoint: CheckpointState | None = None
    _stop: str | None = None
    checkpoint_wanted: bool = False  # until the members agree on one
    # This worker's last upload is late: while it is, no member takes the next checkpoint.
    checkpoint_late: bool = False
    # The signal that the user's own process received: the loop ends at its head.
    interrupted: int = 0
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    def form(self, membership: Membership) -> None:
        with self._changed:
            newest = max(self._generation, self._to_enter.generation if self._to_enter else 0)
            if membership.generation > max(newest, self._ended):
                self._to_enter = membership
                self._planned = {
                    g: s for g, s in self._planned.items() if g >= membership.generation
                }
                if self._inside:  # the controller forms a new one only after the present one ended
                    self._end(membership.generation - 1)
                self._changed.notify_all()

    def abort(self, generation: int) -> None:
        with self._changed:
            self._asked = max(self._asked, generation)
            self._end(generation)
            self._changed.notify_all()

    def end(self, generation: int, after_step: int) -> None:
        with self._changed:
            if generation < self._generation or generation <= self._ended:
                self._asked = max(self._asked, generation)
                self._changed.notify_all()
                return
            last = min(after_step, self._planned.get(generation, after_step))
            self._planned[generation] = last
            if generation != self._generation or not self._inside:
                self._asked = max(self._asked, generation)
                self._changed.notify_all()
            elif self.idle or (self._attempting is not None and self._attempting > last):
                self._end(generation)  # the other members did not enter this step

    def release(self, reason: str) -> None:
        with self._changed:
            self.release_reason = reason
            self._end(self._generation)
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        with self._changed:
            self._stop = self._stop or str(reason or "asked without a reason")

    def request_checkpoint(self) -> None:
        """Requests a checkpoint of one of the next steps: the next header tells all members."""
        self.checkpoint_wanted = True

    def checkpoint_state(self, generation: int, writers: tuple[WorkerId, ...]) -> None:
        with self._changed:
            self._checkpoint = CheckpointState(generation, writers)
            self._changed.notify_all()

    def _end(self, generation: int) -> None:
        self._ended = max(self._ended, generation)
        if self._inside and self._generation <= self._ended:
            for call in self._at_end:
                call()

    # ------------------------------------------------------------------- training thread

    @property
    def stop_reason(self) -> str | None:
        return self._stop

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes of this worker, in order. All of them call it."""
        return [payload]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """The first process of this worker gives each of the others its part, in order. Returns the
        part of this process. All of them call it."""
        return b""

    def confirm_processes(self) -> None:
        """Returns if all processes of this worker live. If not, it ends."""

    def agreed(self, value: bool) -> bool:
        """Returns the value of the worker's first process. All of its processes call it."""
        return value

    def orphaned_in_s(self) -> float:
        """Returns the seconds until this worker counts as orphaned if no controller answers. 0 or
        less: it is orphaned."""
        if self.renewed_at is None:
            return threading.TIMEOUT_MAX
        left_s = self.renewed_at() + self.orphan_timeout_s - time.monotonic()
        return min(left_s, threading.TIMEOUT_MAX)

    def wait(self) -> Membership | ConfirmLeft | CheckpointState | Orphaned:
        """Waits outside of every generation for what to do next. Raises Released."""
        with self._changed:
            while True:
                if self.release_reason is not None:
                    raise Released(self.release_reason)
                if self._asked:
                    asked, self._asked = self._asked, 0
                    return ConfirmLeft(asked)
                checkpoint, self._checkpoint = self._checkpoint, None
                if checkpoint is not None and checkpoint.generation >= self._generation:
                    return checkpoint
                left_s = self.orphaned_in_s()
                if left_s <= 0:
                    return Orphaned()
                call = self._to_enter
                if call is None or call.generation <= self._ended:
                    self._to_enter = None
                    self._changed.wait(left_s)
                elif self._lease_ran_out():
                    self._changed.wait(
                        _LOOK_AGAIN_S
                    )  # a controller was unreachable and should answer soon
                else:
                    self._to_enter = None
                    self._enter(call)
                    return call

    def _enter(self, membership: Membership) -> None:
        self._generation, self._inside = membership.generation, True
        self._at_end = []

    def wait_for_release(self, timeout_s: float) -> None:
        """Waits for the release, up to `timeout_s`. Raises Released."""
        with self._changed:
            if self._changed.wait_for(lambda: self.release_reason is not None, timeout_s):
                raise Released(self.release_reason)

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls this when the present generation ends, on any thread."""
        with self._changed:
            self._at_end.append(call)
            if self._ended >= self._generation:
                call()

    def wait_until_ended(self) -> bool:
        """Waits until the present generation ends, when this worker has nothing left to do in it.
        Returns False if no controller is expected any more."""
        ended = threading.Event()
        self.at_end(ended.set)
        self.idle = True
        orphaned = False
        while not orphaned and not ended.wait(self.orphaned_in_s()):
            orphaned = self.orphaned_in_s() <= 0
        self.idle = False
        return not orphaned

    def may_attempt(self, step: int) -> str | None:
        """Returns None if `step` may be attempted, or why this generation ends at this boundary. An
        evaluation in the body of step k attempts k: a planned end before k aborts it, one at k does
        not."""
        with self._changed:
            if self.release_reason is not None:
                raise Released(self.release_reason)
            reason = self._over()
            if reason is None and step > self._planned.get(self._generation, step):
                reason = "planned end"
            if reason is None:
                self._attempting = step
            return reason

    def may_continue(self) -> None:
        """Raises GroupAborted if the generation has ended. Called between micro-batches."""
        if self._ended >= self._generation:
            raise GroupAborted("the generation was ended")

    def commit(self) -> None:
        """Commits the step, or raises GroupAborted: afterwards it cannot be committed any more."""
        with self._changed:
            reason = self._over()
            if reason is not None:
                raise GroupAborted(reason)
            self._attempting = None

    def leave(self) -> int:
        """Leaves the present generation for good and returns its number. Clears the requests that
        this answers."""
        with self._changed:
            self._inside, self._attempting = False, None
            self._ended = max(self._ended, self._generation)
            if self._asked <= self._generation:
                self._asked = 0
            self._at_end = []
            return self._generation

    def _over(self) -> str | None:
        if self._ended >= self._generation:
            return "the generation was ended"
        if self._lease_ran_out():
            return "the lease ran out: no controller has answered"
        return None

    def _lease_ran_out(self) -> bool:
        return self.renewed_at is not None and time.monotonic() > self.renewed_at() + self.lease_s
