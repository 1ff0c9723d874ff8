"""The lock on a run: a lease in its folder, made of numbered objects that are only ever created,
never changed.

    <run>/lease/0000000042.json   {"holder": …, "token": …, "state": "held", "at": …}

The newest object is the lease; to take it, to renew it and to give it up is to create the next
number. Every store that can refuse a second create can do that, and two who try get one winner. The
number of a lease is a fence: it only grows, and what is written under an old one can be told
(catalog.py).

- Held means: its object was created less than `lease_s` ago. A waiting claimant measures that on
  its own clock from when it first saw the object, so clocks need not agree; only what is
  `_LONG_AGO` times as old by the wall clock is taken at once. A clock that jumps costs the holder
  its lease, never the run its safety: its next renewal is refused.
- An object that cannot be read (a write that was cut off, damage) counts as held by somebody
  unknown from when it was first seen, by the claimant's own clock alone. Its number stays taken, so
  its writer, if there is one, loses nothing and gains nothing: the holder's next renewal makes a
  readable object, and a claimant that has seen none for `lease_s` may follow.
- Whoever creates a number looks again whether it is the newest: an old number may be free because
  it was deleted.
- Here is no clock and no store: `Lease` is told what is there and says what to do. `Holder` does
  it.
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
from elastic_dp.storage.json_files import make, parse_json

_NAME = re.compile(r"(\d{10})\.json")
_LONG_AGO = 10  # leases
_KEPT = 8  # old objects, so that a number that someone is about to create is seldom free again


@dataclass(frozen=True)
class Record:
    """`holder`: for people. `token`: of one claimant, never used again. `at`: the holder's wall
    clock."""

    number: int
    holder: str
    token: str
    state: Literal["held", "released"]
    at: float

    @classmethod
    def unreadable(cls, number: int, why: str) -> Record:
        """Held by nobody knows whom. Never "long ago": its clock is not known."""
        return cls(number, f"somebody unknown ({why})", "", "held", math.inf)


@dataclass(frozen=True)
class ReadNewest:
    """Ask for the newest record, or None, and the time after that."""


@dataclass(frozen=True)
class Create:
    """Ask to create this; the answer is whether it was created."""

    record: Record


@dataclass(frozen=True)
class Held:
    """Another holds it: try again in `wait_s`."""

    by: Record
    wait_s: float


T = TypeVar("T")
Steps = Generator[ReadNewest | Create, Any, T]


class Lease:
    """One claimant's part. Its methods yield `ReadNewest` and `Create`, are sent the answers, and
    return the outcome.

    `now_s`: a clock of this machine that is never set; `wall_s`: the wall clock; both from before
    the first request.
    """

    def __init__(
        self,
        holder: str,
        token: str,
        lease_s: float = 60.0,
        gone: Callable[[Record], bool] = lambda record: False,
    ) -> None:
        """`gone`: whether the holder is known to be dead, so that nobody needs to wait."""
        self.lease_s, self._gone = lease_s, gone
        self.held: Record | None = None
        self.followed: Record | None = None  # what was there when it was acquired
        self._holder, self._token = holder, token
        self._seen: Record | None = None
        self._seen_at_s = 0.0
        self._renewed_at_s = 0.0

    @property
    def fence(self) -> int:
        """The number of the newest object of ours."""
        assert self.held is not None
        return self.held.number

    def renew_at_s(self) -> float:
        """When to renew: early enough to fail twice."""
        return self._renewed_at_s + self.lease_s / 3

    def is_valid(self, now_s: float) -> bool:
        """Whether nobody else can hold it yet, without asking the store."""
        return self.held is not None and now_s < self._renewed_at_s + self.lease_s

    def acquire(self, now_s: float, wall_s: float) -> Steps[Record | Held]:
        """Take it if it is free or has expired."""
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
        """The next number, which is also a new fence. Raises LeaseLost if another has taken it."""
        assert self.held is not None
        outcome = yield from self._create(self.held.number + 1, "held", now_s, wall_s)
        if isinstance(outcome, Held):
            self.held = None
            raise LeaseLost(
                f"the run is held by {outcome.by.holder} now: its lease was not renewed in time"
            )
        return outcome

    def release(self, now_s: float, wall_s: float) -> Steps[None]:
        """Give it up, so that the next one need not wait."""
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
        """Ours may be there already: created by a request whose answer was lost."""
        while True:
            mine = Record(number, self._holder, self._token, state, wall_s)
            yield Create(mine)
            newest, seen_at_s = yield ReadNewest()
            if newest == mine:
                self.held, self._renewed_at_s = mine, now_s
                return mine
            if newest is None:  # deleted at this instant
                continue
            if newest.token != self._token:
                self._seen, self._seen_at_s = newest, seen_at_s
                return Held(newest, self.lease_s)
            number = newest.number + 1


class Holder:
    """Does what a `Lease` says on a store. `clock`, `wall`: see `Lease`. One thread at a time."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        clock: Callable[[], float],
        wall: Callable[[], float],
        used: Callable[[], int] = lambda: 0,
    ) -> None:
        """`used`: the greatest number that something was written under, where no lease is left to
        tell."""
        self.lease, self._used = lease, used
        self._store, self._clock, self._wall = store, clock, wall
        self._folder = f"{store.path.rstrip('/')}/lease" if store.path else "lease"

    def acquire(self) -> Record | Held:
        return self._run(self.lease.acquire(self._clock(), self._wall()))

    def renew(self) -> Record:
        record: Record = self._run(self.lease.renew(self._clock(), self._wall()))
        self._delete_old(record.number)
        return record

    def release(self) -> None:
        self._run(self.lease.release(self._clock(), self._wall()))

    def newest(self) -> Record | None:
        """The lease as it is, whoever holds it."""
        numbers = self._numbers()
        while numbers:
            try:
                return self._read(numbers[-1])
            except ObjectMissing:  # deleted since: there are newer ones
                numbers = self._numbers()
        used = self._used()  # somebody has deleted the leases
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
                    "something that is no file has its name",
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
