"""The controls of the processes of one worker: all of them decide alike.

The processes run the same program on parts of one model, and collectives of torch among them cannot
be aborted. So no process may go another way than the others: whether to attempt a step, to go on
with the next micro-batch, to commit, or to wait for another generation is decided by the first
process, when all are there. It alone hears the controller.

- One commit: the first process commits when all processes have gathered the whole step, and the
  others follow. A process that waits for the decision cannot be aborted any more.
- A process whose collective failed leaves the generation. The others are sent away at the next
  point of decision, or freed from their collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from elastic_dp.coordinator.messages import Membership, WorkerFailed
from elastic_dp.distributed.rendezvous import GroupRecords, MemberRecord
from elastic_dp.errors import GroupAborted, GroupError
from elastic_dp.extensions.gangs.process_channel import (
    FollowerChannel,
    LeaderChannel,
    ProcessFailed,
)
from elastic_dp.train.generations.worker_control import (
    ORPHANED,
    Orphaned,
    Released,
    WorkerControl,
)

T = TypeVar("T")


class LeaderControl(WorkerControl):
    """That of the first process."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._channel: LeaderChannel | None = None
        self._post: Callable[[WorkerFailed], None] | None = None
        self._failed = False  # user code has raised in a follower
        self._agreed_stop: str | None = None

    def lead(
        self,
        followers: Sequence[Connection],
        post: Callable[[WorkerFailed], None],
        register: Callable[[MemberRecord], None],
        write_fault: Callable[[str, str], None],
    ) -> None:
        """Begins to hear from the followers. `post` and `register`: to the controller.
        `write_fault`: see `HeartbeatStatus`."""
        self._post = post
        self._channel = LeaderChannel(
            followers,
            on_leaving=self._follower_leaves,
            on_failure=self._follower_failed,
            on_record=register,
            on_fault=write_fault,
        )
        self._channel.open()

    def deliver(self, records: GroupRecords) -> None:
        """Takes the records of a group of followers, on any thread."""
        assert self._channel is not None
        self._channel.deliver(records)

    def _follower_leaves(self) -> None:
        """Ends the generation, since nobody can go on in it."""
        with self._changed:
            self._end(self._generation)

    def _follower_failed(self, failure: WorkerFailed) -> None:
        """Tells the controller. The follower says this repeatedly."""
        assert self._post is not None
        self._failed = True
        self._post(failure)
        if self.orphaned_in_s() <= 0:
            os._exit(1)  # the training thread may wait for that follower for ever

    def release(self, reason: str) -> None:
        self._expect_ends()
        super().release(reason)
        if self._failed:
            os._exit(0)  # the training thread may wait for that follower for ever

    def _end(self, generation: int) -> None:
        super()._end(generation)
        if self._channel is not None:
            self._channel.abort(generation)

    # ------------------------------------------------------------------- training thread

    @property
    def stop_reason(self) -> str | None:
        """The reason on which all processes agreed before the step."""
        return self._agreed_stop

    def ready(self, inexact_because: Sequence[str]) -> list[str]:
        def all_reasons(told: list[Sequence[str]]) -> list[str]:
            return list(dict.fromkeys(chain(inexact_because, *told)))

        return self._decide("ready", all_reasons)

    def confirm_processes(self) -> None:
        assert self._channel is not None
        self._channel.confirm()

    def agreed(self, value: bool) -> bool:
        return self._decide("agreed", lambda _: value)

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._decide("exchange", lambda told: [payload, *told])

    def hand_out(self, parts: Sequence[bytes]) -> None:
        assert self._channel is not None
        self._gather("part")
        self._channel.answer_each(parts)

    def part(self) -> bytes:
        raise AssertionError("the first process hands out")

    def wait(self) -> Any:
        decide = super().wait
        call = self._decide("wait", lambda _: decide())
        if isinstance(call, Orphaned):
            self._expect_ends()
        return call

    def may_attempt(self, step: int) -> str | None:
        decide = super().may_attempt

        def decide_all(told: list[str | None]) -> tuple[str | None, str | None]:
            stops = [self._agreed_stop, self._stop, *told]
            self._agreed_stop = next((stop for stop in stops if stop is not None), None)
            return decide(step), self._agreed_stop

        try:
            return self._decide("attempt", decide_all)[0]
        except GroupAborted as error:
            return str(error)

    def may_continue(self) -> None:
        decide = super().may_continue
        self._decide("continue", lambda _: decide())

    def commit(self) -> None:
        decide = super().commit
        self._decide("commit", lambda _: decide())

    def wait_until_ended(self) -> bool:
        decide = super().wait_until_ended
        try:
            return self._decide("ended", lambda _: decide())
        except GroupAborted:
            return True

    def leave(self) -> int:
        assert self._channel is not None
        self._channel.abort(self._generation)
        try:
            self._channel.wait_until_all_leave()
        except ProcessFailed:
            self._wait_for_end()
        return super().leave()

    def _expect_ends(self) -> None:
        assert self._channel is not None
        self._channel.expect_ends()

    def _decide(self, point: str, decide: Callable[[list[Any]], T]) -> T:
        told = self._gather(point)
        assert self._channel is not None
        try:
            decision = decide(told)
        except (GroupError, Released) as error:
            self._channel.refuse(error)
            raise
        self._channel.answer(decision)
        return decision

    def _gather(self, point: str) -> list[Any]:
        assert self._channel is not None
        try:
            return self._channel.gather(point)
        except ProcessFailed:
            self._wait_for_end()

    def _wait_for_end(self) -> NoReturn:
        """Waits for the release, since the controller is told what a follower has raised. Raises
        Released."""
        while (left_s := self.orphaned_in_s()) > 0:
            self.wait_for_release(left_s)
        raise Released(ORPHANED)


