"""Errors of `inspect` name the file, and no secret."""

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.dataprep import inspect
from elastic_dp.dataprep.inspection import shard_survey
from elastic_dp.dataprep.sources import source_files
from elastic_dp.errors import DataError

TABLE = pa.table({"id": [1, 2]})


def test_errors_of_inspect_hold_no_value_of_an_option(tmp_path, monkeypatch):
    def broken(*given):
        raise RuntimeError("refused for key-of-mine-1234")

    for call in ("_take_footer", "_take_batch"):
        monkeypatch.setattr(shard_survey, call, broken)
    system = fsspec.filesystem("file")
    monkeypatch.setattr(source_files, "open_file_system", lambda url, options: (system, url))
    pq.write_table(TABLE, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=f"cannot read {name}") as refused:
            inspect(str(tmp_path / name), storage_options={"secret": "key-of-mine-1234"})
        assert "key-of-mine-1234" not in str(refused.value)
