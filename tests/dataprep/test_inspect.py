"""What `inspect` finds: each fault by a data set that has it, as training has it."""

import contextlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_data, read_index
from elastic_dp.dataprep import convert, inspect, inspection
from elastic_dp.errors import DataError


def tokens(rows):
    values = np.random.default_rng(0).integers(0, 50_000, rows * 2048).astype(np.int32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values), 2048)


def shard(folder, columns, name="part-0.parquet", rows=256, **settings):
    folder.mkdir(exist_ok=True)
    settings = {"compression": "none", "use_dictionary": False} | settings
    pq.write_table(pa.table(columns), folder / name, row_group_size=rows, **settings)
    return folder


def found(folder, *names, **settings):
    """The findings, which are exactly these."""
    said = inspect(str(folder), **settings).findings
    assert sorted(f.name for f in said) == sorted(names), said
    return said


def test_what_convert_writes_has_no_findings(tmp_path):
    source = shard(tmp_path / "source", {"tokens": tokens(4096), "id": range(4096)})
    convert(source, tmp_path / "out")
    result = inspect(tmp_path / "out", virtual_workers=2, micro_batch_size=10, deep=True)
    assert result.findings == ()
    assert (result.rows, result.shards, result.format) == (4096, 1, "parquet")
    assert [name for name, _ in result.columns] == ["tokens", "id"]
    plan = result.plan
    assert (plan.global_batch, plan.steps_per_epoch, plan.dropped_rows) == (20, 204, 16)
    with contextlib.closing(
        open_data(DataConfig(str(tmp_path / "out"), micro_batch_size=10), virtual_workers=2)
    ) as data:
        assert (plan.streams, plan.steps_per_epoch) == (data._order.streams, data.steps_per_epoch)


def test_large_and_few_row_groups_and_the_command_that_mends_them(tmp_path):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)}, rows=4096)
    few, large = sorted(found(folder, "large_row_groups", "few_row_groups"), key=lambda f: f.name)
    command = f"elastic-dp data convert {folder} {folder}-converted"
    assert large.fix == few.fix == command and "1 row groups for 8 streams" in few.message
    convert(str(folder), f"{folder}-converted")
    found(f"{folder}-converted")


def test_few_row_groups_for_the_virtual_workers(tmp_path):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    found(folder)
    (few,) = found(folder, "few_row_groups", virtual_workers=8, micro_batch_size=1)
    assert "16 row groups for 64 streams" in few.message
    *words, number = few.fix.split()
    assert words[-1] == "--row-group-bytes"
    convert(str(folder), str(tmp_path / "out"), row_group_bytes=int(number))
    found(tmp_path / "out", virtual_workers=8, micro_batch_size=1)
    small = shard(tmp_path / "small", {"id": range(100)})
    assert 'shuffle="full"' in found(small, "few_row_groups")[0].fix


def test_small_row_groups(tmp_path):
    folder = shard(tmp_path / "set", {"id": range(100_000)}, rows=1000)
    (small,) = found(folder, "small_row_groups")
    assert "(median of 100)" in small.message


def test_virtual_workers_that_share_a_stream(tmp_path):
    """Row groups so large that fewer of them than virtual workers may be open."""
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    shape = {"virtual_workers": 1024, "micro_batch_size": 1}
    said = {f.name: f for f in inspect(str(folder), **shape).findings}
    plan = inspect(str(folder), **shape).plan
    assert plan.streams < 1024 and f": {plan.streams} of them fit" in said["shared_streams"].message


def test_too_few_rows_and_too_little_memory_as_training_has_it(tmp_path, monkeypatch):
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)})
    (few,) = found(folder, "too_few_rows", virtual_workers=2, micro_batch_size=4000)
    assert few.kind == "refused" and "fewer than one global batch of 8000" in few.message
    monkeypatch.setattr(DataConfig, "memory_bytes", 32 << 20)
    (memory,) = found(folder, "memory")
    assert memory.kind == "refused" and "has up to 9 row groups open" in memory.message
    with pytest.raises(DataError, match="has up to 9 row groups open"):
        open_data(
            DataConfig(str(folder), micro_batch_size=1, memory_bytes=32 << 20), virtual_workers=1
        )


def test_many_small_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "MANY_SHARDS", 3)
    for number in range(3):
        folder = shard(tmp_path / "set", {"tokens": tokens(256)}, f"{number}.parquet")
    found(folder, "few_row_groups", "small_shards")


REFUSED = {
    "nulls": {"a.parquet": {"x": pa.array([1.0, None])}},
    "no type": {"a.parquet": {"x": pa.nulls(2)}},
    "types that differ": {"a.parquet": {"x": [1]}, "b.parquet": {"x": ["a"]}},
    "nothing": {},
    "no row": {"a.parquet": {"x": pa.array([], pa.int64())}},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_training_refuses_is_refused_in_its_words(case, tmp_path):
    (tmp_path / "set").mkdir()
    for name, columns in REFUSED[case].items():
        shard(tmp_path / "set", columns, name)
    with pytest.raises(DataError) as error:
        read_index(DataConfig(str(tmp_path / "set"), micro_batch_size=1))
    (finding,) = found(tmp_path / "set", "refused")
    assert finding.kind == "refused" and str(error.value).startswith(finding.message)


def test_columns_that_a_job_does_not_need_are_not_judged(tmp_path):
    folder = shard(tmp_path / "set", {"x": pa.nulls(8192), "tokens": tokens(8192)})
    found(folder, "refused")
    found(folder, columns=["tokens"])
    assert "no column 'y'" in found(folder, "refused", columns=["y"])[0].message


@pytest.mark.parametrize("checksum", [True, False])
def test_deep_finds_a_damaged_page_that_has_a_checksum(checksum, tmp_path):
    """Without one, another value is read."""
    folder = shard(tmp_path / "set", {"tokens": tokens(4096)}, write_page_checksum=checksum)
    content = bytearray((folder / "part-0.parquet").read_bytes())
    content[5_000_000] ^= 1
    (folder / "part-0.parquet").write_bytes(content)
    found(folder)
    damaged = found(folder, *["unreadable"] * checksum, deep=True)
    assert not checksum or "part-0.parquet" in damaged[0].message


def test_half_of_a_job_is_refused(tmp_path):
    with pytest.raises(DataError, match="go together"):
        inspect(str(tmp_path), virtual_workers=2)
    with pytest.raises(DataError, match="virtual_workers is 0"):
        inspect(str(tmp_path), virtual_workers=0, micro_batch_size=1)
