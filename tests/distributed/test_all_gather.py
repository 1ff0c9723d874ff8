"""All-gathers at once, by scatters and around a ring: the same bytes, and when which."""

import threading
from functools import partial

import pytest
import torch

from elastic_dp.distributed import abandoned_groups, process_group
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import GroupAborted
from tests.distributed.members import of_each
from tests.patience import PATIENCE_S

WORLD, AT_ONCE = 3, process_group._AT_ONCE_BYTES // 4  # elements
RING = 4 << 20  # bytes


@pytest.mark.parametrize("topology", [(), ((2, 1),)])
def test_all_gathers_have_the_same_bytes(topology):
    """What a rank sends lies in its own place, or elsewhere."""
    sizes = {
        1: "alltoall_base",
        AT_ONCE // WORLD: "alltoall_base",
        AT_ONCE // WORLD + 1: "allgather" if topology else "alltoall_base",
        AT_ONCE: "allgather" if topology else "alltoall_base",
        AT_ONCE + 1: "allgather" if topology else "scatter",
        (2 << 20) // 4 + 1: "allgather" if topology else "scatter",
    }

    def act(group):
        group.place(topology)
        called, backend = [], group._backend

        class Backend:
            def __getattr__(self, name):
                called.append(name)
                return getattr(backend, name)

        group._backend = Backend()
        for numel, name in sizes.items():
            for in_place in (True, False):
                output, given = torch.zeros(WORLD, numel), torch.full((numel,), group.rank + 1.0)
                if in_place:
                    given = output[group.rank].copy_(given)
                called.clear()
                group.wait(group.all_gather(output.view(-1), given))
                assert torch.equal(output, torch.arange(1.0, WORLD + 1)[:, None].expand(-1, numel))
                in_parts = -(-output.nbytes // RING)
                times = {"alltoall_base": 1, "scatter": WORLD, "allgather": in_parts}[name]
                assert called == [name] * times
        assert in_parts == 2
        group._backend = backend

    of_each(WORLD, act)


def test_a_wait_for_the_part_of_a_rank_that_launches_none_ends_with_an_abort():
    over = threading.Event()

    def act(group):
        output = torch.zeros(WORLD, AT_ONCE + 1)
        if group.rank == 2:  # takes part in the first scatter alone
            group.wait(group._launch((output,), partial(group._scatter, output[0], 0)))
        else:
            operation = group.all_gather(output.view(-1), output[group.rank])
        if group.rank == 0:
            threading.Timer(0.2, group.abort).start()
            with pytest.raises(GroupAborted):
                group.wait(operation)
            assert [work.is_completed() for work in operation.works] == [True, True, False]
            assert operation in group.in_flight, "its memory is not free"
            over.set()
        assert over.wait(PATIENCE_S)

    of_each(WORLD, act)


@pytest.mark.parametrize("lost", range(5))
def test_groups_end_where_a_rank_is_lost_in_a_gather(lost, monkeypatch):
    """No two ranks wait for each other, which would keep the memory of both."""
    handed, world_size = [], 5
    monkeypatch.setattr(abandoned_groups, "abandon", handed.append)
    launched = threading.Barrier(world_size)

    def act(group):
        output = torch.zeros(world_size, AT_ONCE + 1)
        if group.rank != lost:
            group.all_gather(output.view(-1), output[group.rank])
        launched.wait(PATIENCE_S)

    of_each(world_size, act)
    ready = threading.Event()
    ready.set()
    threads = [
        threading.Thread(target=abandoned_groups._drop, args=(one, ready), daemon=True)
        for one in handed
    ]
    handed.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("topology", "shared"),
    [
        ((), False),
        (((4,),), False),
        (((1, 1, 1, 1),), False),
        (((2, 2),), True),
        (((3, 1),), True),
        (((1, 1, 1, 1), (2, 2)), True),
        (((1, 1, 1, 1), (4,)), False),
    ],
)
def test_links_are_shared_where_one_of_several_nodes_or_zones_has_several_members(topology, shared):
    group = ProcessGroup(None, 0, 1, torch.device("cpu"))
    group.place(topology)
    assert group._shares_links == shared
