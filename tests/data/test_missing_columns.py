"""A column that is asked for and is nowhere is refused before shards are scanned, which may take
hours."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import pytest
import webdataset

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.formats.format_registry import FORMATS
from elastic_dp.errors import DataError
from tests.data.values import in_place

ENDINGS = ("csv", "csv.gz", "csv.bz2", "jsonl", "jsonl.gz", "tar")


def write(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".tar":
        with webdataset.TarWriter(str(path)) as tar:
            for number, row in enumerate(rows):
                texts = {f"{name}.txt": str(value) for name, value in row.items()}
                tar.write({"__key__": f"{number:04}", **texts})
        return
    if ".csv" in path.name:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    else:
        lines = list(map(json.dumps, rows))
    content = "".join(f"{line}\n" for line in lines).encode()
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))


def config(folder: Path, ending: str, *names: str) -> DataConfig:
    columns = [f"{name}.txt" for name in names] if ending == "tar" else list(names)
    return DataConfig(str(folder), micro_batch_size=1, columns=columns)


@pytest.mark.parametrize("ending", ENDINGS)
def test_misspelt_column_is_refused_before_a_scan(ending, tmp_path, monkeypatch):
    for shard in range(40):
        write(tmp_path / f"{shard:02}.{ending}", [{"id": shard, "label": i} for i in range(20)])

    def scan(self, shard, columns):
        raise AssertionError("a shard was scanned")

    monkeypatch.setattr(FORMATS[ending.partition(".")[0]], "scan", scan)
    with pytest.raises(DataError) as error:
        read_index(config(tmp_path, ending, "id", "lable"))
    assert "DataConfig.columns: no column 'lable" in str(error.value)
    assert "'label" in str(error.value) and "nor in those of 39 more" in str(error.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_column_that_only_the_last_shard_has_is_read(ending, tmp_path):
    for shard in range(40):
        row = {"id": "a"} if shard < 39 else {"id": "b", "note": "c"}
        write(tmp_path / f"{shard:02}.{ending}", [row])
    found = in_place(config(tmp_path, ending, "id", "note"))
    note = "note.txt" if ending == "tar" else "note"
    assert found[note] == [None] * 39 + [b"c" if ending == "tar" else "c"]


def test_field_of_a_struct_that_is_null_in_the_first_rows_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.jsonl.FIRST_BYTES", 100)
    rows = [{"id": i, "p": None if i < 50 else {"s": "x"}} for i in range(60)]
    write(tmp_path / "a.jsonl", rows)
    found = in_place(config(tmp_path, "jsonl", "id", "p.s"))
    assert found["p.s"] == [None] * 50 + ["x"] * 10


def test_column_that_only_later_rows_have_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.jsonl.FIRST_BYTES", 100)
    write(tmp_path / "a.jsonl", [{"id": i} if i < 50 else {"id": i, "s": "x"} for i in range(60)])
    with pytest.raises(DataError, match=r"in the first rows of a\.jsonl, which have 'id'.*convert"):
        in_place(config(tmp_path, "jsonl", "s"))


def test_shard_whose_first_rows_say_nothing_is_scanned(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.jsonl.FIRST_BYTES", 10)
    write(tmp_path / "a.jsonl", [{"a long name of a column": "x"}])
    with pytest.raises(DataError, match=r"no column 's' in a\.jsonl, which has 'a long name"):
        in_place(config(tmp_path, "jsonl", "s"))
