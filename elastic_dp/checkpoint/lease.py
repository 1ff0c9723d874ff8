"""The lock on a run: a lease in the run's folder, made of numbered objects that are never changed.

    <run>/lease/0000000042.json   {"holder": …, "token": …, "state": "held", "at": …}

The newest object is the lease. A claimant acquires, renews or releases the lease by creating the
next number. Any store that can refuse to create an object twice supports this, and of two claimants
exactly one wins. The number of a lease is a fencing token: it only grows, and readers recognise
what was written under an old one (catalog.py).

- A lease is held if its object was created less than `lease_s` ago. A claimant measures this on its
  own clock from when it first saw the object, so clocks need not agree. Only a lease that is
  `_LONG_AGO` times as old by the wall clock is taken at once. A clock that jumps may cost the
  holder its lease but never puts the run at risk: the store refuses the holder's next renewal.
- An object that cannot be read (a truncated write, damage) counts as held by an unknown holder from
  when the claimant first saw it, by the claimant's own clock alone. Its number stays taken, so its
  writer, if there is one, neither loses nor gains anything: the holder's next renewal creates a
  readable object, and a claimant that saw none for `lease_s` may take over.
- After creating a number, a claimant checks that it is the newest: an old number may be free
  because its object was deleted.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from elastic_dp.errors import FileDamaged, LeaseLost
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import make, path_in, read_json

_FORMAT = 1  # absent in records
_NAME = re.compile(r"(\d{10})\.json")
_LONG_AGO = 10  # leases
_KEPT = 8  # old objects stay, so that a number in use by a slow claimant is rarely free again


@dataclass(frozen=True)
class Record:
    """The content of a lease object.

    `holder` names a process: host/machine/process id/start. `token` identifies one claimant and is
    never used again.
    `at` is the holder's wall clock in seconds.
    """

    number: int
    holder: str
    token: str
    state: Literal["held", "released"]
    at: float

    @classmethod
    def unreadable(cls, number: int, why: str) -> Record:
        """Returns a record that stands for an object that cannot be read.

        It counts as held and never as expired by the wall clock, because the writer's clock is
        unknown.
        """
        return cls(number, f"an unknown holder ({why})", "", "held", math.inf)


@dataclass(frozen=True)
class Held:
    """The result if another claimant holds the lease: try again in `wait_s` seconds."""

    by: Record
    wait_s: float


T = TypeVar("T")
# What a claimant asks for: None for the newest record and the time after reading it, or a record
# that is to be created.
_Steps = Generator[Record | None, Any, T]


class Lease:
    """The lease of the run in a store, as one claimant sees it. A claimant uses it from one thread
    at a time."""

    def __init__(
        self,
        store: Store,
        holder: str,
        token: str,
        lease_s: float = 60.0,
        *,
        gone: Callable[[Record], bool] = lambda record: False,
        used: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`gone` returns whether a holder is known to be dead, so that claimants need not wait for
        it. `used` returns the highest number that something was written under: it counts where the
        lease objects themselves were deleted."""
        self.lease_s = lease_s
        self.held: Record | None = None
        self.followed: Record | None = None  # the newest record when the lease was acquired
        self._store, self._folder = store, path_in(store, "lease")
        self._holder, self._token, self._gone, self._used = holder, token, gone, used
        self._clock, self._wall = clock, wall
        self._seen: Record | None = None
        self._seen_at_s = 0.0
        self._renewed_at_s = 0.0

    @classmethod
    def of_this_process(cls, store: Store, token: str, lease_s: float, **options: Any) -> Lease:
        """Returns a claim of this process. Whoever finds it on this machine knows whether the
        process is still there. `options`: see `__init__`."""
        return cls(store, _this_process(), token, lease_s, gone=_is_gone, **options)

    @property
    def fence(self) -> int:
        """The number of our newest lease object."""
        assert self.held is not None
        return self.held.number

    def renew_at_s(self) -> float:
        """Returns when to renew: early enough for two more attempts."""
        return self._renewed_at_s + self.lease_s / 3

    def is_valid(self) -> bool:
        """Returns whether no other claimant can hold the lease yet. Does not ask the store."""
        return self.held is not None and self._clock() < self._renewed_at_s + self.lease_s

    def acquire(self) -> Record | Held:
        """Takes the lease if it is free or expired."""
        return self._run(self._acquire(self._clock(), self._wall()))

    def renew(self) -> Record:
        """Creates the next number, which is also the new fence, and deletes old objects. Raises
        LeaseLost if another claimant has taken it."""
        assert self.held is not None
        outcome = self._run(self._create("held", self._clock(), self._wall()))
        if isinstance(outcome, Held):
            self.held = None
            raise LeaseLost(
                f"the run is held by {outcome.by.holder} now: its lease was not renewed in time"
            )
        for old in self._numbers():
            if old <= outcome.number - _KEPT:
                self._store.delete(self._path(old))
        return outcome

    def release(self) -> None:
        """Releases the lease, so that the next claimant need not wait."""
        assert self.held is not None
        self._run(self._create("released", self._clock(), self._wall()))
        self.held = None

    def newest(self) -> Record | None:
        """Returns the newest lease record, whoever holds it, or None."""
        numbers = self._numbers()
        while numbers:
            if (found := self._read(numbers[-1])) is not None:
                return found
            numbers = self._numbers()  # it was deleted in the meantime: there are newer ones
        used = self._used()  # the lease objects were deleted
        return Record(used, "", "", "released", 0.0) if used else None

    # ----------------------------------------------------------------------------- decisions

    def _acquire(self, now_s: float, wall_s: float) -> _Steps[Record | Held]:
        """`now_s` and `wall_s`: both clocks before the first request."""
        newest, seen_at_s = yield None
        if newest != self._seen:
            self._seen, self._seen_at_s = newest, seen_at_s
        if newest is not None and newest.state == "held" and newest.token != self._token:
            long_ago = wall_s - newest.at > _LONG_AGO * self.lease_s
            wait_s = self._seen_at_s + self.lease_s - seen_at_s
            if wait_s > 0 and not (long_ago or self._gone(newest)):
                return Held(newest, wait_s)
        self.followed = newest
        number = 1 if newest is None else newest.number + 1
        return (yield from self._create("held", now_s, wall_s, number))

    def _create(
        self,
        state: Literal["held", "released"],
        now_s: float,
        wall_s: float,
        number: int | None = None,
    ) -> _Steps[Record | Held]:
        """Creates the record of this number, by default the one after ours, or the next free one.

        The newest record may already be ours: the answer to an earlier request may have been lost.
        """
        number = self.fence + 1 if number is None else number
        while True:
            mine = Record(number, self._holder, self._token, state, wall_s)
            yield mine
            newest, seen_at_s = yield None
            if newest == mine:
                self.held, self._renewed_at_s = mine, now_s
                return mine
            if newest is None:  # deleted in the meantime
                continue
            if newest.token != self._token:
                self._seen, self._seen_at_s = newest, seen_at_s
                return Held(newest, self.lease_s)
            number = newest.number + 1

    # --------------------------------------------------------------------------------- store

    def _run(self, steps: _Steps[T]) -> T:
        answer: Any = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                outcome: T = end.value
                return outcome
            if asked is None:
                answer = self.newest(), self._clock()
            else:
                self._write(asked)

    def _read(self, number: int) -> Record | None:
        """Returns the record of this number; None if there is none. Raises RunMismatch for a later
        format."""
        path = self._path(number)
        try:
            stored = read_json(self._store, f"lease/{number:010}.json", _FORMAT, "")
            if stored is None:
                return None
            return make(Record, {**stored, "number": number}, path, "")
        except FileDamaged as error:
            return Record.unreadable(number, f"{path} cannot be read: {error.reason}")

    def _write(self, record: Record) -> None:
        """Creates this record, unless its number is taken."""
        content = {key: value for key, value in vars(record).items() if key != "number"}
        try:
            self._store.write(
                self._path(record.number), json.dumps(content).encode(), create_only=True
            )
        except FileExistsError:
            if max(self._numbers(), default=0) < record.number:
                raise FileDamaged(
                    f"{self._store.url}/lease/{record.number:010}.json",
                    "something that is not a file has its name",
                    "Delete it and start the run again",
                ) from None

    def _numbers(self) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._store.find(f"{self._folder}/"))
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:010}.json"


def _machine() -> str:
    """Returns a name of this boot of this machine and of this namespace of process ids, or "". A
    host name is not enough: pods in the network of their host share it, and not the process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:13]}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started_at(pid: int) -> str:
    """Returns when a process of this machine started, or "". Process ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _this_process() -> str:
    return f"{socket.gethostname()}/{_machine()}/{os.getpid()}/{_started_at(os.getpid())}"


def _is_gone(record: Record) -> bool:
    """Returns whether the holder was a process of this machine that no longer exists."""
    _, _, rest = record.holder.partition("/")
    machine, _, process = rest.partition("/")
    pid, _, started_at = process.partition("/")
    if not machine or machine != _machine() or not pid.isdecimal() or not started_at:
        return False
    return _started_at(int(pid)) != started_at
