"""The gradient sum among members that are threads of this process, in every way in which it is
exchanged."""

import contextlib
import math
import sys
import threading
import types
from collections import defaultdict

import pytest
import torch

from elastic_dp.distributed import cross_worker_reduction
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup, RecordGather
from elastic_dp.distributed.reduction_tree import cover_share, fold
from elastic_dp.errors import ModelError
from tests.distributed.meeting import CPU
from tests.distributed.members import (
    _dropped_here,  # noqa: F401
    finish,
    leaves_of,
    named,
    of_each,
    run_and_send,
)
from tests.patience import eventually


def summed(group, shares, exact):
    """Two parameters whose gradient is the virtual worker's number + 1, the second's for odd ones
    only."""
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    gradients, count = GradientReducer(named(parameters)), 4
    gradients.open(group, shares, count, exact)

    def loss(v):
        return sum(p.sum() for p in (parameters if v % 2 else parameters[:1])) * (v + 1)

    for _ in range(2):  # buffers are used again
        run_and_send(gradients, shares[group.rank], count, loss)
        assert finish(gradients, 0.5)
    return [p.grad.tolist() for p in parameters]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "shares",
    [
        [[(0, 4)]],
        [[(0, 2)], [(2, 4)]],
        [[(0, 3)], [(3, 4)]],
        [[(0, 2)], [(2, 3)], [(3, 4)]],
        [[(0, 1), (2, 3)], [(1, 2), (3, 4)]],
        [[(0, 1), (3, 4)], [(2, 3)], [(1, 2)]],
    ],
)
def test_all_members_get_the_sum(shares, exact):
    of_all = of_each(len(shares), lambda group: summed(group, shares, exact))
    assert of_all == [[[5.0] * 3, [3.0] * 2]] * len(shares)


@pytest.mark.parametrize("members", [2, 3])
@pytest.mark.parametrize(
    ("value", "factor"), [(math.inf, 1.0), (math.nan, 0.5), (2e38, 1.0), (1e38, 9.0)]
)
def test_all_members_see_that_the_sum_is_not_finite(members, value, factor):
    def finite(group):
        parameter = torch.nn.Parameter(torch.zeros(5))
        gradients = GradientReducer(named([parameter]))
        one_each(gradients, group, lambda: parameter[3] * value)
        return finish(gradients, factor)

    assert of_each(members, finite) == [False] * members


def one_each(gradients, group, loss):
    """A step of one virtual worker a member, up to what `complete` waits for."""
    shares = [[(rank, rank + 1)] for rank in range(group.world_size)]
    gradients.open(group, shares, len(shares), exact=True)
    run_and_send(gradients, shares[group.rank], len(shares), lambda v: loss())
    gradients.exchange.reduce()


def test_a_bucket_is_looked_at_while_the_next_one_is_on_its_way(monkeypatch):
    order = defaultdict(list)  # by thread

    def told(what, act):
        def tell(*arguments):
            order[threading.get_ident()].append(what)
            return act(*arguments)

        return tell

    def complete(group):
        two = [torch.nn.Parameter(torch.ones(5, dtype=x)) for x in (torch.float32, torch.float64)]
        gradients = GradientReducer(named(two))
        one_each(gradients, group, lambda: two[0].sum() + two[1].sum())
        group.wait = told("arrived", group.wait)
        assert finish(gradients, 0.5)
        return order[threading.get_ident()]

    total = told("summed", cross_worker_reduction._total_of_elements)
    monkeypatch.setattr(cross_worker_reduction, "_total_of_elements", total)
    assert of_each(3, complete) == [["arrived", "summed"] * 2] * 3


def test_records_of_any_length_follow_each_other():
    def gather(group):
        header, heard = RecordGather(group), []
        for length in (0, 7, 5000, 3):
            header.launch(bytes([group.rank]) * length * (group.rank + 1))
            heard.append(header.collect())
        return heard

    expected = [[b"\0" * n, b"\1" * 2 * n] for n in (0, 7, 5000, 3)]
    assert of_each(2, gather) == [expected, expected]


def replaying():
    """A function whose backward pass writes its gradient into the same memory each time, as the
    replay of a CUDA graph does."""
    static = torch.zeros(3)

    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, factor):
            ctx.factor = factor
            return weight.sum() * factor

        @staticmethod
        def backward(ctx, gradient):
            static.fill_(ctx.factor).mul_(gradient)
            return static.detach(), None

    return Replayed


