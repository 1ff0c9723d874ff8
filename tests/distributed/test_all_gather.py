"""All-gathers at once and around a ring: the same bytes, and when which."""

import threading

import pytest
import torch

from elastic_dp.distributed import abandoned_groups
from elastic_dp.distributed.process_group import ProcessGroup
from tests.distributed.members import of_each
from tests.patience import PATIENCE_S

WORLD, LIMIT = 3, 4 << 20


@pytest.mark.parametrize("topology", [(), ((2, 1),)])
def test_all_gather_at_once_and_in_a_ring_have_the_same_bytes(topology):
    """Vectors and rows, with what a rank sends in its own place already, as everywhere here."""
    sizes = [1, 1000, 8000, LIMIT // WORLD // 4, LIMIT // WORLD // 4 + 1]

    def act(group):
        group.place(topology)
        called, backend = [], group._backend

        class Backend:
            def __getattr__(self, name):
                called.append(name)
                return getattr(backend, name)

        group._backend = Backend()
        for rows in (False, True):
            for numel in sizes:
                output = torch.zeros(WORLD, numel)
                output[group.rank] = float(group.rank + 1)
                given = output[group.rank]
                group.wait(group.all_gather(output if rows else output.view(-1), given))
                assert torch.equal(output, torch.arange(1.0, WORLD + 1)[:, None].expand(-1, numel))
        group._backend = backend
        return [name.strip("_") for name in called]

    at_once, ring = "alltoall_base", ("allgather_base", "allgather")
    for called in of_each(WORLD, act):
        assert called[4] == ring[0] and called[9] == ring[1], "it is too large"
        assert called[0] == called[5] == at_once
        small = set(ring) if topology else {at_once}
        assert {called[n] for n in (2, 3, 7, 8)} <= small


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("lost", range(5))
def test_groups_end_where_a_rank_is_lost_in_a_gather(lost, is_gone, monkeypatch):
    """Else they keep their memory. Broadcasts, or a scatter of each rank, take half the processor
    time, but then two ranks may wait for each other: for what one passes on, or for what it does
    not send since an earlier rank `is_gone`."""
    handed, world_size = [], 5
    monkeypatch.setattr(abandoned_groups, "abandon", handed.append)
    launching, launched = threading.Barrier(world_size), threading.Barrier(world_size)

    def act(group):
        rows = torch.zeros(world_size, LIMIT // 4)
        if is_gone and group.rank == lost:
            group._backend = None
        launching.wait(PATIENCE_S)
        for columns in rows.split(LIMIT // 16, dim=1) if group.rank != lost else ():
            group.all_gather(columns, columns[group.rank])
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
