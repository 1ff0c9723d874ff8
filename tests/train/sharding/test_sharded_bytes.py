"""What a step sends, counted: at most 2 + 1/W times the parameters for each member, without the
state of the optimizer. With rounded gradients the half or the quarter of 1 + 1/W, and 1."""

import threading
from collections import Counter

import pytest
import torch

from elastic_dp.distributed import gradient_units
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.extensions.sharding.piece_reduction import PieceReduction
from tests.distributed.members import _dropped_here, of_each, run_and_send  # noqa: F401
from tests.train.sharding.test_sharded_state import ADAM, Member

SHAPES = [(300, 200), (1000,), (64, 33)]


@pytest.fixture
def sent(monkeypatch):
    """Bytes that each thread sends to others."""
    counted = Counter()

    def counting(name, of):
        method = getattr(ProcessGroup, name)

        def counts(group, *given):
            counted[threading.get_ident()] += of(group, *given)
            return method(group, *given)

        monkeypatch.setattr(ProcessGroup, name, counts)

    def of_all_to_all(group, output, input, output_sizes, input_sizes):
        others = sum(input_sizes) - input_sizes[group.rank]
        return others * input.element_size()

    counting("all_to_all", of_all_to_all)
    counting("all_gather", lambda group, _, x: (group.world_size - 1) * x.nbytes)
    counting(
        "all_reduce", lambda group, x: 2 * (group.world_size - 1) * x.nbytes // group.world_size
    )
    monkeypatch.setattr(gradient_units, "UNIT_BYTES", 1024)
    return counted


@pytest.mark.parametrize(
    ("wire", "of_gradients"), [(None, 1), ("bf16", 1 / 2), ("int8", 257 / 1024)]
)
@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_step_sends_little_more_than_a_replicated_one(
    clip_norm, world_size, wire, of_gradients, sent
):
    shares = [[(rank, rank + 1)] for rank in range(world_size)]

    def train(group):
        torch.set_num_threads(1)
        member = Member(ADAM, SHAPES, torch.float32)
        sharding, parameters = member.sharding, list(member.parameters.values())
        if group.rank:
            sharding.forget(0)
        sharding.open(group, 1, ())
        clipping = GradientClipping(clip_norm)
        exchange = PieceReduction(sharding, parameters, clipping=clipping)
        gradients = GradientReducer(member.parameters, wire, exchange=exchange)
        gradients.open(group, shares, world_size, True)
        for step in (1, 2):
            sent[threading.get_ident()] = 0
            sharding.begin()
            loss = lambda v: sum((p * p).sum() for p in parameters)  # noqa: E731
            run_and_send(gradients, shares[group.rank], world_size, loss)
            exchange.reduce()
            exchange.finish(1.0, [1] * len(parameters))
            memory = exchange.received_memory
            sharding.prepare(step, exchange.gradients(), set(parameters), memory)
            (flat,) = sharding._gather._flats  # no memory is made for it
            assert flat.data_ptr() == memory[torch.float32].data_ptr()
            sharding.gather(exchange.norm, compares=True)
            exchange.agree_finite()
            assert exchange.finite
            sharding.step_ends([])
        return sent[threading.get_ident()]

    model = sum(p.nbytes for p in Member(ADAM, SHAPES, torch.float32).parameters.values())
    norm = 8 * (model // 1024 + len(SHAPES)) * (world_size - 1)
    mean = sum(of_each(world_size, train)) / world_size - norm
    assert mean <= (1 + of_gradients * (1 + 1 / world_size)) * model
