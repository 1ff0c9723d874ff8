"""What all members make of the records of a step."""

import pytest

from elastic_dp.train.step.step_header import MemberHeader, StepHeader

NOTHING = {
    "late": False,
    "used": b"",
    "changed": b"",
    "results": {},
    "stop": None,
    "keep": False,
    "keeps_late": False,
    "bad": (),
    "weights": None,
}


@pytest.mark.parametrize(
    ("connected", "all_are"),
    [
        ((True, True), True),
        ((True, False), False),
        ((False, True), False),
        ((None, None), False),  # they have switched, or have no device
    ],
)
def test_members_are_connected_when_each_of_them_says_so(connected, all_are):
    records = [MemberHeader(**NOTHING, connected=one).to_bytes() for one in connected]
    assert StepHeader.of(records, 0, 0).connected is all_are
