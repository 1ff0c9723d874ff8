"""Clipped steps of an optimizer of torch.optim have the same bits for any number of workers.

The workers are threads of this process, one group for all optimizers. Their gradients are summed as
in training, and depend on what the steps before made of the weights.
"""

import functools
import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.distributed import abandoned_groups, gradient_units
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.reduction_tree import fold
from tests.distributed.meeting import InMemory, form
from tests.train.exactness.test_torch_optimizers import CASES, shapes

CPU = torch.device("cpu")
VIRTUAL, STEPS, CLIP_NORM = 8, 2, 0.5


def equal_shares(world_size):
    ends = [VIRTUAL * rank // world_size for rank in range(world_size + 1)]
    return [[pair] for pair in itertools.pairwise(ends)]


@functools.cache
def factors(kind, dtype, step, virtual_worker):
    make = torch.Generator().manual_seed(1000 * step + virtual_worker)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes(kind)]


def digest(group, kind, options, dtype, exact):
    """The digest of this worker's clipped gradients, their norm and its weights after each step."""
    make = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in shapes(kind)
    ]
    optimizer = kind(parameters, **options)
    shares = equal_shares(group.world_size)
    exchange = GradientExchange(parameters, clipping=GradientClipping(CLIP_NORM))
    named = {str(number): p for number, p in enumerate(parameters)}
    gradients = GradientReducer(named, exchange=exchange)
    gradients.open(group, shares, VIRTUAL, exact)
    found = hashlib.sha256()
    leaves = [leaf for one in shares[group.rank] for leaf in fold(*one, VIRTUAL)]
    for step in range(STEPS):
        gradients.begin()
        for leaf in leaves:
            is_last = leaf is leaves[-1]
            gradients.before_leaf(leaf, is_last)
            gradients.before_backward()
            drawn = factors(kind, dtype, step, leaf.virtual_worker)
            # The last parameter has no gradient in odd virtual workers.
            used = len(drawn) - leaf.virtual_worker % 2
            pairs = [*zip(parameters, drawn, strict=True)][:used]
            sum((torch.sin(3 * p) * x).sum() for p, x in pairs).backward()
            gradients.after_leaf(leaf, is_last)
        gradients.send()
        exchange.reduce()
        exchange.finish(1 / VIRTUAL, [1] * len(parameters))
        assert exchange.finite
        exchange.assign()
        norm = exchange.norm.tensor
        assert norm > CLIP_NORM
        optimizer.step()
        for tensor in (norm, *parameters, *(p.grad for p in parameters)):
            found.update(tensor.detach().view(-1).view(torch.uint8).numpy().tobytes())
    gradients.close()
    return found.hexdigest()


def digests(world_size, chosen=CASES, exact=True):
    """The digests of all workers, by the name of the case."""

    def of_all(group):
        return {name: digest(group, *case, exact) for name, *case in chosen}

    if world_size == 1:
        found = [of_all(ProcessGroup(None, 0, 1, CPU))]
    else:
        meet = InMemory()

        def member(rank):
            group = form(meet, rank, world_size)
            try:
                return of_all(group)
            finally:
                group.close()

        with ThreadPoolExecutor(world_size) as pool:
            found = list(pool.map(member, range(world_size)))
    return {name: {one[name] for one in found} for name, *_ in chosen}


@pytest.fixture(autouse=True)
def _dropped_here(monkeypatch):
    """Groups go with their test, and not on a thread that may outlive the interpreter."""
    left = []
    monkeypatch.setattr(abandoned_groups, "abandon", left.append)
    monkeypatch.setattr(gradient_units, "UNIT_BYTES", 1024)  # so that parameters are cut
    yield
    left.clear()


@pytest.fixture(scope="module")
def alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_units, "UNIT_BYTES", 1024)
        return digests(1)


@pytest.mark.parametrize(
    "world_size", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 6, 7, 8))]
)
def test_clipped_steps_of_every_optimizer_have_the_bits_of_one_worker(world_size, alone):
    assert digests(world_size) == alone


def test_sums_in_another_order_give_other_bits_for_every_optimizer(alone):
    """So equal digests show something. Rprop and Muon may take equal steps; gradients differ."""
    other = digests(3, exact=False)
    assert [name for name in alone if other[name] == alone[name]] == []
