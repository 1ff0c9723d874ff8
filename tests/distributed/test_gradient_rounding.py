"""Rounded gradients (`wire=`): each node of the tree is rounded, whichever worker adds it, and
fewer bytes are sent. rounding_models.py has the roundings and the tree once more."""

import contextlib
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from elastic_dp.distributed import gradient_buckets
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.gradient_rounding import check_wire, rounding_of
from elastic_dp.errors import ModelError
from tests.distributed.members import _dropped_here, finish, named, of_each, run_and_send  # noqa: F401
from tests.distributed.rounding_models import nearest_bf16, rounded_sum
from tests.distributed.test_gradient_reducer import (
    BEFORE,
    COUNT,
    OTHER,
    Aborted,
    of_leaf,
    one_each,
    run_leaves,
    without_peers,
)
from tests.train.sharding.test_sharded_bytes import sent  # noqa: F401

WIRES = ("bf16", "int8")
SHAPES = [(3, 167), (41,)]  # 1 + 2 blocks: the second parameter is the first in a bucket
FIRST_BLOCKS = [1, 0]
SEED = 5
FACTOR = 0.7


def gradients_of(v, shapes=SHAPES):
    """Return numbers of all sizes, denormal ones included. Odd virtual workers leave the second
    parameter out."""
    drawn = torch.Generator().manual_seed(v)
    found = []
    for shape in shapes:
        numel = math.prod(shape)
        sizes = torch.logspace(-44, 10, numel)[torch.randperm(numel, generator=drawn)]
        found.append((torch.randn(numel, generator=drawn) * sizes).view(shape))
    return [None if v % 2 and number == 1 else one for number, one in enumerate(found)]


def bits_of(gradient):
    assert gradient is not None and gradient.dtype == torch.float32
    return gradient.contiguous().view(torch.int32).flatten().tolist()


def summed(group, shares, topology=(), wire="bf16", shapes=SHAPES):
    """The bits of each parameter's gradient after the second step, whose buffers are used again."""
    count = max(last for share in shares for _, last in share)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    gradients = GradientReducer(named(parameters), wire)
    gradients.open(group, shares, count, True, topology)

    def loss(v):
        pairs = zip(parameters, gradients_of(v, shapes), strict=True)
        return sum((p * g).sum() for p, g in pairs if g is not None)

    for step in (1, 2):
        run_and_send(gradients, shares[group.rank], count, loss, SEED + step)
        assert finish(gradients, FACTOR)
    return [bits_of(p.grad) for p in parameters]


def expected(count, wire):
    """The root is converted first and multiplied then."""
    found = []
    for number, _ in enumerate(SHAPES):

        def leaf(v, number=number):
            one = gradients_of(v)[number]
            return None if one is None else one.numpy()

        root = rounded_sum((0, count), leaf, wire, FIRST_BLOCKS[number], SEED + 2)
        assert root is not None
        found.append((root * np.float32(FACTOR)).view(np.int32).flatten().tolist())
    return found


@pytest.mark.parametrize(
    ("shares", "topology"),
    [
        ([[(0, 1)]], ()),
        ([[(0, 7)]], ()),
        ([[(0, 4)], [(4, 7)]], ()),
        ([[(0, 3)], [(3, 7)]], ()),
        ([[(0, 4)], [(4, 6)], [(6, 7)]], ()),
        ([[(0, 2), (5, 7)], [(2, 5)]], ()),
        ([[(0, 2)], [(2, 5)], [(5, 7)]], ((2, 1),)),
        ([[(v, v + 1)] for v in range(6)], ()),
    ],
    ids=["one leaf", "alone", "swapped", "subtrees", "gathered", "two ranges", "by node", "leaves"],
)
@pytest.mark.parametrize("wire", WIRES)
def test_every_node_is_rounded_whoever_adds_it(wire, shares, topology):
    count = max(last for share in shares for _, last in share)
    of_all = of_each(len(shares), lambda group: summed(group, shares, topology, wire))
    assert of_all == [expected(count, wire)] * len(shares)


@pytest.mark.parametrize("limit", [100, 700], ids=["each parameter", "two and one"])
def test_cut_into_buckets_changes_no_bit(monkeypatch, limit):
    for name in ("FIRST_BUCKET_BYTES", "LAST_BUCKET_BYTES", "UNCUT_BYTES"):
        monkeypatch.setattr(gradient_buckets, name, limit)
    shapes, shares = [(300,), (41,), (100,)], [[(0, 4)], [(4, 6)], [(6, 7)]]

    def cut(group):
        return summed(group, shares, wire="int8", shapes=shapes)

    of_all = of_each(3, cut)
    monkeypatch.undo()
    assert of_all == of_each(3, cut)


@pytest.mark.parametrize("shares", [BEFORE, OTHER], ids=["same", "other"])
@pytest.mark.parametrize(("world_size", "torn_in"), [(1, 5), (1, None), (2, 9), (3, 6), (3, None)])
@pytest.mark.parametrize("wire", WIRES)
def test_finished_subtrees_of_a_torn_step_are_rounded_nodes(wire, world_size, shares, torn_in):
    def act(group):
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
        gradients = GradientReducer(named(parameters), wire)
        before, after = BEFORE[world_size], shares[world_size]
        gradients.open(without_peers(group), before, COUNT, exact=True)
        with contextlib.suppress(Aborted):
            run_leaves(gradients, parameters, before[group.rank], COUNT, {}, torn_in)
        finished = gradients.finished()
        kept = {g.dtype for node in finished.values() for g in node if g is not None}
        gradients.drop()
        gradients.close()
        gradients.open(group, after, COUNT, exact=True)
        ran = run_leaves(gradients, parameters, after[group.rank], COUNT, finished, None)
        assert finish(gradients, 1.0)
        return [bits_of(p.grad) for p in parameters], kept, ran

    def leaf(number):
        return lambda v: of_leaf(v)[number].numpy() if number < len(of_leaf(v)) else None

    roots = [rounded_sum((0, COUNT), leaf(n), wire, FIRST_BLOCKS[n]) for n in range(2)]
    whole = [root.view(np.int32).tolist() for root in roots if root is not None]
    of_all = of_each(world_size, act)
    for sums, kept, _ in of_all:
        assert sums == whole and kept == {rounding_of(wire, torch.float32).dtype}
    assert sum(len(ran) for *_, ran in of_all) < COUNT


