"""A batch that grows: which schedules are valid, and what is said of the others."""

import pytest

from elastic_dp.config import ScalingConfig
from elastic_dp.errors import SpecError


def test_numbers_hold_from_their_step_on_in_any_order():
    scaling = ScalingConfig(max_workers=4, virtual_workers={2000: 16, 0: 8})
    assert scaling.virtual_workers_by_step == {0: 8, 2000: 16}
    assert scaling.num_virtual_workers == 8 and scaling.grows
    assert not ScalingConfig(virtual_workers={0: 3}).grows
    assert ScalingConfig(max_workers=5).virtual_workers_by_step == {0: 5}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the value of the first step is missing; add that of 0"),
        ({5: 8}, "the value of the first step is missing; add that of 0"),
        ({0: 8, -1: 16}, "-1 must be a number of steps"),
        ({0: 8, 1.5: 16}, "1.5 must be a number of steps"),
        ({0: 8, "9": 16}, "'9' must be a number of steps"),
        ({False: 8}, "False must be a number of steps"),
        ({0: 8, 9: True}, r"virtual_workers\[9\] is True"),
        ({0: 8, 9: None}, r"virtual_workers\[9\] is None: leave it out"),
        ({0: 8, 9: 16.0}, r"virtual_workers\[9\] is 16.0"),
        ({0: 0, 9: 16}, r"virtual_workers\[0\] is 0, must be at least 1"),
        ({0: 8, 9: 8}, r"virtual_workers\[9\] is 8, and 8 before: leave it out"),
        ({0: 8, 9: 16, 20: 12}, r"virtual_workers\[20\] is 12, and 16 before"),
        ({0: 3, 9: 16}, r"virtual_workers\[0\] is 3, less than max_workers \(4\)"),
        ([8, 16], r"virtual_workers is \[8, 16\]"),
        (True, "virtual_workers is True"),
    ],
)
def test_schedule_that_is_no_growth_is_refused_by_name(given, words):
    with pytest.raises(SpecError, match=words):
        ScalingConfig(max_workers=4, virtual_workers=given)


def test_more_workers_than_the_first_steps_have_micro_batches_are_refused():
    with pytest.raises(SpecError, match=r"min_workers is 9, more than max_workers \(8\)"):
        ScalingConfig(min_workers=9, max_workers=8, virtual_workers={0: 8, 5: 16})
    with pytest.raises(SpecError, match=r"virtual_workers\[0\] is 8, less than max_workers \(9\)"):
        ScalingConfig(min_workers=9, max_workers=9, virtual_workers={0: 8, 5: 16})
