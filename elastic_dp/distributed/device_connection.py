"""Connects the device communicator of one generation while the generation already works.

An attempt waits until every member has begun it, then connects, within a limit of its own. If it
fails on any member, the generation goes on without the communicator: the members agree in a step's
header that the attempt is over, and begin another one after a pause.

A communicator that connects belongs to the thread that connects it. Torch holds its lock until it
is connected, an abort needs that lock, and so no other thread calls it before. The thread aborts it
itself, once the library has given up; nobody waits for that.

The first communicator of a process loads the kernels of all collectives, which takes seconds. A
joiner does that before it joins, with a communicator of its own (`load_kernels`).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from elastic_dp.device.accelerator import Accelerator, Communicator
from elastic_dp.device.faults import FaultKind, fault_of
from elastic_dp.errors import FormingFailed, GroupAborted
from elastic_dp.threads import background

# NCCL takes seconds for 32 members, and much longer where it loads its kernels first.
CONNECTING_LIMIT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0  # before the next attempt; doubled each time
_POLL_S = 0.02
# A launch takes microseconds. One that finds no room on a device that spins ends by the abort only.
_LAUNCH_LIMIT_S = 1.0
# NCCL may block in an abort for as long as it likes. The limit leaves time for what the device was
# given before, such as a long micro-batch: an abort frees memory, which CUDA may do only when all
# kernels have ended.
ABORT_LIMIT_S = 60.0
_EXIT_CODE = 70  # of a process whose device has failed (EX_SOFTWARE)


def load_kernels(accelerator: Accelerator) -> DeviceConnection:
    """Starts to load what the first communicator of a process loads, on a thread of its own.
    Nothing waits for it. If it fails, the generation that connects next finds that out."""
    alone = DeviceConnection(
        accelerator, dist.HashStore, rank=0, world_size=1, timeout_s=CONNECTING_LIMIT_S
    )
    return alone.start(then=alone.abort)


def pause_before(attempt: int) -> float:
    """Returns the seconds to wait before the attempt with this number, from 0."""
    return min(FIRST_PAUSE_S * 2.0 ** (attempt - 1), LONGEST_PAUSE_S) if attempt else 0.0


class DeviceConnection:
    """One attempt. `open_store` returns a store in which the members meet."""

    def __init__(
        self,
        accelerator: Accelerator,
        open_store: Callable[[], dist.Store],
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        pause_s: float = 0.0,
    ) -> None:
        """It begins after `pause_s`, and takes `timeout_s` at most."""
        self._accelerator, self._open_store = accelerator, open_store
        self._rank, self._world_size = rank, world_size
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._deadline = math.inf
        self._lock = threading.Lock()
        self._in_use = threading.Lock()  # held by a launch
        self._aborted = threading.Event()
        self._store: dist.Store | None = None  # kept, since torch holds only its C++ part
        self._communicator: Communicator | None = None  # one that stands
        # An aborted one. To destroy it blocks, so it goes with this object, on a thread of its own.
        self._ended: Communicator | None = None
        self._fault: FormingFailed | None = None  # this device has failed
        self._error: Exception | None = None
        self._members_began = False

    def start(self, then: Callable[[], None] = lambda: None) -> DeviceConnection:
        """`then` is called when it has connected, or failed to."""

        def run() -> None:
            if not self._aborted.wait(self._pause_s):
                self._connect()
                then()

        self._deadline = time.monotonic() + self._pause_s + self._timeout_s
        background("connecting", run).start()
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
        if self._fault is not None and not self._aborted.is_set():
            raise self._fault

    def failure(self) -> str | None:
        """Returns why the attempt has failed on this member; None if it goes on, has not begun, has
        connected, or was aborted."""
        with self._lock:
            if self._communicator is not None or self._aborted.is_set():
                return None
            if self._error is not None:
                return f"connecting the devices failed: {_first_line(self._error)}"
            if time.monotonic() < self._deadline:
                return None
            limit = f"{self._timeout_s:g} s"
            if self._members_began:
                return f"connecting the devices takes more than {limit}"
            return f"not all members began to connect their devices within {limit}"

    def abort(self) -> None:
        """Ends the communicator and everything that it is doing. Returns at once."""
        with self._lock:
            self._aborted.set()
            communicator, self._communicator = self._communicator, None
            self._ended = self._ended or communicator
        if communicator is None:
            return

        def abort() -> None:
            if self._in_use.acquire(timeout=_LAUNCH_LIMIT_S):
                self._in_use.release()  # no launch uses it, and none begins
            communicator.abort()

        abort_in_background(abort)

    # ------------------------------------------------------------------- thread that connects

    def _check_goes_on(self) -> None:
        if self._aborted.is_set():
            raise GroupAborted("the generation, or this attempt to connect, was ended")

    def _connect(self) -> None:
        try:
            self._store = store = self._open_store()
            if self._wait_for_members(store):
                self._connect_members(store)
        except GroupAborted:
            pass
        except Exception as error:  # the store's and the backend's errors have many types
            failed = FormingFailed(f"connecting the devices failed: {_first_line(error)}")
            failed.__cause__ = error
            with self._lock:
                if fault_of(failed) is FaultKind.DEVICE:
                    self._fault = failed
                else:
                    self._error = error

    def _wait_for_members(self, store: dist.Store) -> bool:
        keys = [f"connecting/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], "1")
        while not store.check(keys):
            self._check_goes_on()
            if time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_S)
        self._check_goes_on()
        self._members_began = True
        return True

    def _connect_members(self, store: dist.Store) -> None:
        communicator = self._accelerator.communicator(
            store, self._rank, self._world_size, self._timeout_s
        )
        stands = False
        try:
            communicator.connect(self._check_goes_on)
            with self._lock:
                self._check_goes_on()
                self._communicator, stands = communicator, True
        finally:
            if not stands:
                _abort_here(communicator)


def _abort_here(communicator: Communicator) -> None:
    """However long it takes: a communicator that never stood has nothing of a step to do."""
    try:
        communicator.abort()
    except RuntimeError as error:
        print(f"aborting a communicator: {error}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def abort_in_background(abort: Callable[[], None], limit_s: float | None = None) -> None:
    """Runs `abort` of a communicator on a thread of its own, and returns at once. The process ends
    if it takes longer than the limit: its device cannot be trusted any more."""
    limit_s = ABORT_LIMIT_S if limit_s is None else limit_s
    ended = threading.Event()

    def run() -> None:
        try:
            abort()
        except RuntimeError as error:  # of a device that has failed: its worker is about to end
            print(f"aborting a communicator: {error}", file=sys.stderr, flush=True)
        finally:
            ended.set()

    def watch() -> None:
        if not ended.wait(limit_s):
            end_process(f"aborting a communicator has taken more than {limit_s:g} s")

    background("abort", run).start()
    background("abort-limit", watch).start()


def end_process(why: str) -> None:
    """Ends this process, whose device cannot be used any more."""
    print(f"{why}; this worker ends", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
