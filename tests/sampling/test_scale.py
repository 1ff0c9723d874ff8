"""A million shards and more rows than anyone has: what planning takes is known per row group."""

import time
import tracemalloc

import numpy as np
import pytest

from elastic_dp.sampling.order import Order


@pytest.mark.parametrize(
    "row_groups", [1_000_000, pytest.param(16_000_000, marks=pytest.mark.slow)]
)
def test_planning_is_bounded(row_groups):
    tracemalloc.start()
    order = Order(
        group_rows=np.full(row_groups, 1_000_000, dtype=np.int64),  # 10^12 rows and 1.6 · 10^13
        group_bytes=np.full(row_groups, 1 << 30, dtype=np.int64),
        virtual_workers=64,
        micro_batch_size=64,
    )
    order.locate(1, 0)
    if row_groups == 1_000_000:
        order.locate(1 + order.steps_per_epoch, 0)  # the next epoch: two lines are held
    held, peak = (size / row_groups for size in tracemalloc.get_traced_memory())
    tracemalloc.stop()
    assert order.num_rows == row_groups * 1_000_000
    assert held < 41, "8 bytes for the rows, 16 for each of two lines"
    assert peak < 42, "nothing that grows with the data set is held for a moment only"

    took = []
    for step in range(order.steps_per_epoch // 2, order.steps_per_epoch // 2 + 50):
        began = time.thread_time()
        groups, rows = order.locate(step, step % 64)
        took.append(time.thread_time() - began)
        assert len(groups) == 64 and rows.max() < 1_000_000
    assert np.median(took) < 1e-3