def sum_of_replays(leaves, exact):
    """Return the sum of `leaves` virtual workers of one worker, whose gradients are 1, 2, …"""
    weight = torch.nn.Parameter(torch.zeros(3))
    gradients, function = GradientReducer({"weight": weight}), replaying()
    gradients.open(ProcessGroup(None, 0, 1, CPU), [[(0, leaves)]], leaves, exact)
    run_and_send(gradients, [(0, leaves)], leaves, lambda v: function.apply(weight, v + 1.0))
    assert finish(gradients, 1.0)
    assert weight.grad is not None
    return weight.grad.tolist()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("leaves", [2, 3, 4, 7, 8])
def test_gradients_in_the_memory_of_a_cuda_graph_are_copied_while_they_wait(
    leaves, exact, monkeypatch
):
    monkeypatch.setitem(
        sys.modules, "torch._inductor.cudagraph_trees", types.ModuleType("cudagraph_trees")
    )
    assert sum_of_replays(leaves, exact) == [leaves * (leaves + 1) / 2] * 3


@pytest.mark.parametrize("leaves", [2, 3, 4, 7, 8])
def test_gradients_in_memory_that_is_written_again_are_refused(leaves):
    with pytest.raises(ModelError, match=r"the gradient of model\.weight lies in the memory of"):
        sum_of_replays(leaves, exact=True)


class Aborted(Exception):
    pass


def of_leaf(v):
    """Gradients whose sum depends on the order, of two parameters; after 3 only the first."""
    generator = torch.Generator().manual_seed(v)
    return [torch.randn(5, generator=generator) for _ in range(2 if v < 4 else 1)]


def run_leaves(gradients, parameters, share, count, finished, torn_in, *, sends=True):
    """One attempt, with the nodes of `finished` in place of their leaves. Raises Aborted in the
    backward pass of leaf `torn_in`. Returns the leaves that ran."""
    gradients.begin()
    leaves, ran, until = leaves_of(share, count), [], 0
    merges_of = {leaf.virtual_worker: leaf.merges for leaf in leaves}
    for leaf in leaves:
        v, is_last = leaf.virtual_worker, sends and leaf is leaves[-1]
        if v < until:
            continue
        (limit,) = [high for low, high in share if low <= v < high]
        found = [node for node in finished if node[0] == v and node[1] <= limit]
        if found:
            (low, until) = found[0]
            merges = merges_of[until - 1] - fold(low, until, count)[-1].merges
            gradients.add_finished(found[0], finished.pop(found[0]), merges, until == share[-1][1])
            continue
        gradients.before_leaf(leaf, is_last)
        gradients.before_backward()
        used = list(zip(parameters, of_leaf(v), strict=False))
        if v == torn_in:  # of some parameters the gradient is there, and added to the sums before
            (used[0][0] * used[0][1]).sum().backward()
            raise Aborted
        sum((p * g).sum() for p, g in used).backward()
        gradients.after_leaf(leaf, is_last)
        ran.append(v)
    gradients.send()
    return ran


def without_peers(group):
    """A group of the same size in which nothing arrives."""
    transport = types.SimpleNamespace(
        rank=group.rank,
        world_size=group.world_size,
        all_to_all=lambda *_: object(),
        is_over=lambda _: False,
    )
    return types.SimpleNamespace(
        world_size=group.world_size, transport=transport, on_device=None, check=lambda: None
    )


COUNT = 12
BEFORE = {1: [[(0, 12)]], 2: [[(0, 7)], [(7, 12)]], 3: [[(0, 4)], [(4, 8)], [(8, 12)]]}
OTHER = {1: [[(0, 12)]], 2: [[(0, 6)], [(6, 12)]], 3: [[(0, 5)], [(5, 8)], [(8, 12)]]}
SEVERAL = {
    1: [[(0, 12)]],
    2: [[(0, 3), (7, 8), (11, 12)], [(3, 7), (8, 11)]],
    3: [[(0, 4), (11, 12)], [(4, 6), (10, 11)], [(6, 10)]],
}


