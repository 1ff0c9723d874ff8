"""Connects the device communicator of one generation while the generation already works.

An attempt waits until every member has begun it, then connects, within a limit of its own. If it
fails on any member, the generation goes on without the communicator: the members agree in a step's
header that the attempt is over, and begin the next one after a pause.

A communicator that connects belongs to the thread that connects it. Torch holds its lock until it
is connected, an abort needs that lock, and so no other thread calls it before. The thread aborts it
itself, once the library has given up; nobody waits for that.

The first communicator of a process loads the kernels of all collectives, which takes seconds. A
joiner does that before it joins, with a communicator of its own (`load_kernels`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from elastic_dp.device.accelerator import Accelerator, Communicator
from elastic_dp.device.faults import FaultKind, fault_of
from elastic_dp.distributed.abort_limit import abort_in_background
from elastic_dp.errors import FormingFailed, GroupAborted
from elastic_dp.threads import background

# NCCL takes seconds for 32 members, and much longer where it loads its kernels first.
CONNECTING_LIMIT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0  # before the next attempt; doubled each time
_POLL_S = 0.02
# A launch takes microseconds. One that finds no room on a device that spins ends by the abort only.
_LAUNCH_LIMIT_S = 1.0


def load_kernels(accelerator: Accelerator) -> DeviceConnection:
    """Starts to load what the first communicator of a process loads, on a thread of its own.

    Nothing waits for it. If it fails, the generation that connects next finds that out.
    """
    alone = DeviceConnection(
        accelerator,
        lambda attempt: dist.HashStore(),
        rank=0,
        world_size=1,
        timeout_s=CONNECTING_LIMIT_S,
    )
    return alone.start(then=alone.abort)


class DeviceConnection:
    """`open_store` returns a store for an attempt, in which the members meet."""

    def __init__(
        self,
        accelerator: Accelerator,
        open_store: Callable[[int], dist.Store],
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self._accelerator, self._open_store = accelerator, open_store
        self._stores: list[dist.Store] = []  # kept, since torch holds only their C++ part
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._changed = threading.Condition()
        self._in_use = threading.Lock()  # held by a launch
        self._communicator: Communicator | None = None  # one that stands
        # Aborted ones. To destroy one blocks, so they go with this object, on a thread of its own.
        self._ended: list[Communicator] = []
        self._aborted = False
        self._fault: FormingFailed | None = None  # this device has failed
        # Of the present attempt:
        self._attempt, self._begins_at = 0, 0.0
        self._members_began = False
        self._error: Exception | None = None

    def start(self, then: Callable[[], None] = lambda: None) -> DeviceConnection:
        """`then` is called when an attempt has connected, or failed to."""

        def run() -> None:
            attempt: int | None = 0
            while attempt is not None:
                self._connect(attempt)
                then()
                attempt = self._next_attempt(attempt)

        self._begins_at = time.monotonic()
        self._thread = background("connecting", run)
        self._thread.start()
        return self

    @property
    def communicator(self) -> Communicator | None:
        """The communicator, once it stands."""
        return self._communicator

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Communicator]:
        """The communicator, which no abort frees before this ends. Raises GroupAborted."""
        with self._in_use:
            communicator = self._communicator
            if communicator is None:
                raise GroupAborted("the generation was ended")
            yield communicator

    def check(self) -> None:
        """Raises FormingFailed if this device has failed."""
        if self._fault is not None and not self._aborted:
            raise self._fault

    def failure(self) -> str | None:
        """Returns why the present attempt has failed on this member; None if it goes on, has not
        begun, or has connected."""
        with self._changed:
            if self._communicator is not None or self._aborted:
                return None
            if self._error is not None:
                return f"connecting the devices failed: {_first_line(self._error)}"
            if time.monotonic() < self._deadline():
                return None
            limit = f"{self._timeout_s:g} s"
            if self._members_began:
                return f"connecting the devices takes more than {limit}"
            return f"not all members began to connect their devices within {limit}"

    def try_again(self) -> float:
        """Ends the present attempt and begins the next one after a pause, whose seconds it returns.
        Every member does, between the same two steps."""
        with self._changed:
            communicator = self._take()
            pause_s = min(FIRST_PAUSE_S * 2.0**self._attempt, LONGEST_PAUSE_S)
            self._attempt += 1
            self._begins_at = time.monotonic() + pause_s
            self._members_began, self._error = False, None
            self._changed.notify_all()
        self._end(communicator)
        return pause_s

    def abort(self) -> None:
        """Ends the communicator and everything that it is doing. Returns at once."""
        with self._changed:
            self._aborted = True
            communicator = self._take()
            self._changed.notify_all()
        self._end(communicator)

    def _take(self) -> Communicator | None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._ended.append(communicator)
        return communicator

    # ------------------------------------------------------------------- thread that connects

    def _connect(self, attempt: int) -> None:
        def check() -> None:
            if self._aborted or attempt != self._attempt:
                raise GroupAborted("the generation, or this attempt to connect, was ended")

        try:
            store = self._open_store(attempt)
            self._stores.append(store)
            if self._wait_for_members(store, check):
                self._connect_members(store, check)
        except GroupAborted:
            pass
        except Exception as error:  # the store's and the backend's errors have many types
            failed = FormingFailed(f"connecting the devices failed: {_first_line(error)}")
            failed.__cause__ = error
            with self._changed:
                if fault_of(failed) is FaultKind.DEVICE:
                    self._fault = failed
                elif attempt == self._attempt:
                    self._error = error

    def _connect_members(self, store: dist.Store, check: Callable[[], None]) -> None:
        communicator = self._accelerator.communicator(
            store, self._rank, self._world_size, self._timeout_s
        )
        stands = False
        try:
            communicator.connect(check)
            with self._changed:
                check()
                self._communicator, stands = communicator, True
        finally:
            if not stands:
                _abort_here(communicator)

    def _wait_for_members(self, store: dist.Store, check: Callable[[], None]) -> bool:
        keys = [f"connecting/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], "1")
        while not store.check(keys):
            with self._changed:
                check()
                if time.monotonic() > self._deadline():
                    return False
            time.sleep(_POLL_S)
        with self._changed:
            check()
            self._members_began = True
        return True

    def _next_attempt(self, last: int) -> int | None:
        """Waits until the members agreed to try again and the pause is over. Returns the number of
        the next attempt, or None if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._attempt > last)
            while not self._aborted and (left_s := self._begins_at - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return None if self._aborted else self._attempt

    def _deadline(self) -> float:
        return self._begins_at + self._timeout_s

    def _end(self, communicator: Communicator | None) -> None:
        """Aborts a communicator that stands. It must not be this connection's any more."""
        if communicator is None:
            return

        def abort() -> None:
            if self._in_use.acquire(timeout=_LAUNCH_LIMIT_S):
                self._in_use.release()  # no launch uses it, and none begins
            communicator.abort()

        abort_in_background(abort)


def _abort_here(communicator: Communicator) -> None:
    """However long it takes: a communicator that never stood has nothing of a step to do."""
    try:
        communicator.abort()
    except RuntimeError as error:
        print(f"aborting a communicator: {error}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
