"""Finished sums of a bucket go to those that need them, and arrive piece by piece."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from elastic_dp.distributed.piece_routes import HeldRange, piece_route


@pytest.mark.parametrize("seed", range(20))
def test_each_rank_gets_its_pieces_whole(seed):
    rng = random.Random(seed)
    world_size, numel = rng.randint(3, 6), rng.randint(1, 200)
    chunk = -(-numel // world_size)
    ends = sorted({0, numel, *(rng.randint(0, numel) for _ in range(6))})
    ranges = [
        HeldRange(number, first, last, rng.sample(range(world_size), 2))
        for number, (first, last) in enumerate(itertools.pairwise(ends))
        if rng.random() < 0.9  # some elements nobody needs
    ]
    bucket = torch.arange(world_size * chunk)
    routes = [piece_route(r, world_size, chunk, ranges, numel) for r in range(world_size)]
    sent = [
        torch.cat([bucket[r * chunk :][slice(*cut)] for cut in route.cuts] or [bucket[:0]])
        for r, route in enumerate(routes)
    ]
    for rank, route in enumerate(routes):
        assert [one.sent[rank] for one in routes] == route.received
        received = torch.cat([flat.split(routes[r].sent)[rank] for r, flat in enumerate(sent)])
        needed = {one.piece: one for one in ranges if rank in one.ranks}
        assert {piece for piece, _, _ in route.held} == needed.keys()
        for piece, first, last in route.held:
            one = needed[piece]
            assert received[first:last].tolist() == list(range(one.first, one.last))
