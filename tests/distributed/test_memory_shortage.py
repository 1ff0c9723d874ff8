"""Memory that operations of an abandoned group keep, and that the next generation needs."""

import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic_dp.distributed import abandoned_groups
from elastic_dp.distributed.abandoned_groups import allocate_buffers, drop_abandoned_groups
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.piece_assignment import HeldRange
from elastic_dp.errors import ClusterError, GroupAborted
from tests.distributed.meeting import InMemory, form
from tests.distributed.members import named, run_and_send
from tests.distributed.test_reduction_to_holders import in_pieces
from tests.patience import PATIENCE_S

NUMEL, SHARES, V = 700, [[(0, 3)], [(3, 6)], [(6, 8)]], 8
REFUSED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


@pytest.fixture(autouse=True)
def _rest_long(monkeypatch):
    """Whoever does not end the rest of the groups, waits in vain. None outlives its test."""
    drop_abandoned_groups(PATIENCE_S)
    monkeypatch.setattr(abandoned_groups, "REST_S", 10 * PATIENCE_S)
    yield
    drop_abandoned_groups(PATIENCE_S)


@pytest.fixture
def may_close(monkeypatch):
    """Connections of groups that were left are closed once this is set."""
    may, close = threading.Event(), abandoned_groups.close_connections

    def waits(backend):
        may.wait(PATIENCE_S)
        close(backend)

    monkeypatch.setattr(abandoned_groups, "close_connections", waits)
    yield may
    may.set()


def not_withheld():
    return False


def in_two_generations(first, second):
    """What `second` returns for each rank. It gets what `first` has returned, whose group is
    aborted on all ranks when it has ended on all."""
    meet = InMemory()
    world_size = len(SHARES)
    together = threading.Barrier(world_size, timeout=PATIENCE_S)

    def member(rank):
        groups = [form(meet, rank, world_size, generation=number) for number in (1, 2)]
        try:
            made = first(groups[0])
            together.wait()
            groups[0].abort()
            return second(groups[1], (groups[0], made))
        except Exception:
            together.abort()
            raise
        finally:
            for group in groups:
                group.close()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


def sum_of(gradients, p, rank, *, ends):
    """The held parts of the sum of a step, whose exchange `ends`, or is only begun."""
    run_and_send(gradients, SHARES[rank], V, lambda v: (p * float(v)).sum())
    if not ends:
        return {}
    gradients.exchange.reduce()
    return gradients.exchange.sums_of_pieces(1.0)[0]


@pytest.mark.parametrize("launches", [(0, 1), (0,), ()])
def test_next_generation_uses_memory_again_that_operations_of_the_last_one_kept(
    launches, monkeypatch
):
    """A worker that is lost in an exchange leaves those of the others in flight."""
    monkeypatch.setattr(abandoned_groups, "LARGE_BYTES", 0)

    def first(group):
        p = torch.nn.Parameter(torch.zeros(NUMEL))
        needed = {p: [HeldRange(0, 0, NUMEL, (0, 1))]}
        gradients = GradientReducer(named([p]), exchange=in_pieces([p], needed))
        gradients.open(group, SHARES, V, True)
        if group.rank in launches:
            sum_of(gradients, p, group.rank, ends=False)
        elif group.rank == 0:
            group.all_gather(torch.zeros(3), torch.zeros(1))  # it keeps other memory
        return gradients, p, gradients.exchange.received_memory[torch.float32]

    def second(group, made):
        before, (gradients, p, memory) = made
        gradients.drop()
        gradients.close()
        before.close()
        group.gather_bytes(b"")  # all have left it
        gradients.open(group, SHARES, V, True)
        used_again = gradients.exchange.received_memory[torch.float32] is memory
        for held in sum_of(gradients, p, group.rank, ends=True).values():
            assert torch.equal(held, torch.full((NUMEL,), float(sum(range(V)))))
        gradients.close()
        return used_again

    assert in_two_generations(first, second) == [True] * len(SHARES)


def test_small_memory_that_operations_keep_is_made_anew(may_close):
    """Nobody waits for it."""

    def first(group):
        p = torch.nn.Parameter(torch.zeros(NUMEL))
        gradients = GradientReducer(named([p]))
        gradients.open(group, SHARES, V, True)
        if group.rank == 0:
            sum_of(gradients, p, group.rank, ends=False)
        return gradients

    def second(group, made):
        before, gradients = made
        held = {memory.data_ptr() for one in gradients.exchange._buckets for memory in one._memory}
        gradients.drop()
        gradients.close()
        before.close()
        gradients.open(group, SHARES, V, True)
        taken = {memory.data_ptr() for one in gradients.exchange._buckets for memory in one._memory}
        gradients.close()
        return bool(held & taken)

    assert in_two_generations(first, second) == [False, True, True]


def test_refused_memory_is_waited_for_where_abandoned_groups_keep_some(may_close):
    def first(group):
        if group.rank != 0:
            return None
        received = torch.zeros(3)  # for what the others never send
        group.all_gather(received, torch.zeros(1))
        return weakref.ref(received)

    def second(group, made):
        before, kept = made
        before.close()
        group.gather_bytes(b"")  # all have left it
        if kept is None:
            return None
        attempts = []

        def allocate():
            attempts.append(kept() is None)
            if kept() is not None:
                may_close.set()
                raise RuntimeError(REFUSED)

        allocate_buffers(allocate, group.check, not_withheld)
        return attempts

    assert in_two_generations(first, second)[0] == [False, True]


def refuse():
    raise RuntimeError(REFUSED)


def test_a_real_shortage_is_told_at_once_and_says_the_way_out():
    calls = []

    def refused():
        calls.append(1)
        refuse()

    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"4096 bytes.*more memory.*sharding=\"optimizer\""):
        allocate_buffers(refused, lambda: None, not_withheld)
    assert len(calls) == 1
    assert time.monotonic() - started < abandoned_groups._LIMIT_S / 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("shapes differ")]
)
def test_faults_of_a_device_and_other_errors_stay_what_they_are(error):
    def fails():
        raise error

    with pytest.raises(RuntimeError) as told:
        allocate_buffers(fails, lambda: None, not_withheld)
    assert told.value is error


def test_wait_for_memory_ends_with_the_generation():
    def aborted():
        raise GroupAborted("the generation was ended")

    def first(group):
        return group.all_gather(torch.zeros(3), torch.zeros(1)) if group.rank == 0 else None

    def second(group, made):
        before, _ = made
        if group.rank == 0:
            before.close()  # the others are open until this one has ended
            with pytest.raises(GroupAborted):
                allocate_buffers(refuse, aborted, not_withheld)
        group.gather_bytes(b"")

    in_two_generations(first, second)
