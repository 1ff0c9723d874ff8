"""Copies the state of pieces from members that hold it to members that are to hold it.

All members take part with the same moves. What arrives is new memory, so nothing that a member
holds changes. It is sent in rounds of a limited size: neither side needs room for all at once.
What is on a device travels through the host.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch

from elastic_dp.checkpoint.codec import decode, encode
from elastic_dp.distributed.piece_assignment import Move
from elastic_dp.distributed.process_group import Operation, ProcessGroup
from elastic_dp.distributed.tensor_broadcast import from_flat, on_host, to_flats
from elastic_dp.train.sharding.piece_updates import State

ROUND_BYTES = 4 << 20  # of parameters, between two members


class PieceRound:
    """Pieces on their way. What is sent is their state as it is now, which must not change before
    `send`.

    Members first tell each other how many bytes they send, for which nobody waits before `send`.
    """

    def __init__(
        self, group: ProcessGroup, moves: Sequence[Move], states: Mapping[int, State]
    ) -> None:
        """Tells the others what this member is to send. Raises GroupError."""
        self._group = group
        outgoing: defaultdict[int, list[int]] = defaultdict(list)
        for move in moves:
            if move.sender == group.rank:
                outgoing[move.receiver].append(move.piece)
        sent = [
            _pack({n: states[n] for n in outgoing[rank]}) if outgoing[rank] else []
            for rank in range(group.world_size)
        ]
        self._vectors = on_host(group, list(chain.from_iterable(sent)))
        self._mine = torch.tensor([sum(x.numel() for x in one) for one in sent], dtype=torch.int64)
        self._table = torch.empty(len(sent) ** 2, dtype=torch.int64)
        self._telling = group.all_gather(self._table, self._mine)
        self._sending: Operation | None = None

    def send(self) -> None:
        """Sends the pieces. Raises GroupError."""
        if self._sending is not None:
            return
        group = self._group
        group.wait(self._telling)
        self._sizes = self._table.view(group.world_size, -1)[:, group.rank].tolist()
        self._arrived = torch.empty(sum(self._sizes), dtype=torch.uint8)
        flat = torch.cat([self._arrived[:0], *self._vectors])
        self._vectors = []
        self._sending = group.all_to_all(self._arrived, flat, self._sizes, self._mine.tolist())

    @property
    def nbytes(self) -> int:
        """What this member receives, once it has sent what it is to send."""
        return len(self._arrived)

    def arrive(self, device: torch.device) -> list[tuple[int, State]]:
        """Waits for the pieces that this member receives, and returns their state. `device`: of the
        parameters. Raises GroupError."""
        self.send()
        assert self._sending is not None
        self._group.wait(self._sending)
        return [
            piece
            for flat in self._arrived.split(self._sizes)
            if len(flat)
            for piece in _unpack(flat, device)
        ]


def exchange(
    group: ProcessGroup,
    rounds: Iterable[Sequence[Move]],
    states: Mapping[int, State],
    take: Callable[[int, State], None],
    device: torch.device,
) -> int:
    """Calls `take` with each piece that this member receives, and its state, round by round.
    Returns the bytes received. Raises GroupError."""
    nbytes = 0
    for moves in rounds:
        pieces = PieceRound(group, moves, states)
        for piece, state in pieces.arrive(device):
            take(piece, state)
        nbytes += pieces.nbytes
    return nbytes


def rounds_of(
    moves: Sequence[Move], sizes: Sequence[int], limit: int = ROUND_BYTES
) -> list[list[Move]]:
    """Returns the moves of each round, the same on all members. In each, a member sends about
    `limit` bytes to another one; `sizes[piece]` is that of its parameters."""
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)
    rounds: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        pair = move.sender, move.receiver
        rounds[sent[pair] // limit].append(move)
        sent[pair] += sizes[move.piece]
    return [rounds[number] for number in sorted(rounds)]


def _pack(states: Mapping[int, State]) -> list[torch.Tensor]:
    encoded, tensors = encode([[piece, state] for piece, state in states.items()])
    text = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    return to_flats(text, [tensor for _, tensor in tensors])


def _unpack(flat: torch.Tensor, device: torch.device) -> list[tuple[int, State]]:
    text, tensors = from_flat(flat, device)
    return [(piece, state) for piece, state in decode(json.loads(text), tensors)]
