"""A client that applies the changes has the report."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.ui.report_changes import changes
from tests.report.journals import night

values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=12,
)


def applied(found, value):
    """Apply changes as live.js does."""
    root = {"": copy.deepcopy(value)}
    for kind, path, new in found:
        *way, last = ["", *path]
        at = root
        for key in way:
            at = at[key]
        if kind == "set":
            at[last] = new
        else:
            at[last] += new
    return root[""]


@given(values, values)
def test_changes_make_one_value_of_the_other(before, after):
    assert applied(changes(before, after), before) == after


def test_changes_of_a_journal_that_grows_are_small():
    builder, before = ReportBuilder("night"), {}
    for line in night():
        builder.line(line)
        after = builder.build(line["time"]).to_json()
        found = changes(before, after)
        assert applied(found, before) == after
        if before:
            assert all(kind == "add" for kind, path, _ in found if path == ["events"]) or (
                len(before["events"]) == 0 or "lost" in str(found)
            )
        before = after
