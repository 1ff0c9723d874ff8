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
- `Lease` uses neither a clock nor a store: the caller tells it what is there, and it answers what
  to do. `Holder` executes that on a store.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from elastic_dp.errors import FileDamaged, LeaseLost, RunMismatch
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.storage.json_files import make, parse_json, path_in

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
class ReadNewest:
    """Asks for the newest record, or None, and the time after reading it."""


@dataclass(frozen=True)
class Create:
    """Asks to create this record. The answer is whether it was created."""

    record: Record


@dataclass(frozen=True)
class Held:
    """The result if another claimant holds the lease: try again in `wait_s` seconds."""

    by: Record
    wait_s: float


T = TypeVar("T")
Steps = Generator[ReadNewest | Create, Any, T]


class Lease:
    """The decisions of one claimant.

    The methods are generators: they yield `ReadNewest` and `Create`, receive the answers with
    `send`, and return the outcome. `now_s` is a monotonic clock of this machine, `wall_s` the wall
    clock, both in seconds and both read before the first request.
    """

    def __init__(
        self,
        holder: str,
        token: str,
        lease_s: float = 60.0,
        gone: Callable[[Record], bool] = lambda record: False,
    ) -> None:
        """`gone` returns whether a holder is known to be dead, so that claimants need not wait for
        it."""
        self.lease_s, self._gone = lease_s, gone
        self.held: Record | None = None
        self.followed: Record | None = None  # the newest record when the lease was acquired
        self._holder, self._token = holder, token
        self._seen: Record | None = None
        self._seen_at_s = 0.0
        self._renewed_at_s = 0.0

    @property
    def fence(self) -> int:
        """The number of our newest lease object."""
        assert self.held is not None
        return self.held.number

    def renew_at_s(self) -> float:
        """Returns when to renew: early enough for two more attempts."""
        return self._renewed_at_s + self.lease_s / 3

    def is_valid(self, now_s: float) -> bool:
        """Returns whether no other claimant can hold the lease yet. Does not ask the store."""
        return self.held is not None and now_s < self._renewed_at_s + self.lease_s

    def acquire(self, now_s: float, wall_s: float) -> Steps[Record | Held]:
        """Takes the lease if it is free or expired."""
        newest, seen_at_s = yield ReadNewest()
        if newest != self._seen:
            self._seen, self._seen_at_s = newest, seen_at_s
        if newest is not None and newest.state == "held" and newest.token != self._token:
            wait_s = self._wait_s(newest, seen_at_s, wall_s)
            if wait_s > 0:
                return Held(newest, wait_s)
        self.followed = newest
        number = 1 if newest is None else newest.number + 1
        return (yield from self._create(number, "held", now_s, wall_s))

    def renew(self, now_s: float, wall_s: float) -> Steps[Record]:
        """Creates the next number, which is also the new fence. Raises LeaseLost if another has
        taken it."""
        assert self.held is not None
        outcome = yield from self._create(self.held.number + 1, "held", now_s, wall_s)
        if isinstance(outcome, Held):
            self.held = None
            raise LeaseLost(
                f"the run is held by {outcome.by.holder} now: its lease was not renewed in time"
            )
        return outcome

    def release(self, now_s: float, wall_s: float) -> Steps[None]:
        """Releases the lease, so that the next claimant need not wait."""
        assert self.held is not None
        yield from self._create(self.held.number + 1, "released", now_s, wall_s)
        self.held = None

    def _wait_s(self, newest: Record, now_s: float, wall_s: float) -> float:
        if wall_s - newest.at > _LONG_AGO * self.lease_s or self._gone(newest):
            return 0.0
        return self._seen_at_s + self.lease_s - now_s

    def _create(
        self, number: int, state: Literal["held", "released"], now_s: float, wall_s: float
    ) -> Steps[Record | Held]:
        """Creates the record of this number, or the next free one.

        The newest record may already be ours: the answer to an earlier request may have been lost.
        """
        while True:
            mine = Record(number, self._holder, self._token, state, wall_s)
            yield Create(mine)
            newest, seen_at_s = yield ReadNewest()
            if newest == mine:
                self.held, self._renewed_at_s = mine, now_s
                return mine
            if newest is None:  # deleted in the meantime
                continue
            if newest.token != self._token:
                self._seen, self._seen_at_s = newest, seen_at_s
                return Held(newest, self.lease_s)
            number = newest.number + 1


class Holder:
    """Executes the decisions of a `Lease` on a store. One thread at a time may use it.

    `clock` and `wall` return the clocks that `Lease` describes.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: Callable[[], float],
        wall: Callable[[], float],
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        """`used` returns the highest number that something was written under.

        It counts where the lease objects themselves were deleted.
        """
        self.lease, self._used = lease, used
        self._store, self._clock, self._wall = store, clock, wall
        self._folder = path_in(store, "lease")

    def acquire(self) -> Record | Held:
        """Takes the lease if it is free or expired."""
        return self._run(self.lease.acquire(self._clock(), self._wall()))

    def renew(self) -> Record:
        """Renews the lease and deletes old objects. Raises LeaseLost if another claimant has taken
        it."""
        record: Record = self._run(self.lease.renew(self._clock(), self._wall()))
        self._delete_old(record.number)
        return record

    def release(self) -> None:
        """Releases the lease."""
        self._run(self.lease.release(self._clock(), self._wall()))

    def newest(self) -> Record | None:
        """Returns the newest lease record, whoever holds it, or None."""
        numbers = self._numbers()
        while numbers:
            try:
                return self._read(numbers[-1])
            except ObjectMissing:  # deleted in the meantime: there are newer ones
                numbers = self._numbers()
        used = self._used()  # the lease objects were deleted
        return Record(used, "", "", "released", 0.0) if used else None

    def _read(self, number: int) -> Record:
        path = self._path(number)
        content = bytes(self._store.read_all(path))
        try:
            stored = parse_json(content, path, "")
            if stored.pop("format", 1) != 1:
                raise RunMismatch(
                    f"{path} was written by a newer version of elastic_dp; upgrade "
                    "elastic_dp, or use a new name= for "
                    "a new run"
                )
            return make(Record, {**stored, "number": number}, path, "")
        except FileDamaged as error:
            return Record.unreadable(number, f"{path} cannot be read: {error.reason}")

    def _run(self, steps: Steps[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(asked, ReadNewest):
                answer = self.newest(), self._clock()
            else:
                answer = self._create(asked.record)

    def _create(self, record: Record) -> bool:
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
            return False
        return True

    def _delete_old(self, number: int) -> None:
        for old in self._numbers():
            if old <= number - _KEPT:
                self._store.delete(self._path(old))

    def _numbers(self) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._store.find(f"{self._folder}/"))
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:010}.json"
