"""A device whose communicator hangs where a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from elastic_dp.distributed.device_connection import DeviceConnection
from elastic_dp.testing.simulated_device import SimulatedAccelerator
from tests.patience import PATIENCE_S


class Hanging:
    """A communicator whose abort blocks."""

    def __init__(self) -> None:
        self.aborting, self.may_end = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def connect(self, check: Callable[[], None]) -> None:
        pass

    def abort(self) -> None:
        self.thread = threading.current_thread()
        self.aborting.set()
        self.may_end.wait(PATIENCE_S)

    def failure(self) -> str | None:
        return None


class OfHanging(SimulatedAccelerator):
    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__()
        self.made = Hanging()
        if not hangs:
            self.made.may_end.set()

    def communicator(self, *_: Any) -> Any:
        return self.made


class Keys(dict):
    """A store in which members meet."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


def connection(accelerator, keys, *, timeout_s=PATIENCE_S, world_size=2):
    return DeviceConnection(
        accelerator, lambda attempt: keys, rank=0, world_size=world_size, timeout_s=timeout_s
    ).start()