@pytest.mark.parametrize(("world_size", "topology"), [(2, ()), (3, ()), (4, ((2, 2),))])
def test_half_or_a_quarter_of_the_bytes_are_sent(
    world_size: int,
    topology: Any,
    sent: Any,  # noqa: F811
) -> None:
    """257 bytes for a block of 256 elements with int8. Blocks of no parameter are filled up."""
    shares, shapes = [[(rank, rank + 1)] for rank in range(world_size)], [(8, 256), (4, 2, 128)]

    def counted(wire):
        def act(group):
            summed(group, shares, topology, wire, shapes)
            return sent.pop(threading.get_ident())

        return sum(of_each(world_size, act))

    without = counted(None)
    assert 2 * counted("bf16") == without > 0
    assert 1024 * counted("int8") == 257 * without


@pytest.mark.parametrize("rounded", WIRES)
def test_gradients_of_16_bits_are_not_rounded(rounded):
    def of_narrow(group, wire):
        kinds = (torch.bfloat16, torch.float16, torch.float32)
        parameters = [torch.nn.Parameter(torch.zeros(41, dtype=kind)) for kind in kinds]
        gradients = GradientReducer(named(parameters), wire)
        values = [torch.randn(41, generator=torch.Generator().manual_seed(k)) for k in range(3)]
        one_each(
            gradients,
            group,
            lambda: sum(
                (p * (group.rank + 1) * v.to(p.dtype)).sum().float()
                for p, v in zip(parameters, values, strict=True)
            ),
        )
        assert finish(gradients, FACTOR)
        return [p.grad.tolist() for p in parameters]

    (*narrow, wide), _, (*as_without, other), _ = (
        of
        for wire in (rounded, None)
        for of in of_each(2, lambda group, wire=wire: of_narrow(group, wire))
    )
    assert narrow == as_without and wide != other


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(
    ("value", "factor", "finite"),
    [
        (math.inf, 1.0, False),
        (math.nan, 0.5, False),
        (1e38, 9.0, False),
        (3.4e38, 1.0, False),  # the largest fp32 numbers are rounded to what is not finite
        (1e37, 9.0, True),
    ],
)
@pytest.mark.parametrize("wire", WIRES)
def test_all_members_see_whether_the_rounded_sum_is_finite(wire, members, value, factor, finite):
    def seen(group):
        parameter = torch.nn.Parameter(torch.zeros(5))
        gradients = GradientReducer(named([parameter]), wire)
        one_each(gradients, group, lambda: parameter[3] * value)
        return finish(gradients, factor)

    assert of_each(members, seen) == [finite] * members


def test_torch_rounds_and_adds_alike_at_every_offset():
    """Where an element lies in the memory of a kernel depends on the number of workers."""
    drawn = np.random.default_rng(0)
    numbers = drawn.integers(0, 1 << 32, 2 * 1024, dtype=np.uint32)
    numbers[(numbers >> 23 & 0xFF) >= 0xFE] &= 0x3FFFFFFF  # else their sums are not finite
    numbers[::7] &= 0x807FFFFF  # denormal
    numbers[::5] = numbers[::5] & 0xFFFF0000 | 0x8000  # half-way between two
    numbers[:4] = 0, 1 << 31, 1, (1 << 31) + 1
    one, other = numbers.view(np.float32).reshape(2, -1)
    node, rounding = (0, 1), rounding_of("bf16", torch.float32)
    expected_one, expected_other = (nearest_bf16(x, node, 0) for x in (one, other))
    expected_sum = nearest_bf16(expected_one + expected_other, node, 0)
    left, right = torch.from_numpy(one), torch.from_numpy(other)

    def rounded(gradient, out=None):
        if out is None:
            (found,) = rounding.round([gradient], node, [0])
            return found
        rounding.write([gradient], node, [0], [out])
        return out

    def added(out):
        return rounding.add(low, high, node, 0, out)

    def accumulated():
        rounding.accumulate([total := low.clone()], [high], node, [0])
        return total

    def same(found, wanted):
        return bits_of(found.float()) == wanted.view(np.int32).tolist()

    for first in range(65):
        for last in (first + 1, first + 31, first + 64, 1024):
            part = slice(first, last)
            low, high = rounded(left[part]), rounded(right[part])
            assert same(low, expected_one[part]) and same(high, expected_other[part])
            memory = torch.empty(1100, dtype=torch.bfloat16)[3 : 3 + last - first]
            assert same(rounded(left[part], memory), expected_one[part])
            assert same(added(memory), expected_sum[part])
            assert same(accumulated(), expected_sum[part])
            assert same(added(low), expected_sum[part])
    assert same(rounded(left.view(32, 32).t()).t().flatten(), expected_one)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameter_of_another_dtype_is_refused_by_name(dtype, wire):
    parameters = {"net.weight": torch.nn.Parameter(torch.zeros(2, dtype=dtype))}
    check_wire(None, parameters)
    with pytest.raises(ModelError, match=rf"model\.net\.weight is of {dtype}, and wire='{wire}'"):
        check_wire(wire, parameters)
    check_wire(wire, {"half": torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))})
