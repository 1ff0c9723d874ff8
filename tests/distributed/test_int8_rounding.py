"""Sums of gradients in 8 bits: what a block is rounded to, and that neither who rounds it nor where
it lies matters."""

import math

import numpy as np
import pytest
import torch

from elastic_dp.distributed import int8_rounding
from elastic_dp.distributed.gradient_units import in_memory_order, memory_stride
from elastic_dp.distributed.int8_rounding import BLOCK, RECORD, Int8Rounding
from tests.distributed.rounding_models import random_int8

NODE = (4, 8)
LARGEST = torch.finfo(torch.float32).max


def rounding(seed=0):
    found = Int8Rounding()
    found.begin(seed)
    return found


def restored(sums):
    found = torch.empty(len(sums) // RECORD * BLOCK)
    rounding().restore(sums, found)
    return found


def rounded(gradient, node=NODE, seed=0):
    flat = restored(round_one(rounding(seed), gradient, node, 0))
    return flat.as_strided(gradient.shape, memory_stride(gradient))


def round_one(eight, gradient, node, first):
    (sums,) = eight.round([gradient], node, [first])
    return sums


def numbers(count, seed=0):
    """Return numbers of all sizes, from block to block and within a block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-20, 20, math.ceil(count / BLOCK)).repeat_interleave(BLOCK)[:count]
    within = torch.rand(count, generator=generator).mul(-10).exp()
    return torch.randn(count, generator=generator) * sizes * within


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_blocks_are_rounded_and_added_as_the_model_says_piece_by_piece(monkeypatch, count):
    monkeypatch.setattr(int8_rounding, "_PIECE_BLOCKS", 2)
    one, other, first = numbers(count, 1), numbers(count, 2), 2**25 - 3  # the counters wrap around
    eight = rounding(seed=2**64 - 1)
    sums = [round_one(eight, gradient, NODE, first) for gradient in (one, other)]
    models = [random_int8(gradient.numpy(), NODE, first, 2**64 - 1) for gradient in (one, other)]
    for found, model in zip(sums, models, strict=True):
        assert len(found) == math.ceil(count / BLOCK) * RECORD
        assert same(restored(found)[:count], model)
    total = eight.add(*sums, (0, 8), first, torch.empty_like(sums[0]))
    model = random_int8(models[0] + models[1], (0, 8), first, 2**64 - 1)
    assert same(restored(total)[:count], model)


def same(found, model):
    return found.view(torch.int32).tolist() == model.view(np.int32).tolist()


def test_part_of_a_sum_is_rounded_as_the_whole():
    """Each rank adds up the blocks of its own part."""
    eight, memory = rounding(), torch.zeros(9 * RECORD, dtype=torch.uint8)
    one, other = (round_one(eight, numbers(9 * BLOCK, seed), NODE, 30) for seed in (1, 2))
    whole = eight.add(one, other, (0, 8), 30, memory)
    for first, last in ((0, 1), (2, 5), (8, 9)):
        part = slice(first * RECORD, last * RECORD)
        mine = one[part].clone()
        assert eight.add(mine, other[part], (0, 8), 30 + first, mine) is mine
        assert mine.equal(whole[part])


@pytest.mark.parametrize("seed", range(8))
def test_rounded_sum_stays_as_it_is(seed):
    """So the zeros that travel for an absent gradient change nothing, and a finished node may be
    rounded again."""
    once = rounded(numbers(64 * BLOCK, seed))
    again = rounded(once, node=(0, 1 + seed), seed=seed)
    assert again.equal(once)
    sums = round_one(rounding(), once, NODE, 0)
    total = rounding(seed).add(sums, torch.zeros_like(sums), (0, 9), 0, torch.empty_like(sums))
    assert restored(total).equal(once)


def test_sum_is_rounded_to_the_least_scale_for_which_all_numbers_fit():
    x = numbers(64 * BLOCK).view(-1, BLOCK)
    largest = x.abs().amax(1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest.double() / 127)))
    error = (rounded(x.flatten()).view_as(x) - x).abs()
    assert (error < scale).all() and (error > scale / 2).any()
    for large, small in ((127.0, 126.5), (127.5, 126.5), (254.0, 253.0)):
        block = torch.zeros(BLOCK)
        block[:2] = torch.tensor([large, small])
        found, step = rounded(block), 1 if large == 127 else 2
        assert found[0] in (math.floor(large / step) * step, math.ceil(large / step) * step)
        assert found[1] in (math.floor(small / step) * step, math.ceil(small / step) * step)


def test_rounding_is_right_on_average_for_each_element():
    """Small elements beside a large one, which rounding to the nearest would lose."""
    x = torch.linspace(-1, 1, BLOCK) * 0.5  # of a step, which the largest sets to 1
    x[0] = 100.0
    draws = 1024
    of_nodes = torch.stack([rounded(x, node=(v, v + 1)) for v in range(draws)])
    of_steps = torch.stack([rounded(x, seed=seed) for seed in range(draws)])
    of_blocks = rounded(x.repeat(draws)).view(draws, BLOCK)
    for found in (of_nodes, of_steps, of_blocks):
        error = found.double() - x.double()
        assert error.mean(0).abs().max() < 5 * 0.5 / draws**0.5
        # Neither neighbours nor the elements that share a counter are rounded alike.
        together = torch.corrcoef(error[:, x.abs().sub(0.3).abs() < 0.2].T).fill_diagonal_(0)
        assert together.abs().max() < 6 / draws**0.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, LARGEST, -LARGEST])
def test_block_with_what_is_not_finite_stays_so(value):
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 7] = value
    sums = round_one(rounding(), x, NODE, 0)
    assert [bool(block.isfinite().all()) for block in restored(sums).split(BLOCK)] == [
        True,
        False,
        True,
    ]
    assert not restored(sums)[BLOCK : 2 * BLOCK].isfinite().any()
    for other in (torch.ones(3 * BLOCK), torch.zeros(3 * BLOCK), -x):
        total = torch.empty_like(sums)
        rounding().add(sums, round_one(rounding(), other, NODE, 0), (0, 8), 0, total)
        assert not restored(total)[BLOCK : 2 * BLOCK].isfinite().any()
        again = round_one(rounding(), restored(total), NODE, 0)
        assert not restored(again)[BLOCK : 2 * BLOCK].isfinite().any()


def test_sum_that_overflows_is_not_finite():
    half = round_one(rounding(), torch.full((BLOCK,), 2e38), NODE, 0)
    total = rounding().add(half, half.clone(), (0, 8), 0, torch.empty_like(half))
    assert restored(half).isfinite().all() and not restored(total).isfinite().any()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-42, 2.0**-126, 3e-37, 3e38])
def test_smallest_and_largest_numbers_are_rounded_to_finite_ones(size):
    x = torch.full((BLOCK,), size)
    found = rounded(x)
    assert ((found - x).abs() <= max(2.0**-126, size / 63)).all()
    assert found.signbit().sum() == 0
    assert rounded(-torch.zeros(BLOCK)).signbit().sum() == 0


def test_elements_are_taken_in_the_order_of_the_parameters_memory():
    rows = numbers(300).view(2, 3, 50)
    for parameter in (rows, rows.transpose(0, 2), rows.permute(1, 2, 0)):
        found = rounded(parameter)
        assert found.stride() == parameter.stride()
        assert in_memory_order(found).equal(rounded(rows.flatten()))


def test_global_random_numbers_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    rounded(numbers(1000))
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
