"""Moves units of state from the members that have them to the members that need them.

This is the one way in which state travels between members: to a worker that joins or is behind, to
the holders of a sharded optimizer's state, and to all members when they read a checkpoint together.

- The plan is arithmetic on who has and who needs each unit, so all members make the same one.
  Several holders share the work. A member that receives a unit may send it on in a later round, so
  one source can serve many receivers.
- A round sends a limited number of bytes, so no side needs memory for all units at once, but for
  the rounds in flight. A move may go on over several steps, with some rounds in each.
- A move writes to no unit but those that this member needs. Nobody may use what has arrived before
  `finish` has returned or `is_done` is true: if another member is lost, GroupError ends the move.

Bytes travel through the host. They mean nothing here: `state_payload.py` has their format.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.process_group import ProcessGroup

ROUND_BYTES = 4 << 20  # that a member sends or receives in one round, or one unit
UNIT_BYTES = 2 << 20  # of a large tensor's units
_MAX_IN_FLIGHT = 2  # rounds of `finish`


@dataclass(frozen=True, slots=True)
class StateUnit:
    """A piece of state, with an equal number on all members. `nbytes` is its size, equal on all
    members: the plan depends on it. If it is not `exact`, its sender tells the size, which takes an
    exchange more. `read` returns the content as byte vectors that follow each other; `write` takes
    it as one vector on the host."""

    nbytes: int
    read: Callable[[], Sequence[torch.Tensor]]
    write: Callable[[torch.Tensor], object]
    exact: bool = True


class Transfer(NamedTuple):
    unit: int
    sender: int
    receiver: int


def units_of(*flats: torch.Tensor) -> list[StateUnit]:
    """Returns the units of byte vectors. Small ones are together in a unit."""
    groups, room = list[list[torch.Tensor]](), 0
    for flat in flats:
        for part in flat.split(UNIT_BYTES) if len(flat) else ():
            if not groups or len(part) > room:
                groups.append([])
                room = UNIT_BYTES
            groups[-1].append(part)
            room -= len(part)
    return [
        StateUnit(sum(map(len, parts)), partial(list, parts), partial(write_parts, parts))
        for parts in groups
    ]


def write_parts(parts: Sequence[torch.Tensor], content: torch.Tensor) -> None:
    """Writes the content of a unit to the byte vectors that it consists of."""
    for part, given in zip(parts, content.split([*map(len, parts)]), strict=True):
        part.copy_(given)


def ranks_with(group: ProcessGroup, mine: Iterable[int], count: int) -> list[list[int]]:
    """Returns the ranks that have each of `count` units, equal on all members. `mine`: the units of
    this one. Raises GroupError."""
    flags = bytearray(count)
    for unit in mine:
        flags[unit] = 1
    ranks: list[list[int]] = [[] for _ in flags]
    for rank, told in enumerate(group.gather_equal(bytes(flags))):
        for unit, flag in enumerate(told):
            if flag:
                ranks[unit].append(rank)
    return ranks


def plan_rounds(
    have: Sequence[Collection[int]],
    need: Sequence[Collection[int]],
    sizes: Sequence[int],
    limit: int,
) -> list[list[Transfer]]:
    """Returns the transfers of each round, after which the ranks in `need[unit]` have each unit.
    Only ranks that have a unit when a round begins send it in that round. In each, a member sends
    or receives about `limit` bytes, or one unit."""
    present = [sorted(ranks) for ranks in have]
    missing = [sorted(set(ranks).difference(some)) for ranks, some in zip(need, have, strict=True)]
    sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
    rounds: list[list[Transfer]] = []
    while any(missing):
        sent_before, received_before = dict(sent), dict(received)
        wave: defaultdict[int, list[Transfer]] = defaultdict(list)
        for unit, waiting in enumerate(missing):
            if not waiting:
                continue
            senders = present[unit]
            waiting.sort(key=lambda rank: (received[rank], rank))
            served, missing[unit] = waiting[: len(senders)], waiting[len(senders) :]
            assert served, f"nobody has unit {unit}"
            for receiver in served:
                sender = min(senders, key=lambda rank: (sent[rank], rank))
                busy = max(
                    sent[sender] - sent_before.get(sender, 0),
                    received[receiver] - received_before.get(receiver, 0),
                )
                wave[busy // limit].append(Transfer(unit, sender, receiver))
                sent[sender] += sizes[unit]
                received[receiver] += sizes[unit]
            present[unit] = senders + served
        rounds += [wave[number] for number in sorted(wave)]
    return rounds


class Move:
    """One member's side of a move. All members make equal calls, with equal arguments."""

    def __init__(
        self,
        group: ProcessGroup,
        units: Sequence[StateUnit],
        have: Sequence[Collection[int]],
        need: Sequence[Collection[int]],
        *,
        budget: int | None = None,
    ) -> None:
        """`have` and `need` are the ranks that have and need each unit. `budget`: what a member
        sends or receives in one round, in bytes."""
        self._group, self._units = group, units
        sizes = [unit.nbytes for unit in units]
        self._rounds = deque(plan_rounds(have, need, sizes, budget or ROUND_BYTES))
        self._in_flight: deque[_Round] = deque()
        self.received_bytes = 0
        self.arrived: set[int] = set()  # units that this member has received

    @property
    def is_done(self) -> bool:
        return not self._rounds and not self._in_flight

    @property
    def in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_over(self) -> bool:
        """Whether `take` need not wait for other members."""
        return all(one.is_over for one in self._in_flight)

    def begin(self, rounds: int = 1) -> None:
        """Begins the next rounds, up to one that sends what is still in flight. Waits for members
        that have not begun where a size is not known. Raises GroupError."""
        for _ in range(rounds):
            if self._may_begin():
                self._in_flight.append(_Round(self._group, self._units, self._rounds.popleft()))

    def take(self) -> None:
        """Waits for what is in flight, and writes it. Raises GroupError."""
        while self._in_flight:
            self._land()

    def finish(self) -> int:
        """Does all rounds that are left. Returns the bytes received. Raises GroupError."""
        while not self.is_done:
            if len(self._in_flight) < _MAX_IN_FLIGHT and self._may_begin():
                self.begin()
            else:
                self._land()
        return self.received_bytes

    def _may_begin(self) -> bool:
        if not self._rounds:
            return False
        arriving = {one.unit for some in self._in_flight for one in some.transfers}
        return not any(one.unit in arriving for one in self._rounds[0])

    def _land(self) -> None:
        one = self._in_flight.popleft()
        one.land()
        self.received_bytes += one.nbytes
        self.arrived |= {unit for unit, _, to in one.transfers if to == self._group.rank}


