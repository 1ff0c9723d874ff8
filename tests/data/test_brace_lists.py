"""Brace lists in URLs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.config.brace_lists import MAX_URLS, expand_braces
from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import DataError, SpecError
from tests.data.values import in_place


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("a.tar", ["a.tar"]),
        ("{a}.tar", ["{a}.tar"]),
        ("{0..2}", ["0", "1", "2"]),
        ("{098..101}", ["098", "099", "100", "101"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}/{00..01}.csv", ["a/00.csv", "a/01.csv", "b/00.csv", "b/01.csv"]),
        ("x{,.bak}", ["x", "x.bak"]),
        ("[{]a,b}", ["[{]a,b}"]),
    ],
)
def test_brace_list_stands_for_its_urls_in_order(url, wanted):
    assert expand_braces(url) == wanted


@pytest.mark.parametrize("url", ["{a,{b,c}}", "{0..999999999999}", f"{{0..{MAX_URLS}}}"])
def test_brace_list_that_is_nested_or_too_long_is_refused(url):
    with pytest.raises(
        SpecError, match=r"DataConfig\.url: .*(inside each other|more than 100,000)"
    ):
        DataConfig(url, micro_batch_size=1)


def test_brace_list_is_one_data_set_and_names_a_shard_that_is_not_there(tmp_path):
    for number in range(3):
        pq.write_table(pa.table({"id": [number]}), tmp_path / f"s-{number:02}.parquet")
    config = DataConfig(f"{tmp_path}/s-{{00..02}}.parquet", micro_batch_size=1)
    assert in_place(config) == {"id": [0, 1, 2]}
    with pytest.raises(DataError, match=r"s-03\.parquet"):
        read_index(DataConfig(f"{tmp_path}/s-{{00..03}}.parquet", micro_batch_size=1))


def test_brace_list_with_a_weight_is_refused():
    with pytest.raises(SpecError, match="is a list, and a weight is of one URL"):
        DataConfig({"s-{0..3}.tar": 1.0}, micro_batch_size=1)
