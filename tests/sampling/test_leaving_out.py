"""Steps that are left out: the others have the rows that they had, one after the other."""

import numpy as np
import pytest

from elastic_dp.errors import DataError
from elastic_dp.sampling.growing_order import GrowingOrder
from elastic_dp.sampling.leaving_out import LeavingOut
from elastic_dp.sampling.mixture import Mixture, MixtureSource
from elastic_dp.sampling.order import Order, with_steps
from elastic_dp.sampling.packing import PackedOrder
from elastic_dp.sampling.step_schedule import StepSchedule

GROUPS, OPTIONS = [7, 40, 13, 22], {"virtual_workers": 3, "micro_batch_size": 2, "seed": 5}
ORDERS = {
    "drop": Order(group_rows=GROUPS, tail="drop", **OPTIONS),
    "short": Order(group_rows=GROUPS, tail="short", **OPTIONS),
    "mixture": Mixture(
        [
            MixtureSource(name=name, weight=weight, group_rows=GROUPS, group_bytes=GROUPS)
            for name, weight in (("a", 2.0), ("b", 1.0))
        ],
        **OPTIONS,
    ),
    "packed": PackedOrder(group_tokens=np.array(GROUPS) * 9, length=8, **OPTIONS),
}


def rows_of(order, step):
    each = [order.locate(step, v) for v in range(order.virtual_workers)]
    rows = [order.rows(step, v) for v in range(order.virtual_workers)]
    return str(each), rows, order.epoch_of(step)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    ("steps", "gone"),
    [
        (((1, 1),), {1}),
        (((4, 9),), {*range(4, 10)}),
        (((10, 20),), {*range(10, 21)}),  # across the end of an epoch
        (((4, 9), (4, 5)), {*range(4, 12)}),
        (((4, 9), (2, 5)), {2, 3, *range(4, 12)}),
        (((9, 9), (3, 3)), {3, 9}),
    ],
)
def test_the_others_are_as_before(order, steps, gone):
    left = with_steps(order, StepSchedule(order.virtual_workers), steps)
    kept = [step for step in range(1, 80) if step not in gone]
    assert [rows_of(left, n) for n in range(1, 61)] == [rows_of(order, step) for step in kept[:60]]
    of_range = left.locate_each(range(1, 61), 0)
    assert str(of_range) == str([order.locate(step, 0) for step in kept[:60]])
    if not isinstance(order, Mixture):
        for epochs in range(1, 5):
            assert left.steps_of(epochs) == sum(s <= order.steps_of(epochs) for s in kept)
            assert left.ends_epoch(left.steps_of(epochs))


def test_a_batch_that_grows_is_refused():
    growing = GrowingOrder(ORDERS["drop"], StepSchedule({0: 3, 5: 6}))
    with pytest.raises(DataError, match="its batch grows"):
        LeavingOut(growing, 2, 3)
