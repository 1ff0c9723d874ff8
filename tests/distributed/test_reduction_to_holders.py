"""The exact sum where only two members need each element: its bits, and the bytes that are sent."""

import random
import types
from collections import defaultdict

import pytest
import torch

from elastic_dp.distributed import abandoned_groups, gradient_buckets
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.piece_assignment import HeldRange
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.extensions.sharding.piece_reduction import PieceReduction
from tests.distributed.members import _dropped_here, finish, named, of_each, run_and_send  # noqa: F401

V = 8


def in_pieces(parameters, needed):
    """An exchange that gives each rank what it needs."""
    holding = types.SimpleNamespace(
        needed=lambda: needed, all_hold_all=needed is None, pieces=[], holders=[]
    )
    return PieceReduction(holding, parameters)


def reduced(group, shares, needed_of, topology=(), wire=None):
    """Returns the gradients after two steps: whole ones, or those of the pieces by number."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (700, 3, 129)]
    needed = needed_of(parameters)
    gradients = GradientReducer(named(parameters), wire, exchange=in_pieces(parameters, needed))
    gradients.open(group, shares, V, True, topology)
    assert len(gradients._layout.buckets) == 2
    # Of all sizes, so that a sum depends on its order.
    values = torch.randn(2, V, 832, generator=draw) * torch.logspace(-10, 10, 832)
    for step in range(2):

        def loss(v, step=step):
            return (torch.cat([p.view(-1) for p in parameters]) * values[step, v]).sum()

        run_and_send(gradients, shares[group.rank], V, loss, seed=step)
        if needed is not None:
            gradients.exchange.reduce()
            held, _ = gradients.exchange.sums_of_pieces(0.3)
        else:
            assert finish(gradients, 0.3)
    if needed is not None:
        return {n: flat.clone() for n, flat in held.items()}
    return [p.grad.clone() for p in parameters]


@pytest.mark.parametrize(
    ("shares", "topology"),
    [
        ([[(0, 3)], [(3, 6)], [(6, 8)]], ()),
        ([[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]], ()),
        ([[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]], ((2, 2),)),
        ([[(0, 1), (3, 4)], [(1, 3)], [(4, 6)], [(6, 7)], [(7, 8)]], ((2, 3),)),
        ([[(0, 1)], [(1, 3)], [(3, 4)], [(4, 6)], [(6, 7)], [(7, 8)]], ((4, 1, 1), (4, 2))),
    ],
)
@pytest.mark.parametrize("wire", [None, "bf16", "int8"])
def test_each_holder_gets_the_bits_of_the_whole_sum(wire, shares, topology, monkeypatch):
    """In two buckets. They are those of one rank, which adds up everything by itself."""
    for name in ("FIRST_BUCKET_BYTES", "LAST_BUCKET_BYTES", "UNCUT_BYTES"):
        monkeypatch.setattr(gradient_buckets, name, 1000)
    world_size, rng = len(shares), random.Random(0)
    cuts = {0: [(0, 256), (256, 512), (512, 700)], 1: [(0, 3)], 2: [(0, 129)]}
    holders = defaultdict(list)
    for number, ranges in cuts.items():
        for first, last in ranges:
            piece = sum(map(len, holders.values()))
            ranks = rng.sample(range(world_size), 2)
            if first == 256:
                continue  # nobody needs these
            holders[number].append(HeldRange(piece, first, last, ranks))

    def needed_of(parameters):
        return {p: holders[n] for n, p in enumerate(parameters)}

    def summed(needed):
        return of_each(world_size, lambda group: reduced(group, shares, needed, topology, wire))

    whole, held = summed(lambda _: None), summed(needed_of)
    (alone,) = of_each(1, lambda group: reduced(group, [[(0, V)]], lambda _: None, wire=wire))
    assert all(map(torch.equal, [*alone] * world_size, [g for each in whole for g in each]))
    for rank, mine in enumerate(held):
        of_rank = {
            one.piece: whole[0][n][one.first : one.last]
            for n, ranges in holders.items()
            for one in ranges
            if rank in one.ranks
        }
        assert mine.keys() == of_rank.keys()
        assert all(torch.equal(mine[piece], of_rank[piece]) for piece in mine)


@pytest.mark.parametrize("is_over", [False, True])
def test_next_generation_receives_in_the_same_memory_unless_something_accesses_it(
    is_over, monkeypatch
):
    """Otherwise a worker would need room for both generations at each loss. Rank 1 needs sums of
    about that size, which have memory of their own."""
    operation = types.SimpleNamespace(may_access=lambda memory: not is_over)
    monkeypatch.setattr(ProcessGroup, "in_flight", [operation])
    monkeypatch.setattr(abandoned_groups, "LARGE_BYTES", 0)
    shares = [[(0, 3)], [(3, 6)], [(6, 8)]]

    def act(group):
        p = torch.nn.Parameter(torch.zeros(700))
        held = [HeldRange(0, 0, 350, (0, 1)), HeldRange(1, 350, 700, (1, 2))]
        exchange = in_pieces([p], {p: held})
        gradients = GradientReducer(named([p]), exchange=exchange)
        gradients.open(group, shares, V, True)
        before = exchange.received_memory[torch.float32]
        gradients.close()
        gradients.open(group, shares, V, True)
        return exchange.received_memory[torch.float32] is before

    assert of_each(len(shares), act) == [is_over] * len(shares)
