"""Weights of sources that change with the step: rows once in each epoch of a source, for any
workers, under a kill and over a resume; and the column that says from which source a row is."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.errors import SpecError
from tests.data.test_rows_in_rows_out import dealt

V, B = 4, 3
ROWS = 48  # of each source; source i has the rows 100 i, 100 i + 1, …


def sources(folder):
    urls = []
    for number in range(3):
        (folder / f"s{number}").mkdir(parents=True)
        ids = range(100 * number, 100 * number + ROWS)
        pq.write_table(pa.table({"id": ids}), folder / f"s{number}/a.parquet", row_group_size=7)
        urls.append(str(folder / f"s{number}"))
    return urls


def curriculum(folder, **changes):
    a, b, c = sources(folder)
    url = {0: {a: 1.0}, 2: {a: 0.5, b: 0.5}, 4: {b: 1, c: 3}}
    return DataConfig(url, **({"micro_batch_size": B, "seed": 7} | changes))


def test_curriculum_is_the_same_for_one_worker_and_three(tmp_path):
    config = curriculum(tmp_path)
    alone = dealt(config, 1)
    assert alone == dealt(config, 3)
    counts = [Counter(row["id"] // 100 for row in step) for step in alone]
    assert counts[:2] == [{0: 24}, {0: 24}]
    assert all(step.keys() == {0, 1} and abs(step[0] - 12) <= 2 for step in counts[2:4])
    assert all(step.keys() == {1, 2} and abs(step[2] - 18) <= 2 for step in counts[4:])
    for number in range(3):  # source 0 begins its second epoch in step 3
        ids = [row["id"] for step in alone for row in step if row["id"] // 100 == number]
        seen = Counter(ids).values()
        assert max(seen) == (2 if number == 0 else 1) and (number or min(seen) == 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ({1: {"a": 1.0}}, "the value of the first step is missing"),
        ({0: {}}, r"DataConfig\.url\[0\] must be a dict of URLs with weights"),
        ({0: {"a": 1.0}, -1: {"a": 1.0}}, "-1 must be a number of steps"),
        ({0: {"a": 1.0}, "b": {"a": 1.0}}, "'b' must be a number of steps"),
        ({0: {"a": 1.0}, 5: {"a": 0}}, r"DataConfig\.url\[5\]\['a'\] has weight 0; leave it out"),
        ({0: {"a": 1.0}, 5: {3: 1}}, "a source must be a URL"),
        ({0: {"a{1,2}": 1.0}}, "has a brace list, which is not expanded"),
    ],
)
def test_weights_by_step_that_are_wrong_are_refused_by_name(url, message):
    with pytest.raises(SpecError, match=message):
        DataConfig(url, micro_batch_size=1)
