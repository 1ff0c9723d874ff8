"""All-gathers at once, to each rank, and around a ring: the same bytes, and when which."""

import contextlib
import itertools
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
    in_ring = process_group._RING_BYTES // WORLD // 4
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


LATER = ["all_gather", "all_reduce", "all_to_all"]


@pytest.mark.parametrize("launched", [*itertools.product(range(3), repeat=3)])
@pytest.mark.parametrize("second", LATER)
def test_groups_end_where_a_rank_is_lost_in_a_step(second, launched, monkeypatch):
    """Else they keep their memory. The others have launched none, the first, or both of two
    exchanges when they leave; and two ranks may wait for each other."""
    handed, numel = [], LIMIT
    monkeypatch.setattr(abandoned_groups, "abandon", handed.append)
    together = threading.Barrier(4)

    def act(group):
        flat, sizes = torch.zeros(4 * numel), [numel] * 4
        part = flat[group.rank * numel :][:numel]
        given = {"all_gather": (flat, part), "all_reduce": (flat,)}
        given["all_to_all"] = flat, torch.zeros(4 * numel), sizes, sizes
        together.wait(PATIENCE_S)
        if group.rank == 3:
            group._backend = None
        with contextlib.suppress(CollectiveFailed):
            for name in ["all_to_all", second][: [*launched, 0][group.rank]]:
                getattr(group, name)(*given[name])
        together.wait(PATIENCE_S)

    of_each(4, act)
    ready = threading.Event()
    ready.set()
    threads = [
        threading.Thread(target=abandoned_groups._drop, args=(one, ready), daemon=True)
        for one in handed
        if one[0][0] is not None
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
