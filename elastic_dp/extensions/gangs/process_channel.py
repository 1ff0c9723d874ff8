"""The connections between the first process of a worker and its others, the followers.

A follower that comes to a point at which all processes must decide alike says so and waits. The
first process waits for all of them, decides, and answers. A follower that leaves the generation
says that instead. Where a process ends, its connection closes, and the others end at once: a
worker lives as long as all of its processes.

A process that fails before it says anything sends its traceback, as a plain text: it may lack this
package. The first process raises it where it waits for that process.

Where a process dies in a collective of torch, those who wait for it there get an exception. That
looks like one of user code, so no failure is posted before all processes have shown that they live.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from elastic_dp.coordinator.messages import WorkerFailed
from elastic_dp.distributed.rendezvous import GroupRecords, MemberRecord
from elastic_dp.errors import ClusterError, GroupAborted, LoopError
from elastic_dp.threads import background


class ProcessFailed(Exception):
    """User code raised in a follower, and the controller was told."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A follower waits at this point for the decision."""

    point: str
    payload: Any


@dataclass(frozen=True, slots=True)
class Leaving:
    """A follower leaves the generation."""


@dataclass(frozen=True, slots=True)
class Posted:
    """User code raised in a follower."""

    event: WorkerFailed


@dataclass(frozen=True, slots=True)
class Faulted:
    """The device of a follower has failed, which ends now."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class AreYouThere:
    """The first process asks whether this one lives."""


@dataclass(frozen=True, slots=True)
class Here:
    """A follower lives."""


@dataclass(frozen=True, slots=True)
class Decided:
    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    error: BaseException


@dataclass(frozen=True, slots=True)
class AllLeft:
    """All processes have left the generation."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The generation has ended: leave its collectives."""

    generation: int


