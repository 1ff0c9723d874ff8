"""Units depend on sizes and dtypes alone; the norm's bits do not depend on who computes which."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.distributed.gradient_norm import fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import CUT_ELEMENTS, Unit, UnitLayout, elements_per_unit
from tests.distributed.norms import gradient_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
sizes = st.lists(st.tuples(st.integers(0, 5_000_000), st.sampled_from(DTYPES)), max_size=8)


@given(sizes)
def test_units_cover_each_parameter_once_and_cut_at_multiples_of_64(sizes):
    layout = UnitLayout(sizes)
    for number, (numel, dtype) in enumerate(sizes):
        units = [layout.units[i] for i in layout.of_parameter(number)]
        ends = [0, *(unit.last for unit in units)]
        assert all(unit.parameter == number for unit in units)
        assert [unit.first for unit in units] == ends[:-1] and ends[-1] == numel
        assert all(end % CUT_ELEMENTS == 0 for end in ends[:-1])
        assert all((unit.last - unit.first) * dtype.itemsize <= 1 << 20 for unit in units)


def test_units_of_a_stored_layout_stay_as_they_are():
    layout = UnitLayout([(300_000, torch.float32), (0, torch.float32), (10, torch.bfloat16)])
    assert layout.units == [Unit(0, 0, 262_144), Unit(0, 262_144, 300_000), Unit(2, 0, 10)]


def test_pieces_of_a_channels_last_tensor_are_views_in_memory_order():
    tensor = torch.randn(64, 96, 8, 8).to(memory_format=torch.channels_last)
    pieces = UnitLayout.of([tensor, tensor]).pieces([tensor, None])
    assert torch.equal(torch.cat(pieces[:2]), tensor.permute(0, 2, 3, 1).reshape(-1))
    assert pieces[0].data_ptr() == tensor.data_ptr() and pieces[2:] == [None, None]


def gradients(dtype, seed=0):
    make = torch.Generator().manual_seed(seed)
    step = elements_per_unit(dtype)
    numels = (3 * step + 17, 33, 1, step, 2 * step + 64)
    return [torch.randn(n, generator=make).to(dtype) for n in numels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", range(1, 9))
def test_norm_has_equal_bits_however_the_units_are_dealt(dtype, workers):
    given = gradients(dtype)
    layout = UnitLayout.of(given)
    alone = gradient_norm(layout, given)
    pieces = layout.pieces(given)
    squares = torch.zeros(len(pieces), dtype=torch.float64)
    for worker in range(workers):
        # What a worker owns lies in memory of its own, at another alignment.
        owned = [
            torch.cat([p.new_zeros(worker), p])[worker:] if i % workers == worker else None
            for i, p in enumerate(pieces)
        ]
        squares += squares_of_units(owned)
    assert torch.equal(fold_squares(squares).sqrt().float(), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_has_equal_bits_for_any_number_of_threads(dtype):
    given = gradients(dtype)
    layout, before, norms = UnitLayout.of(given), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            norms.append(float(gradient_norm(layout, given)))
    finally:
        torch.set_num_threads(before)
    assert len(set(norms)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_norm_is_that_of_torch_but_for_rounding(dtype):
    given = gradients(dtype)
    expected = math.sqrt(sum(float((g.to(torch.complex128).abs() ** 2).sum()) for g in given))
    norm = gradient_norm(UnitLayout.of(given), given)
    # Narrow units are twice as long, and all but fp64 add squares in fp32.
    assert float(norm) == pytest.approx(expected, rel=1e-4)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e30), max_size=40))
def test_fold_adds_neighbours_first(values):
    def fold(values):
        if len(values) == 1:
            return values[0]
        padded = [*values, 0.0] if len(values) % 2 else values
        return fold([a + b for a, b in zip(padded[::2], padded[1::2], strict=True)])

    squares = torch.tensor(values, dtype=torch.float64)
    assert float(fold_squares(squares)) == (fold(values) if values else 0.0)


def test_norm_of_gradients_of_several_dtypes_skips_absent_ones():
    given = [torch.full((4,), 3.0), None, torch.full((4,), 4.0, dtype=torch.bfloat16)]
    layout = UnitLayout([(4, torch.float32), (9, torch.float32), (4, torch.bfloat16)])
    assert float(gradient_norm(layout, given)) == 10.0
    assert float(gradient_norm(layout, [None] * 3)) == 0.0
