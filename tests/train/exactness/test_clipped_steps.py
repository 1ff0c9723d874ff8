"""Clipped steps of an optimizer of torch.optim have the same bits for any number of workers.

The workers are threads of this process, one group for all optimizers. Their gradients are summed as
in training, and depend on what the steps before made of the weights.
"""

import functools
import hashlib
import itertools

import pytest
import torch

from elastic_dp.distributed import gradient_units
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import GradientClipping
from elastic_dp.distributed.gradient_reducer import GradientReducer
from tests.distributed.members import (
    _dropped_here,  # noqa: F401
    finish,
    named,
    of_each,
    run_and_send,
)
from tests.train.exactness.test_torch_optimizers import CASES, shapes

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
    gradients = GradientReducer(named(parameters), exchange=exchange)
    gradients.open(group, shares, VIRTUAL, exact)
    found = hashlib.sha256()
    for step in range(STEPS):

        def loss(virtual_worker, step=step):
            drawn = factors(kind, dtype, step, virtual_worker)
            # The last parameter has no gradient in odd virtual workers.
            used = len(drawn) - virtual_worker % 2
            pairs = [*zip(parameters, drawn, strict=True)][:used]
            return sum((torch.sin(3 * p) * x).sum() for p, x in pairs)

        run_and_send(gradients, shares[group.rank], VIRTUAL, loss)
        assert finish(gradients, 1 / VIRTUAL)
        norm = exchange.norm.tensor
        assert norm > CLIP_NORM
        optimizer.step()
        for tensor in (norm, *parameters, *(p.grad for p in parameters)):
            found.update(tensor.detach().view(-1).view(torch.uint8).numpy().tobytes())
    gradients.close()
    return found.hexdigest()


def digests(world_size, exact=True):
    """The digests of all workers, by the name of the case."""

    def of_all(group):
        return {name: digest(group, *case, exact) for name, *case in CASES}

    found = of_each(world_size, of_all)
    return {name: {one[name] for one in found} for name, *_ in CASES}


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(gradient_units, "UNIT_BYTES", 1024)  # so that parameters are cut


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
