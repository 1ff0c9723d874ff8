"""All-gathers at once, to each rank, and around a ring: the same bytes, and when which."""

import contextlib
import threading

import pytest
import torch

from elastic_dp.distributed import abandoned_groups, process_group
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CollectiveFailed
from tests.distributed.members import of_each
from tests.patience import PATIENCE_S

WORLD, LIMIT = 3, process_group._AT_ONCE_BYTES_ALONE


@pytest.mark.parametrize("topology", [(), ((2, 1),)])
def test_each_way_to_gather_has_the_same_bytes(topology):
    """With what a rank sends in its own place already, or not."""
    in_ring = process_group.RING_BYTES // WORLD // 4
    sizes = [1, 1000, 8000, LIMIT // 4, LIMIT // 4 + 1, in_ring, in_ring + 1]

    def act(group):
        group.place(topology)
        called, backend = [], group._backend

        class Backend:
            def __getattr__(self, name):
                def call(*given):
                    called[-1].append(name)
                    return getattr(backend, name)(*given)

                return call

        group._backend = Backend()
        for in_place in (False, True):
            for numel in sizes:
                called.append([])
                output, given = torch.zeros(WORLD, numel), torch.full((numel,), group.rank + 1.0)
                output[group.rank] = given if in_place else 0.0
                sent = output[group.rank] if in_place else given
                group.wait(group.all_gather(output.view(-1), sent))
                assert torch.equal(output, torch.arange(1.0, WORLD + 1)[:, None].expand(-1, numel))
        group._backend = backend
        return called

    at_once, one_part, two_parts = ["alltoall_base"], ["allgather"], ["allgather"] * 2
    to_each = ["recv", "recv", "send", "send"]
    without_links = [at_once] * 4 + [to_each] * 3
    with_links = [at_once] * 2 + [one_part] * 4 + [two_parts]
    for called in of_each(WORLD, act):
        assert called == (with_links if topology else without_links) * 2


def test_rank_that_cannot_send_to_one_sends_to_the_others():
    """Else those would wait for it as long as it waits for others."""

    def act(group):
        rows, backend = torch.zeros(WORLD, LIMIT), group._backend
        rows[group.rank] = group.rank + 1.0

        class Backend:
            recv = backend.recv

            def send(self, tensors, to, tag):
                if to == 1:
                    raise RuntimeError("the connection is closed")
                return backend.send(tensors, to, tag)

        group._backend = Backend() if group.rank == 0 else backend
        failing = pytest.raises(CollectiveFailed, match="connection is closed")
        with failing if group.rank == 0 else contextlib.nullcontext():
            operation = group.all_gather(rows.view(-1), rows[group.rank])
        group._backend = backend
        if group.rank == 2:
            group.wait(operation)
            assert rows[:, 0].tolist() == [1.0, 2.0, 3.0]

    of_each(WORLD, act)


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("lost", range(5))
def test_groups_end_where_a_rank_is_lost_in_a_gather(lost, is_gone, monkeypatch):
    """Else they keep their memory. With broadcasts, or a scatter of each rank, two ranks may wait
    for each other: for what one passes on, or for what it does not send since an earlier rank
    `is_gone`."""
    handed, world_size = [], 5
    monkeypatch.setattr(abandoned_groups, "abandon", handed.append)
    launching, launched = threading.Barrier(world_size), threading.Barrier(world_size)

    def act(group):
        rows = torch.zeros(world_size, 1 << 20)
        if is_gone and group.rank == lost:
            group._backend = None
        launching.wait(PATIENCE_S)
        with contextlib.suppress(CollectiveFailed):
            for _ in range(4) if group.rank != lost else ():
                group.all_gather(rows.view(-1), rows[group.rank])
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
