"""The child process that reads Parquet footers (test_damaged_content.py has files that end it)."""

import os
import signal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import parquet_footer
from elastic_dp.data.formats.file_format import ShardAt
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.errors import DataError
from elastic_dp.storage import ObjectRewritten, Store


@pytest.fixture
def footers(monkeypatch):
    """A child of this test's own."""
    own = parquet_footer.FooterProcess()
    monkeypatch.setattr("elastic_dp.data.formats.parquet.FOOTERS", own)
    yield own
    own.close()


@pytest.fixture
def shard(tmp_path):
    pq.write_table(pa.table({"t": [[1, 2], [3]], "x": [1, 2]}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "idle"])
def test_a_child_that_is_gone_is_started_again(is_killed, shard, footers, monkeypatch):
    monkeypatch.setattr(parquet_footer, "IDLE_S", 60.0 if is_killed else 0.0)
    config = DataConfig(str(shard), micro_batch_size=1)
    assert read_index(config).num_rows == 2
    first = footers._popen
    if is_killed:
        os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert read_index(config).num_rows == 2
    assert footers._popen is not first


def test_a_child_that_cannot_start_is_an_error_that_says_why(shard, footers, monkeypatch):
    monkeypatch.setattr(parquet_footer.sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"a\.parquet.*exit code 1"):
        read_index(DataConfig(str(shard), micro_batch_size=1))


@pytest.mark.parametrize("ask", ["list_values", "may_match"])
def test_a_footer_that_is_read_again_must_be_the_one_of_the_index(ask, shard, footers):
    chosen, store = Parquet(), Store(str(shard.parent))
    tail = len(shard.read_bytes())
    other = ShardAt(store, str(shard), tail, "", "a.parquet", check=1, tail=100)
    arguments = {
        "list_values": ("t",),
        "may_match": (pc.field("x") == 1, [pa.field("x", pa.int64())]),
    }[ask]
    with pytest.raises(ObjectRewritten):
        getattr(chosen, ask)(other, *arguments)
