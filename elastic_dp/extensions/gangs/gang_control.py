"""The controls of the processes of one worker: all of them decide alike.

The processes run the same program on parts of one model, and collectives of torch among them cannot
be aborted. So no process may go another way than the others: whether to attempt a step, to go on
with the next micro-batch, to commit, or to wait for another generation is decided by the first
process, when all are there. It alone hears the controller.

A follower that comes to a point of decision says so and waits. The first process waits for all of
them, decides, and answers. Three invariants hold:

- One commit: the first process commits when all processes have gathered the whole step, and the
  others follow. A process that waits for the decision cannot be aborted any more.
- A process whose collective failed leaves the generation. The others are sent away at the next
  point of decision, or freed from their collectives.
- A worker lives as long as all of its processes: where one ends, its connection closes, and the
  others end at once. A process that dies in a collective of torch leaves the others there with an
  exception that looks like one of user code. So no failure is posted before all processes have
  shown that they live.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from elastic_dp.coordinator.messages import Membership, WorkerFailed
from elastic_dp.distributed.rendezvous import GroupRecords, MemberRecord, StoreBase
from elastic_dp.errors import ClusterError, GroupAborted, GroupError, LoopError
from elastic_dp.threads import background
from elastic_dp.train.generations.worker_control import (
    ORPHANED,
    Orphaned,
    Released,
    WorkerControl,
)


class Signal(Enum):
    """What the processes say without a value."""

    ARE_YOU_THERE = auto()  # the first process asks whether a follower lives
    HERE = auto()
    LEAVING = auto()  # a follower leaves the generation
    ALL_LEFT = auto()


class Arrived(NamedTuple):
    """A follower waits at this point for the decision."""

    point: str
    payload: Any


class Stored(NamedTuple):
    """A change of the store, which the first process tells all in one order."""

    key: str
    value: bytes | int  # a number is added
    number: int | None = None  # of the follower that asks for it


class Faulted(NamedTuple):
    """The device of a follower has failed, which ends now."""

    kind: str
    text: str


class Waiting(NamedTuple):
    """A follower waits for the store of the data, or does no longer."""

    text: str


class Decided(NamedTuple):
    value: Any


class Refused(NamedTuple):
    error: BaseException


class Aborted(NamedTuple):
    """The generation has ended: leave its collectives."""

    generation: int


class GangStore(StoreBase):
    """The store in which torch's process groups of one worker meet. Every process has all values.
    `change` takes a key, and the value to set or the number to add to it, to the first process,
    where changes have one order, and returns the sum. The first process has the others `apply` a
    change before it returns."""

    def __init__(self, change: Callable[[str, bytes | int], int]) -> None:
        super().__init__(timedelta(minutes=5))  # a peer may be in a long download
        self._change, self._values = change, dist.HashStore()

    def apply(self, key: str, value: bytes | int) -> int:
        """Changes this process's value."""
        if isinstance(value, int):
            return int(self._values.add(key, value))
        self._values.set(key, value)  # type: ignore[arg-type]
        return 0

    # ---------------------------------------------------------------------- torch's interface

    def set(self, key: str, value: Any) -> None:
        self._change(key, value.encode() if isinstance(value, str) else bytes(value))

    def add(self, key: str, value: int) -> int:
        return self._change(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        self._values.wait(keys, timeout or self._timeout)

    def check(self, keys: Any) -> bool:
        return self._values.check(keys)


class GangControl(WorkerControl):
    """What the controls of all processes of a worker have in common."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._agreed_stop: str | None = None
        self._storing = threading.Lock()
        self.store = GangStore(self._change)

    def _change(self, key: str, value: bytes | int) -> int:
        """Changes the store of all processes. Any thread may call it."""
        raise NotImplementedError

    def _decide(self, point: str, payload: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Returns what the first process decides by the payloads of all processes, in order."""
        raise NotImplementedError

    def _as_first(self, point: str, decide: Callable[[], Any]) -> Any:
        return self._decide(point, None, lambda _: decide())

    @property
    def stop_reason(self) -> str | None:
        """The reason on which all processes agreed before the step."""
        return self._agreed_stop

    def agreed(self, value: bool) -> bool:
        return bool(self._decide("agreed", value, lambda told: told[0]))

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._decide("exchange", payload, list)
        return payloads

    def wait(self) -> Any:
        return self._as_first("wait", super().wait)

    def may_attempt(self, step: int) -> str | None:
        decide = super().may_attempt

        def decide_all(stops: list[str | None]) -> tuple[str | None, str | None]:
            return decide(step), next(filter(None, (self._agreed_stop, *stops)), None)

        try:
            reason, self._agreed_stop = self._decide("attempt", self._stop, decide_all)
        except GroupAborted as error:
            return str(error)
        return reason

    def may_continue(self) -> None:
        self._as_first("continue", super().may_continue)

    def commit(self) -> None:
        self._as_first("commit", super().commit)

    def wait_until_ended(self) -> bool:
        try:
            return bool(self._as_first("ended", super().wait_until_ended))
        except GroupAborted:
            return True


class LeaderControl(GangControl):
    """That of the first process. Only its training thread waits for the others."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._followers: Sequence[Connection] = ()
        self._failed = False  # user code has raised in a follower
        self._may_end = False  # the worker ends in order: followers may end before it
        self._waiting: set[int] = set()  # followers that wait for an answer
        self._leaving: set[int] = set()
        self._sending, self._confirming = threading.Lock(), threading.Lock()

    def lead(
        self,
        followers: Sequence[Connection],
        post: Callable[[WorkerFailed], None],
        register: Callable[[MemberRecord], None],
        write_fault: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        """Begins to hear from the followers. `post`, `register` and `say`: to the controller.
        `write_fault`: see `HeartbeatStatus`. All are called on threads of their own."""
        self._followers, self._post, self._say = followers, post, say
        self._register, self._write_fault = register, write_fault
        self._heard: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in followers]
        self._alive: list[queue.SimpleQueue[Signal]] = [queue.SimpleQueue() for _ in followers]
        for number, connection in enumerate(followers):
            background(f"process-{number + 1}", partial(self._read, number, connection)).start()

    def _change(self, key: str, value: bytes | int, number: int | None = None) -> int:
        with self._storing:
            self._send(Stored(key, value, number))
            return self.store.apply(key, value)

    def deliver(self, records: GroupRecords) -> None:
        """Passes on the records of a group of followers. Any thread may call it."""
        self._send(records, [records.group.process - 1])

    def release(self, reason: str) -> None:
        self._may_end = True
        super().release(reason)
        if self._failed:
            os._exit(0)  # the training thread may wait for that follower for ever

    def _end(self, generation: int) -> None:
        super()._end(generation)
        self._send(Aborted(generation))

    def confirm_processes(self) -> None:
        """Returns when all followers have answered that they live. Where one does not live, this
        process ends. Any thread but those that read may call it."""
        with self._confirming:
            if not self._may_end:
                self._send(Signal.ARE_YOU_THERE)
                for answers in self._alive:
                    answers.get()

    # ------------------------------------------------------------------- training thread

    def wait(self) -> Any:
        call = super().wait()
        self._may_end |= isinstance(call, Orphaned)
        return call

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        self._gather("scatter")
        for number, part in enumerate(parts):
            self._answer(Decided(part), {number})
        return b""

    def leave(self) -> int:
        """Sends away followers that still wait for a decision."""
        self._send(Aborted(self._generation))
        refused = Refused(GroupAborted("another process of this worker left the generation"))
        self._answer(refused)
        for number, _ in enumerate(self._followers):
            while number not in self._leaving:
                self._next(number)
                self._answer(refused)
        self._send(Signal.ALL_LEFT)
        self._leaving.clear()
        return super().leave()

    def _decide(self, point: str, payload: Any, decide: Callable[[list[Any]], Any]) -> Any:
        told = [payload, *self._gather(point)]
        try:
            decision = decide(told)
        except (GroupError, Released) as error:
            self._answer(Refused(error))
            raise
        self._answer(Decided(decision))
        return decision

    def _gather(self, point: str) -> list[Any]:
        """Waits until all followers are at this point. Returns what they bring. Raises GroupAborted
        if one leaves the generation, LoopError if one is elsewhere, ClusterError if one did not
        start, and Released if user code raised in one."""
        told = []
        for number, _ in enumerate(self._followers):
            arrived = None if number in self._leaving else self._next(number)
            if arrived is None:
                raise GroupAborted(f"process {number + 1} of this worker left the generation")
            if arrived.point != point:
                raise LoopError(
                    f"process {number + 1} of this worker has come to {arrived.point!r}, and its "
                    f"first process to {point!r}: all processes of a worker must run the same "
                    "program, so call ctx.evaluate on all of them, and loop over all steps"
                )
            told.append(arrived.payload)
        return told

    def _next(self, number: int) -> Arrived | None:
        """Waits for what a follower says next; None: it leaves."""
        message = self._heard[number].get()
        if message is Signal.LEAVING:
            self._leaving.add(number)
            return None
        if isinstance(message, str):
            last = message.strip().splitlines()[-1]
            raise ClusterError(
                f"process {number + 1} of this worker did not start: {last}\n{message}"
            )
        if isinstance(message, WorkerFailed):
            self._wait_for_release()
        self._waiting.add(number)
        arrived: Arrived = message
        return arrived

    def _wait_for_release(self) -> NoReturn:
        """The controller is told what a follower has raised. Raises Released."""
        while (left_s := self.orphaned_in_s()) > 0:
            self.wait_for_release(left_s)
        raise Released(ORPHANED)

    def _answer(self, message: Decided | Refused, numbers: Iterable[int] | None = None) -> None:
        """Answers these followers, or all that wait."""
        answered = self._waiting if numbers is None else set(numbers)
        self._send(message, answered)
        self._waiting = self._waiting - answered

    def _send(self, message: Any, numbers: Iterable[int] | None = None) -> None:
        """Sends to these followers, or to all. Any thread may call it."""
        with self._sending:
            for number in range(len(self._followers)) if numbers is None else numbers:
                with contextlib.suppress(OSError):  # it has ended; `_read` knows what to do
                    self._followers[number].send(message)

    # ------------------------------------------------------------ a thread for each follower

    def _read(self, number: int, connection: Connection) -> None:
        has_started = did_not_start = False
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                if not (self._may_end or did_not_start):
                    text = f"process {number + 1} of this worker has ended, so the worker ends"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(1)
                self._alive[number].put(Signal.HERE)  # nobody need wait for it any more
                return
            if message is Signal.HERE:
                self._alive[number].put(message)
                continue
            if isinstance(message, Faulted):
                self._write_fault(message.kind, message.text)  # before the process ends with it
                continue
            if isinstance(message, MemberRecord):
                self._register(message)
                continue
            if isinstance(message, Waiting):
                self._say(message.text)
                continue
            if isinstance(message, Stored):
                self._change(message.key, message.value, number)
                continue
            if isinstance(message, str) and has_started:
                continue  # it ends now, and has printed that
            did_not_start, has_started = isinstance(message, str), True
            if isinstance(message, WorkerFailed):
                background(f"failure-{number + 1}", partial(self._pass_on, message)).start()
            self._heard[number].put(message)
            if message is Signal.LEAVING:
                with self._changed:  # nobody can go on in the generation
                    self._end(self._generation)

    def _pass_on(self, failure: WorkerFailed) -> None:
        """Tells the controller, once all processes have shown that they live."""
        self.confirm_processes()
        self._failed = True
        self._post(failure)
        if self.orphaned_in_s() <= 0:
            os._exit(1)  # the training thread may wait for that follower for ever


class FollowerControl(GangControl):
    """That of another process of the worker."""

    def __init__(self, leader: Connection, number: int) -> None:
        super().__init__()
        self._number = number - 1  # among the followers
        self._leader, self._sending = leader, threading.Lock()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._totals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def follow(self, on_records: Callable[[GroupRecords], None]) -> None:
        """Begins to hear from the first process. `on_records` is called with the records of a group
        that this process registered for, on a thread of its own."""
        self._on_records = on_records
        background("leader", self._read, lambda _: os._exit(1)).start()

    def _change(self, key: str, value: bytes | int) -> int:
        with self._storing:
            self.tell(Stored(key, value))
            return self._totals.get()

    def tell(
        self, message: Arrived | Faulted | MemberRecord | Stored | Waiting | WorkerFailed | Signal
    ) -> None:
        """Sends this to the first process. Any thread may call it."""
        try:
            with self._sending:
                self._leader.send(message)
        except OSError:
            os._exit(1)

    # ------------------------------------------------------------------- training thread

    def wait(self) -> Any:
        call = super().wait()
        if isinstance(call, Membership):
            with self._changed:
                self._enter(call)
        return call

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        part: bytes = self._decide("scatter", None, lambda _: None)
        return part

    def leave(self) -> int:
        self.tell(Signal.LEAVING)
        answer = self._answers.get()
        assert answer is Signal.ALL_LEFT, answer
        return super().leave()

    def _decide(self, point: str, payload: Any, decide: Callable[[list[Any]], Any]) -> Any:
        self.tell(Arrived(point, payload))
        answer = self._answers.get()
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Decided), answer
        return answer.value

    def _read(self) -> None:
        while True:
            try:
                message = self._leader.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Aborted):
                with self._changed:
                    self._end(message.generation)
            elif isinstance(message, GroupRecords):
                self._on_records(message)
            elif isinstance(message, Stored):
                total = self.store.apply(message.key, message.value)
                if message.number == self._number:
                    self._totals.put(total)
            elif message is Signal.ARE_YOU_THERE:
                self.tell(Signal.HERE)
            else:
                self._answers.put(message)
