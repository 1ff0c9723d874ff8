"""Finished sums of a bucket go to those that need them, and arrive piece by piece."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from elastic_dp.distributed.piece_routes import HeldRange, piece_route


@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize("seed", range(20))
def test_each_rank_gets_its_pieces_whole(seed, block):
    """Also blocks that are sent in an element more, as with a scale."""
    rng = random.Random(seed)
    world_size, numel = rng.randint(3, 6), rng.randint(1, 200)
    blocks, record = -(-numel // block), block + (block > 1)
    chunk = -(-blocks // world_size)
    ends = sorted({0, numel, *(rng.randint(0, numel) // block * block for _ in range(6))})
    ranges = [
        HeldRange(number, first, last, rng.sample(range(world_size), 2))
        for number, (first, last) in enumerate(itertools.pairwise(ends))
        if rng.random() < 0.9  # some elements nobody needs
    ]
    bucket = torch.full((world_size * chunk, record), -1)
    bucket[:, record - block :] = torch.arange(world_size * chunk * block).view(-1, block)
    parts = bucket.view(world_size, chunk * record)
    routes = [
        piece_route(r, world_size, chunk, ranges, blocks, block=block, record=record)
        for r in range(world_size)
    ]
    sent = [
        torch.cat([part[slice(*cut)] for cut in route.cuts] or [part[:0]])
        for part, route in zip(parts, routes, strict=True)
    ]
    for rank, route in enumerate(routes):
        assert [one.sent[rank] for one in routes] == route.received
        received = torch.cat([flat.split(routes[r].sent)[rank] for r, flat in enumerate(sent)])
        received = received.view(-1, record)[:, record - block :].flatten()
        needed = {one.piece: one for one in ranges if rank in one.ranks}
        assert {piece for piece, _, _ in route.held} == needed.keys()
        for piece, first, last in route.held:
            one = needed[piece]
            assert received[first:last].tolist() == list(range(one.first, one.last))
