"""What all kinds of orders have in common, and how many row groups they need in memory."""

from __future__ import annotations

from elastic_dp.sampling.growing_order import GrowingOrder
from elastic_dp.sampling.mixture import Mixture
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.packing import PackedOrder

AnyOrder = Order | Mixture | PackedOrder | GrowingOrder


def row_groups_at_once(order: AnyOrder) -> int:
    """Return how many row groups a worker that runs the whole job has in memory.

    While one replaces another, all others stay.
    """
    return order.open_row_groups(order.virtual_workers) + 1


def row_groups_at_least(order: AnyOrder) -> int:
    """Return the least number of row groups that need memory; with less they would be read
    repeatedly.

    If only one is open, the next can wait until it is released.
    """
    return count if (count := row_groups_at_once(order)) > 2 else 1