def move(
    group: ProcessGroup,
    units: Sequence[StateUnit],
    have: Sequence[Collection[int]],
    need: Sequence[Collection[int]],
) -> int:
    """Moves all units at once. See `Move`. Returns the bytes received. Raises GroupError."""
    return Move(group, units, have, need).finish()


def hand_out(
    group: ProcessGroup,
    content: bytes,
    source: int,
    receivers: Sequence[int],
    nbytes: int | None = None,
) -> bytes:
    """Gives the ranks `receivers` the content that `source` has. Returns what this member has then.
    `nbytes`: the size of the content, if all members know it. Raises GroupError."""
    told = bytearray(content)
    unit = StateUnit(
        1 if nbytes is None else nbytes,
        lambda: [torch.frombuffer(told, dtype=torch.uint8)],
        lambda given: told.extend(given.numpy().tobytes()),
        exact=nbytes is not None,
    )
    move(group, [unit], [[source]], [receivers])
    return bytes(told)


class _Round:
    """Units on their way. Members first tell each receiver sizes that are not known."""

    def __init__(
        self, group: ProcessGroup, units: Sequence[StateUnit], transfers: Sequence[Transfer]
    ) -> None:
        self._group, self._units, self.transfers = group, units, transfers
        ranks = range(group.world_size)
        outgoing: list[list[int]] = [[] for _ in ranks]
        self._incoming: list[list[int]] = [[] for _ in ranks]
        for unit, sender, receiver in transfers:
            if sender == group.rank:
                outgoing[receiver].append(unit)
            if receiver == group.rank:
                self._incoming[sender].append(unit)
        read = {unit: units[unit].read() for unit in dict.fromkeys(chain.from_iterable(outgoing))}
        size_of = {unit: sum(part.numel() for part in parts) for unit, parts in read.items()}
        to_send = [part for some in outgoing for unit in some for part in read[unit]]
        vectors = on_host(group, to_send)
        sizes = torch.tensor(
            [units[unit].nbytes for some in self._incoming for unit in some], dtype=torch.int64
        )
        if not all(units[unit].exact for unit, _, _ in transfers):
            mine = [size_of[unit] for some in outgoing for unit in some]
            counts = [[len(some) for some in each] for each in (self._incoming, outgoing)]
            group.wait(group.all_to_all(sizes, torch.tensor(mine, dtype=torch.int64), *counts))
        self._lengths: list[int] = sizes.tolist()
        lengths = iter(self._lengths)
        incoming = [sum(next(lengths) for _ in some) for some in self._incoming]
        self.nbytes = sum(incoming)
        self._arrived = torch.empty(self.nbytes, dtype=torch.uint8)
        flat = torch.cat([self._arrived[:0], *vectors])
        counts = [incoming, [sum(size_of[unit] for unit in some) for some in outgoing]]
        self._sending = group.all_to_all(self._arrived, flat, *counts)

    @property
    def is_over(self) -> bool:
        return self._group.is_over(self._sending)

    def land(self) -> None:
        self._group.wait(self._sending)
        units = chain.from_iterable(self._incoming)
        for unit, content in zip(units, self._arrived.split(self._lengths), strict=True):
            self._units[unit].write(content)  # to a device, it waits: the memory is gone afterwards


def on_host(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors on the host, copied behind what is launched. Raises GroupError."""
    remote = [tensor for tensor in tensors if accelerator_of(tensor.device).asynchronous]
    if not remote:
        return list(tensors)
    assert group.on_device is not None
    read = iter(group.on_device.read(remote))
    is_remote = {id(tensor) for tensor in remote}
    return [next(read) if id(tensor) in is_remote else tensor for tensor in tensors]