class FollowerControl(WorkerControl):
    """That of another process of the worker."""

    def __init__(self) -> None:
        super().__init__()
        self._channel: FollowerChannel | None = None
        self._agreed_stop: str | None = None

    def follow(self, channel: FollowerChannel) -> None:
        """Begins to hear from the first process."""
        self._channel = channel
        channel.open()

    def abort(self, generation: int) -> None:
        with self._changed:
            self._end(generation)

    # ------------------------------------------------------------------- training thread

    @property
    def stop_reason(self) -> str | None:
        return self._agreed_stop

    def ready(self, inexact_because: Sequence[str]) -> list[str]:
        found: list[str] = self._arrive("ready", list(inexact_because))
        return found

    def agreed(self, value: bool) -> bool:
        return bool(self._arrive("agreed"))

    def hand_out(self, parts: Sequence[bytes]) -> None:
        raise AssertionError("only the first process hands out")

    def part(self) -> bytes:
        found: bytes = self._arrive("part")
        return found

    def exchange(self, payload: bytes) -> list[bytes]:
        found: list[bytes] = self._arrive("exchange", payload)
        return found

    def wait(self) -> Any:
        call = self._arrive("wait")
        if isinstance(call, Membership):
            with self._changed:
                self._enter(call)
        return call

    def may_attempt(self, step: int) -> str | None:
        try:
            reason, self._agreed_stop = self._arrive("attempt", self._stop)
        except GroupAborted as error:
            return str(error)
        return reason

    def may_continue(self) -> None:
        self._arrive("continue")

    def commit(self) -> None:
        self._arrive("commit")

    def wait_until_ended(self) -> bool:
        try:
            return bool(self._arrive("ended"))
        except GroupAborted:
            return True

    def leave(self) -> int:
        assert self._channel is not None
        self._channel.leave()
        return super().leave()

    def _arrive(self, point: str, payload: Any = None) -> Any:
        assert self._channel is not None
        return self._channel.arrive(point, payload)