@pytest.mark.parametrize("shares", [BEFORE, OTHER, SEVERAL], ids=["same", "other", "several"])
@pytest.mark.parametrize(
    ("world_size", "torn_in"),
    [*((3, v) for v in (*range(COUNT), None)), *((n, v) for n in (1, 2) for v in (0, 6, 9, None))],
)
def test_finished_subtrees_of_a_torn_step_give_the_same_bits(world_size, shares, torn_in):
    """The step is torn in the middle of a backward pass, or, with None, when all is sent."""

    def act(group):
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
        gradients = GradientReducer(named(parameters))
        before, after = BEFORE[world_size], shares[world_size]
        gradients.open(without_peers(group), before, COUNT, exact=True)
        with contextlib.suppress(Aborted):
            run_leaves(gradients, parameters, before[group.rank], COUNT, {}, torn_in)
        finished = gradients.finished()
        nodes = list(finished)
        gradients.drop()
        gradients.close()
        gradients.open(group, after, COUNT, exact=True)
        ran = run_leaves(gradients, parameters, after[group.rank], COUNT, finished, None)
        assert finish(gradients, 1.0)
        used = gradients.used
        return [p.grad.tolist() for p in parameters], ran, [nodes, used]

    of_all = of_each(world_size, act)
    (whole,) = of_each(1, lambda group: undisturbed(group))
    for rank, (sums, ran, (nodes, used)) in enumerate(of_all):
        assert sums == whole
        assert used == bytes([shares[world_size][rank][0][0] < 4, 1])  # in layout order
        ((first, last),) = BEFORE[world_size][rank]
        done = range(first, last if torn_in is None or torn_in >= last else max(first, torn_in))
        if torn_in is not None and torn_in < first:
            done = range(first, last)
        assert all(low in done and high - 1 in done for low, high in nodes)
        if shares is BEFORE and torn_in is None:
            assert ran == []
        mine = [leaf.virtual_worker for leaf in leaves_of(shares[world_size][rank], COUNT)]
        if torn_in in range(first, last) and torn_in in mine:
            assert torn_in in ran


EXCHANGES = {  # with the topology
    "alone": ([[(0, 12)]], ()),
    "swapped": ([[(0, 8)], [(8, 12)]], ()),
    "gathered": ([[(0, 8)], [(8, 10)], [(10, 12)]], ()),
    "by node": ([[(0, 4)], [(4, 8)], [(8, 12)]], ((2, 1),)),
    "several subtrees": (SEVERAL[2], ()),
}


@pytest.mark.parametrize("factor", [None, 1.0, 0.5], ids=["reduced", "complete", "scaled"])
@pytest.mark.parametrize(("shares", "topology"), EXCHANGES.values(), ids=EXCHANGES)
def test_step_torn_after_the_exchange_keeps_all_subtrees_and_gives_the_same_bits(
    shares, topology, factor
):
    """Only a member that is alone multiplies its own sum, which has no other place. It keeps what
    its last leaf was added to."""
    opened = threading.Barrier(len(shares))

    def act(group):
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
        gradients = GradientReducer(named(parameters))
        gradients.open(group, shares, COUNT, True, topology)
        run_leaves(gradients, parameters, shares[group.rank], COUNT, {}, None)
        gradients.exchange.reduce()
        if factor is not None:
            assert finish(gradients, factor)
        finished = gradients.finished()
        nodes = list(finished)
        gradients.drop()
        gradients.close()
        opened.wait()
        gradients.open(group, shares, COUNT, True, topology)
        ran = run_leaves(gradients, parameters, shares[group.rank], COUNT, finished, None)
        assert ran == ([COUNT - 1] if len(shares) == 1 and factor == 0.5 else [])
        assert finish(gradients, 1.0)
        return [p.grad.tolist() for p in parameters], nodes

    (whole,) = of_each(1, lambda group: undisturbed(group))
    for rank, (sums, nodes) in enumerate(of_each(len(shares), act)):
        assert sums == whole
        scaled_alone = len(shares) == 1 and factor == 0.5
        before_the_last = [(0, 8), (8, 10), (10, 11)]
        assert nodes == (before_the_last if scaled_alone else cover_share(shares[rank], COUNT))


@pytest.mark.parametrize(("shares", "topology"), EXCHANGES.values(), ids=EXCHANGES)
def test_two_reducers_share_the_work_of_one(shares, topology):
    """One computes this rank's sums of a step while the other one sends those of the step before,
    as far as others have sent theirs. Rank 0 sends last."""
    others_have_sent = threading.Barrier(len(shares))

    def act(group):
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
        computes = GradientReducer(named(parameters))
        sends = GradientReducer(named(parameters), computes=False)
        computes.open(group, shares, COUNT, True, topology, sends=False)
        sends.open(group, shares, COUNT, True, topology)
        sends.exchange.advance()  # nothing is there yet
        run_leaves(computes, parameters, shares[group.rank], COUNT, {}, None, sends=False)
        sums = computes.take_sums()
        assert list(sums) == cover_share(shares[group.rank], COUNT)
        sends.begin()
        sends.exchange.advance()
        if group.rank == 0:
            others_have_sent.wait()
        for node, gradients in sums.items():
            sends.add_finished(node, gradients, 0, node == max(sums))
        sends.send()
        sends.exchange.advance()
        if group.rank != 0:
            others_have_sent.wait()
        run_leaves(computes, parameters, shares[group.rank], COUNT, {}, None, sends=False)
        exchange = sends.exchange
        eventually(lambda: exchange.advance() or exchange._turns_taken == len(exchange._turns))
        assert finish(sends, 1.0)
        return [p.grad.tolist() for p in parameters]

    (whole,) = of_each(1, lambda group: undisturbed(group))
    assert of_each(len(shares), act) == [whole] * len(shares)