class LeaderChannel:
    """The side of the first process. Only its training thread calls what waits."""

    def __init__(
        self,
        followers: Sequence[Connection],
        on_leaving: Callable[[], None],
        on_failure: Callable[[WorkerFailed], None],
        on_record: Callable[[MemberRecord], None] = lambda record: None,
        on_fault: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        """`on_leaving`: a follower leaves. `on_failure`: user code has raised in one, and all
        live. `on_record`: one registers for a group. `on_fault`: the device of one has failed. All
        are called on threads of their own."""
        self._followers = followers
        self._on_leaving, self._on_failure = on_leaving, on_failure
        self._on_record, self._on_fault = on_record, on_fault
        self._arrived: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in followers]
        self._alive: list[queue.SimpleQueue[Here]] = [queue.SimpleQueue() for _ in followers]
        self._asking = threading.Lock()
        self._waiting: set[int] = set()  # followers that wait for an answer
        self._leaving: set[int] = set()
        self._sending = threading.Lock()
        self._ends = False  # the worker ends in order: followers may end before it

    def open(self) -> None:
        for number, connection in enumerate(self._followers):
            background(f"process-{number + 1}", partial(self._read, number, connection)).start()

    def expect_ends(self) -> None:
        """From now on followers may end."""
        self._ends = True

    def confirm(self) -> None:
        """Returns when all followers have answered that they live. Where one does not live, this
        process ends. Any thread but those that read may call it."""
        with self._asking:
            if self._ends:
                return
            self._send(range(len(self._followers)), AreYouThere())
            for answers in self._alive:
                answers.get()

    def gather(self, point: str) -> list[Any]:
        """Waits until all followers are at this point. Returns what they bring. Raises GroupAborted
        if one leaves the generation, LoopError if one is elsewhere, ClusterError if one did not
        start, and ProcessFailed."""
        told = []
        for number in range(len(self._followers)):
            message = None if number in self._leaving else self._next(number)
            if not isinstance(message, Arrived):
                raise GroupAborted(f"process {number + 1} of this worker left the generation")
            if message.point != point:
                raise LoopError(
                    f"process {number + 1} of this worker has come to {message.point!r}, and its "
                    f"first process to {point!r}: all processes of a worker must run the same "
                    "program, so call ctx.evaluate on all of them, and loop over all steps"
                )
            told.append(message.payload)
        return told

    def answer(self, value: Any) -> None:
        self._send(self._waiting, Decided(value))
        self._waiting.clear()

    def answer_each(self, values: Sequence[Any]) -> None:
        """Answers each follower with a value of its own."""
        for number, value in enumerate(values):
            self._send([number], Decided(value))
        self._waiting.clear()

    def refuse(self, error: BaseException) -> None:
        self._send(self._waiting, Refused(error))
        self._waiting.clear()

    def abort(self, generation: int) -> None:
        """Frees the followers from the collectives of this generation. Any thread may call it."""
        self._send(range(len(self._followers)), Aborted(generation))

    def deliver(self, records: GroupRecords) -> None:
        """Passes on the records of a group of followers. Any thread may call it."""
        self._send([records.group.process - 1], records)

    def wait_until_all_leave(self) -> None:
        """Sends away followers that still wait for a decision. Raises ProcessFailed."""
        self.refuse(GroupAborted("another process of this worker left the generation"))
        for number in range(len(self._followers)):
            while number not in self._leaving:
                self._next(number)
                self.refuse(GroupAborted("another process of this worker left the generation"))
        self._send(self._leaving, AllLeft())
        self._leaving.clear()

    def _next(self, number: int) -> Arrived | None:
        """Waits for what a follower says next; None: it leaves."""
        message = self._arrived[number].get()
        if isinstance(message, Leaving):
            self._leaving.add(number)
            return None
        if isinstance(message, str):
            last = message.strip().splitlines()[-1]
            raise ClusterError(
                f"process {number + 1} of this worker did not start: {last}\n{message}"
            )
        if not isinstance(message, Arrived):
            raise ProcessFailed
        self._waiting.add(number)
        return message

    def _read(self, number: int, connection: Connection) -> None:
        has_started = did_not_start = False
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                if not (self._ends or did_not_start):
                    text = f"process {number + 1} of this worker has ended, so the worker ends"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(1)
                self._alive[number].put(Here())  # nobody need wait for it any more
                return
            if isinstance(message, Here):
                self._alive[number].put(message)
                continue
            if isinstance(message, Faulted):
                self._on_fault(message.kind, message.text)  # before the process ends with it
                continue
            if isinstance(message, MemberRecord):
                self._on_record(message)
                continue
            if isinstance(message, str) and has_started:
                continue  # it ends now, and has printed that
            did_not_start, has_started = isinstance(message, str), True
            if isinstance(message, Posted):
                background(f"failure-{number + 1}", partial(self._failed, message.event)).start()
            self._arrived[number].put(message)
            if isinstance(message, Leaving):
                self._on_leaving()

    def _failed(self, event: WorkerFailed) -> None:
        self.confirm()
        self._on_failure(event)

    def _send(self, numbers: Any, message: Any) -> None:
        with self._sending:
            for number in numbers:
                try:
                    self._followers[number].send(message)
                except OSError:  # it has ended; `_read` knows what to do
                    continue


class FollowerChannel:
    """The side of a follower."""

    def __init__(
        self,
        leader: Connection,
        on_abort: Callable[[int], None],
        on_records: Callable[[GroupRecords], None] = lambda records: None,
    ) -> None:
        """`on_abort` is called with a generation, `on_records` with the records of a group that
        this process registered for, on a thread of its own."""
        self._leader, self._on_abort, self._on_records = leader, on_abort, on_records
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def open(self) -> None:
        background("leader", self._read, lambda _: os._exit(1)).start()

    def arrive(self, point: str, payload: Any = None) -> Any:
        """Waits at this point for the decision, and returns it. Raises what was decided to
        raise."""
        self._send(Arrived(point, payload))
        answer = self._answers.get()
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Decided), answer
        return answer.value

    def leave(self) -> None:
        """Waits until all processes of the worker have left the generation."""
        self._send(Leaving())
        answer = self._answers.get()
        assert isinstance(answer, AllLeft), answer

    def fail(self, event: WorkerFailed) -> None:
        self._send(Posted(event))

    def register(self, record: MemberRecord) -> None:
        self._send(record)

    def tell_fault(self, kind: str, text: str) -> None:
        self._send(Faulted(kind, text))

    def _read(self) -> None:
        while True:
            try:
                message = self._leader.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(message, Aborted):
                self._on_abort(message.generation)
            elif isinstance(message, GroupRecords):
                self._on_records(message)
            elif isinstance(message, AreYouThere):
                self._send(Here())
            else:
                self._answers.put(message)

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._leader.send(message)
        except OSError:
            os._exit(1)
