import pytest

from elastic_dp.coordinator.planning.equal_ranges import equal_ranges
from elastic_dp.distributed.reduction_tree import cover


@pytest.mark.parametrize("virtual_workers", range(1, 33))
def test_every_virtual_worker_is_dealt_once_and_evenly(virtual_workers: int) -> None:
    for world_size in range(1, virtual_workers + 1):
        ranges = equal_ranges(virtual_workers, world_size)
        assert [v for first, last in ranges for v in range(first, last)] == [
            *range(virtual_workers)
        ]
        sizes = [last - first for first, last in ranges]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("virtual_workers", "world_size", "pieces"),
    [(8, 1, 1), (8, 2, 2), (8, 4, 4), (8, 8, 8), (6, 4, 4), (7, 4, 4), (5, 4, 4), (8, 3, 5)],
)
def test_ranges_are_whole_subtrees_where_they_can_be(
    virtual_workers: int, world_size: int, pieces: int
) -> None:
    ranges = equal_ranges(virtual_workers, world_size)
    assert sum(len(cover(first, last, virtual_workers)) for first, last in ranges) == pieces


@pytest.mark.parametrize("world_size", [0, 9])
def test_a_world_without_work_for_each_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        equal_ranges(8, world_size)
