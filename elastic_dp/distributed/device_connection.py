"""Connects the device communicator of one generation while the generation already works.

It waits until every member has begun to connect, then connects, within a limit. A member that never
began is named. It may be aborted at any time, also while it connects.

The first communicator of a process loads the kernels of all collectives, which takes seconds. A
joiner does that before it joins, with a communicator of its own (`load_kernels`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from elastic_dp.device.accelerator import Accelerator, Communicator
from elastic_dp.device.faults import fault_of
from elastic_dp.distributed.abort_limit import abort_in_background
from elastic_dp.errors import FormingFailed, GroupAborted
from elastic_dp.threads import background

_POLL_S = 0.02
_LOADING_LIMIT_S = 60.0


def load_kernels(accelerator: Accelerator) -> DeviceConnection:
    """Starts to load what the first communicator of a process loads, on a thread of its own.

    Nothing waits for it. If it fails, the generation that connects next finds that out.
    """
    alone = DeviceConnection(
        accelerator, dist.HashStore, "kernels", rank=0, world_size=1, timeout_s=_LOADING_LIMIT_S
    )
    return alone.start(then=alone.abort)


class DeviceConnection:
    """`open_client` returns a client of the rendezvous store; nothing else uses `prefix`."""

    def __init__(
        self,
        accelerator: Accelerator,
        open_client: Callable[[], dist.Store],
        prefix: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self.absent: list[int] = []  # ranks that never began to connect, once `check` has raised
        self._accelerator, self._open_client, self._prefix = accelerator, open_client, prefix
        self._client: dist.Store | None = None  # kept, since torch holds only its C++ part
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._present: set[int] = set()
        self._stands = self._aborted = False
        self._error: Exception | None = None

    def start(self, then: Callable[[], None] = lambda: None) -> DeviceConnection:
        """`then` is called when it has connected, or failed to."""

        def run() -> None:
            self._connect()
            then()

        self._deadline = time.monotonic() + self._timeout_s
        self._thread = background("connecting", run)
        self._thread.start()
        return self

    @property
    def communicator(self) -> Communicator | None:
        """The communicator, once it stands."""
        return self._communicator if self._stands else None

    def check(self) -> None:
        """Raises FormingFailed if the members could not connect in time, or this device failed.

        Until then the generation goes on without the communicator, so that the run advances also
        where connecting fails each time.
        """
        if self._stands or self._aborted:
            return
        failed = self._error is not None and fault_of(self._error) is not None
        if not failed and time.monotonic() < self._deadline:
            return
        self.absent = [r for r in range(self._world_size) if r not in self._present]
        self.abort()
        if self.absent:
            why = f"ranks {self.absent} did not begin to connect their devices"
        elif self._error is not None:
            why = f"connecting the devices failed: {str(self._error).splitlines()[0]}"
        else:
            why = f"all members began to connect their devices, but not in {self._timeout_s:g} s"
        raise FormingFailed(why) from self._error

    def abort(self) -> None:
        """Ends the communicator and everything that it is doing. Returns at once."""
        with self._lock:
            first, self._aborted = not self._aborted, True
            communicator, self._communicator, self._stands = self._communicator, None, False
        if first and communicator is not None:
            abort_in_background(communicator.abort)

    def _connect(self) -> None:
        try:
            self._client = self._open_client()
            store = dist.PrefixStore(self._prefix, self._client)
            if not self._wait_for_presence(store):
                return
            communicator = self._accelerator.communicator(
                store, self._rank, self._world_size, self._timeout_s
            )
            with self._lock:
                aborted = self._aborted
                self._communicator = None if aborted else communicator
            if aborted:
                abort_in_background(communicator.abort)
                return
            communicator.connect(self._check_not_aborted)
            with self._lock:
                self._stands = not self._aborted
        except GroupAborted:
            pass
        except Exception as error:  # the store's and the backend's errors have many types
            if not self._aborted:
                self._error = error

    def _wait_for_presence(self, store: dist.Store) -> bool:
        def key(rank: int) -> str:
            return f"connecting/{rank}"

        store.set(key(self._rank), "1")
        while len(self._present) < self._world_size:
            for rank in set(range(self._world_size)) - self._present:
                if store.check([key(rank)]):
                    self._present.add(rank)
            self._check_not_aborted()
            if time.monotonic() > self._deadline:
                return False  # the training thread says who is absent; see `check`
            time.sleep(_POLL_S if len(self._present) < self._world_size else 0.0)
        return True

    def _check_not_aborted(self) -> None:
        if self._aborted:
            raise GroupAborted("the generation was ended while its devices connected")