def test_finished_subtree_in_memory_that_was_sent_is_the_callers():
    """The next generation sends from other memory, since a node of it may be added elsewhere."""
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    gradients = GradientReducer(named(parameters))

    def act(group):
        gradients.open(group, [[(0, COUNT)]], COUNT, exact=True)
        run_leaves(gradients, parameters, [(0, COUNT)], COUNT, {}, None)
        (kept,) = gradients.finished().values()
        before = [one.tolist() for one in kept if one is not None]
        gradients.drop()
        gradients.close()
        gradients.open(group, [[(0, COUNT)]], COUNT, exact=True)
        for exchange in gradients.exchange._buckets:
            for view in exchange.views[-1]:
                view.fill_(7.0)
        return before, [one.tolist() for one in kept if one is not None]

    ((before, after),) = of_each(1, act)
    assert before == after


@pytest.mark.parametrize(("at_close", "at_open"), [(False, False), (False, True), (True, True)])
def test_memory_of_an_exchange_is_used_again_only_when_that_is_over(at_close, at_open):
    """What a peer sends may still arrive when a generation was left."""
    group = without_peers(types.SimpleNamespace(rank=0, world_size=2))
    group.transport.is_over = lambda _: at_close
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    gradients = GradientReducer(named(parameters))
    shares = BEFORE[2]
    gradients.open(group, shares, COUNT, exact=True)
    run_leaves(gradients, parameters, shares[0], COUNT, {}, None)
    held = [memory for exchange in gradients.exchange._buckets for memory in exchange._memory]
    gradients.drop()
    gradients.close()
    group.transport.is_over = lambda _: at_open
    gradients.open(group, shares, COUNT, exact=True)
    taken = [memory for exchange in gradients.exchange._buckets for memory in exchange._memory]
    again = {one.data_ptr() for one in held} & {one.data_ptr() for one in taken}
    assert len(again) == (len(held) if at_open else 0)


def test_gradient_memory_of_a_device_is_left_to_its_allocator_between_generations():
    gradients = GradientReducer(named([torch.nn.Parameter(torch.zeros(5))]))
    group = without_peers(types.SimpleNamespace(rank=0, world_size=2))
    gradients.open(group, BEFORE[2], COUNT, exact=True)
    on_host, on_device = torch.zeros(900), torch.zeros(900, device="meta")
    gradients.exchange._pool.give_back([on_host, on_device])
    gradients.open(group, BEFORE[2], COUNT, exact=True)
    assert any(memory is on_host for memory in gradients.exchange._pool._free)
    assert {memory.device.type for memory in gradients.exchange._pool._free} == {"cpu"}


def test_step_without_gradients_begins_with_nothing_finished():
    parameters = [torch.nn.Parameter(torch.zeros(5), requires_grad=False)]
    gradients = GradientReducer(named(parameters))

    def act(group):
        gradients.open(group, [[(0, 1)]], 1, exact=True)
        gradients.begin()
        gradients.before_leaf(fold(0, 1, 1)[0], True)
        gradients.after_leaf(fold(0, 1, 1)[0], True)
        gradients.send()
        sent = gradients.finished()
        gradients.begin()
        return [sent, gradients.finished()]

    assert of_each(1, act) == [[{(0, 1): []}, {}]]


def test_16_bit_sum_is_checked_without_a_wider_copy():
    """Torch's `sum` in fp32 makes one, of twice the bytes of the gradient."""
    gradient = torch.ones(4 << 20, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        total = cross_worker_reduction._total_of_elements(gradient)
    assert max(event.cpu_memory_usage for event in profiled.events()) < gradient.nbytes
    assert total.item() == gradient.numel()
    gradient[-1] = math.inf
    assert not math.isfinite(cross_worker_reduction._total_of_elements(gradient).item())


def undisturbed(group):
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
    gradients = GradientReducer(named(parameters))
    gradients.open(group, [[(0, COUNT)]], COUNT, exact=True)
    run_leaves(gradients, parameters, [(0, COUNT)], COUNT, {}, None)
    assert finish(gradients, 1.0)
    return [p.grad.tolist() for p in parameters]
