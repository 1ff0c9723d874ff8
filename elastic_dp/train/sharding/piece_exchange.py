"""Copies the state of pieces from members that hold it to members that are to hold it.

All members call `exchange` with the same moves. What arrives is new memory, so nothing that a
member holds changes. It is sent in rounds of a limited size: neither side needs room for all at
once. What is on a device travels through the host.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch

from elastic_dp.checkpoint.decoding import decode
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.distributed.piece_assignment import Move
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import from_flat, on_host, to_flats
from elastic_dp.train.sharding.piece_updates import State

ROUND_BYTES = 4 << 20  # of parameters, between two members


def exchange(
    group: ProcessGroup,
    moves: Sequence[Move],
    sizes: Sequence[int],
    states: Mapping[int, State],
    take: Callable[[int, State], None],
    device: torch.device,
) -> int:
    """Calls `take` with each piece that this member receives, and its state. Returns the bytes
    received. Raises GroupError.

    `sizes[piece]` is that of its parameters in bytes. `device`: of the parameters.
    """
    nbytes = 0
    for moved in _rounds(moves, sizes):
        outgoing: defaultdict[int, list[int]] = defaultdict(list)
        for move in moved:
            if move.sender == group.rank:
                outgoing[move.receiver].append(move.piece)
        sent = [
            _pack({n: states[n] for n in outgoing[rank]}) if outgoing[rank] else []
            for rank in range(group.world_size)
        ]
        arrived = _all_to_all(group, sent)
        for flat in arrived:
            if flat.numel():
                for piece, state in _unpack(flat, device):
                    take(piece, state)
                nbytes += flat.numel()
    return nbytes


def _rounds(moves: Sequence[Move], sizes: Sequence[int]) -> list[list[Move]]:
    """Returns the moves of each round, the same on all members."""
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)
    rounds: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        pair = move.sender, move.receiver
        rounds[sent[pair] // ROUND_BYTES].append(move)
        sent[pair] += sizes[move.piece]
    return [rounds[number] for number in sorted(rounds)]


def _all_to_all(group: ProcessGroup, sent: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Sends the byte vectors `sent[r]` to rank r. Returns what each rank sent to this one."""
    size = group.world_size
    vectors = on_host(group, list(chain.from_iterable(sent)))
    flat = torch.cat([torch.empty(0, dtype=torch.uint8), *vectors])
    if size == 1:
        return [flat]
    mine = torch.tensor([sum(x.numel() for x in one) for one in sent], dtype=torch.int64)
    table = torch.empty(size * size, dtype=torch.int64)
    group.wait(group.all_gather(table, mine))
    sizes = table.view(size, size)[:, group.rank].tolist()
    arrived = torch.empty(sum(sizes), dtype=torch.uint8)
    group.wait(group.all_to_all(arrived, flat, sizes, mine.tolist()))
    return list(arrived.split(sizes))


def _pack(states: Mapping[int, State]) -> list[torch.Tensor]:
    encoded, tensors = encode([[piece, state] for piece, state in states.items()])
    text = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    return to_flats(text, [tensor for _, tensor in tensors])


def _unpack(flat: torch.Tensor, device: torch.device) -> list[tuple[int, State]]:
    text, tensors = from_flat(flat, device)
    return [(piece, state) for piece, state in decode(json.loads(text), tensors, types={})]
