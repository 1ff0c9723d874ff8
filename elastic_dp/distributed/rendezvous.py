"""How the members of a group exchange what they need to connect: over their links to the
controller.

Each member sends one record. When the records of all members are there, the controller sends all of
them to each member, in one message, and forgets them. `RendezvousTables` is the controller's side,
`Rendezvous` that of a process, and `RendezvousStore` what torch sees of it.

Gloo's record of a rank has a number of 8 bytes for each peer, which counts up. So records travel as
compressed differences: those of 1,024 ranks take less than 256 KiB together.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Self

import numpy as np
import torch.distributed as dist


class GroupName(NamedTuple):
    """Names one group of a run. No two groups have the same name."""

    generation: int
    purpose: str  # such as "main-0" or "state"
    process: int = 0  # of each worker

    @classmethod
    def main(cls, generation: int, preparation: int, process: int = 0) -> GroupName:
        """Returns the name of the group of all members. `preparation`: `Membership.prepared`."""
        return cls(generation, f"main-{preparation}", process)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What one member tells the others in one round of an exchange."""

    worker: str
    group: GroupName
    number: int  # of the round
    rank: int
    world_size: int
    values: tuple[tuple[str, bytes], ...]  # packed


@dataclass(frozen=True, slots=True)
class GroupRecords:
    """The records of all members."""

    group: GroupName
    number: int
    values: tuple[tuple[str, bytes], ...]


class RendezvousTables:
    """Collects the records of groups that form. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[GroupName, int], dict[int, MemberRecord]] = {}
        self._oldest = 0  # the generation

    def add(self, record: MemberRecord) -> tuple[list[str], GroupRecords] | None:
        """Takes a record. Returns who gets the records of all, and these, if it is the last."""
        key = record.group, record.number
        with self._lock:
            if record.group.generation < self._oldest:
                return None
            table = self._tables.setdefault(key, {})
            table[record.rank] = record
            if len(table) < record.world_size:
                return None
            del self._tables[key]
        records = [table[rank] for rank in range(record.world_size)]
        values = tuple(pair for one in records for pair in one.values)
        return [one.worker for one in records], GroupRecords(*key, values)

    def registered(self, group: GroupName) -> set[str] | None:
        """Returns the workers whose records wait for others. None: no group of this name waits."""
        with self._lock:
            table = self._tables.get((group, 0))
            return None if table is None else {record.worker for record in table.values()}

    def begin(self, group: GroupName) -> None:
        """Forgets earlier generations, and groups that were prepared in vain for this one."""
        generation = group.generation
        with self._lock:
            self._oldest = generation
            for key in list(self._tables):
                if key[0].generation < generation or (
                    key[0].generation == generation and key[0]._replace(process=0) != group
                ):
                    del self._tables[key]


class Rendezvous:
    """What one process needs to meet others. It lives as long as the process."""

    def __init__(
        self,
        worker: str,
        secret: bytes,
        send: Callable[[MemberRecord], None],
        process: int = 0,
    ) -> None:
        """`secret`: of the run. `send` takes a record to the controller, and never waits."""
        self.secret, self.process = secret, process
        self._worker, self._send = worker, send
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[RendezvousStore] = weakref.WeakSet()

    def store(
        self, group: GroupName, rank: int, world_size: int, timeout: timedelta
    ) -> RendezvousStore:
        """Returns a store for this member of a group."""
        store = RendezvousStore(_Member(self._worker, group, rank, world_size), self._send, timeout)
        with self._lock:
            self._stores.add(store)
        return store

    def deliver(self, records: GroupRecords) -> None:
        """Takes the records of a group, on any thread."""
        with self._lock:
            stores = list(self._stores)
        for store in stores:
            store.deliver(records)


class _Member(NamedTuple):
    worker: str
    group: GroupName
    rank: int
    world_size: int


class StoreBase(dist.Store):
    """What the stores of this package have in common: a limit for waiting."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Self:
        return self


class RendezvousStore(StoreBase):
    """Implements torch's interface for the backend of one group. The members exchange in rounds. A
    member sends what it has set since the last round when it sets a value, or waits for one that it
    does not have. So all of them must set and wait alike, as Gloo and NCCL do. Raises
    DistStoreError if the records of the others do not arrive in time."""

    def __init__(
        self, member: _Member, send: Callable[[MemberRecord], None], timeout: timedelta
    ) -> None:
        super().__init__(timeout)
        self._member, self._send = member, send
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}  # packed
        self._unsent: dict[str, bytes] = {}
        self._number, self._is_sent = 0, False

    @property
    def met(self) -> bool:
        """Whether the records of all members have arrived."""
        return self._number > 0

    def deliver(self, records: GroupRecords) -> None:
        """Takes the records of all members, if this store waits for them."""
        with self._changed:
            if (records.group, records.number) != (self._member.group, self._number):
                return
            self._values.update(records.values)
            self._number, self._is_sent = self._number + 1, False
            has_more = bool(self._unsent)
            self._changed.notify_all()
        if has_more:
            self._register()

    def _register(self) -> None:
        """Sends this member's record of the present round, once."""
        with self._changed:
            if self._is_sent:
                return
            worker, group, rank, world_size = self._member
            record = MemberRecord(
                worker, group, self._number, rank, world_size, tuple(self._unsent.items())
            )
            self._unsent, self._is_sent = {}, True
        self._send(record)  # not under the lock: in one process it may deliver at once

    # ---------------------------------------------------------------------- torch's interface

    def set(self, key: str, value: Any) -> None:
        content = packed(value.encode() if isinstance(value, str) else bytes(value))
        with self._changed:
            self._values[key] = self._unsent[key] = content
        self._register()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return unpacked(self._values[key])

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        # `timeout` is Gloo's limit for connections, which come later.
        limit_s = self._timeout.total_seconds()
        until = time.monotonic() + limit_s
        while not self.check(keys):
            self._register()
            with self._changed:
                arrived = self._changed.wait_for(
                    lambda: not self._is_sent or self.check(keys), until - time.monotonic()
                )
            if not arrived:
                raise dist.DistStoreError(f"not all members have registered in {limit_s:g} s")

    def check(self, keys: Any) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)


def packed(value: bytes) -> bytes:
    """Compresses a value. Numbers of 8 bytes that count up take next to nothing."""
    numbers = np.frombuffer(value, dtype=np.uint8)
    differences = numbers.copy()
    differences[8:] -= numbers[:-8]
    return zlib.compress(differences.tobytes(), 1)


def unpacked(content: bytes) -> bytes:
    """Returns the value of `packed`."""
    differences = np.frombuffer(zlib.decompress(content), dtype=np.uint8)
    rows = np.pad(differences, (0, -len(differences) % 8)).reshape(-1, 8)
    return rows.cumsum(axis=0, dtype=np.uint8).tobytes()[: len(differences)]
