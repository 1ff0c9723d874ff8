"""A device whose communicator hangs where a test says so."""

import threading

from elastic_dp.distributed.device_connection import DeviceConnection
from tests.kit.simulated_device import SimulatedAccelerator
from tests.patience import PATIENCE_S


class Hanging:
    """A communicator whose abort blocks."""

    def __init__(self):
        self.aborting, self.may_end = threading.Event(), threading.Event()
        self.thread = None

    def connect(self, check):
        pass

    def abort(self):
        self.thread = threading.current_thread()
        self.aborting.set()
        self.may_end.wait(PATIENCE_S)

    def failure(self):
        return None


class NeverConnects(Hanging):
    def __init__(self):
        super().__init__()
        self.connecting = threading.Event()

    def connect(self, check):
        self.connecting.set()
        while True:
            check()


class Locking(Hanging):
    """Like torch's: connecting holds the lock that an abort needs. What comes `afterwards` may ask
    whether the attempt goes on."""

    def __init__(self, afterwards):
        super().__init__()
        self.lock, self.connecting = threading.Lock(), threading.Event()
        self.afterwards = afterwards

    def connect(self, check):
        with self.lock:
            self.connecting.set()
            self.may_end.wait(PATIENCE_S)
        self.afterwards(check)

    def abort(self):
        with self.lock:
            self.aborting.set()


class OfHanging(SimulatedAccelerator):
    def __init__(self, made=None, *, hangs=False):
        super().__init__()
        self.made = made or Hanging()
        if not hangs:
            self.made.may_end.set()

    def communicator(self, *_):
        return self.made


class Keys(dict):
    """A store in which members meet."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


def connection(accelerator, keys, *, timeout_s=PATIENCE_S, world_size=2):
    return DeviceConnection(
        accelerator, lambda: keys, rank=0, world_size=world_size, timeout_s=timeout_s
    ).start()
