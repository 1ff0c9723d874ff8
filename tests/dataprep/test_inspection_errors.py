"""Errors and findings of `inspect` name the file, and no secret."""

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from elastic_dp import cli
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


def damaged_parquet(folder: Path, *, checksum: bool) -> None:
    """One number of 1,000 has another bit, in a page that is stored as it is."""
    table = pa.table({"id": pa.array(range(1000))})
    path = folder / "b.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": checksum}
    pq.write_table(table, path, **options)
    content = bytearray(path.read_bytes())
    content[content.index((777).to_bytes(8, "little"))] ^= 1
    path.write_bytes(content)


def parquet_without_a_page_header(folder: Path) -> None:
    """The header of a page is gone."""
    pq.write_table(pa.table({"id": range(10_000)}), folder / "b.parquet", compression="zstd")
    content = bytearray((folder / "b.parquet").read_bytes())
    content[4:104] = bytes(100)
    (folder / "b.parquet").write_bytes(content)


def csv_that_is_ragged_at_its_end(folder: Path) -> None:
    (folder / "b.csv").write_text("id,x\n" + "1,2\n" * 100_000 + "1,2,3\n")


def jsonl_that_is_cut_off(folder: Path) -> None:
    (folder / "b.jsonl").write_text('{"id": 1}\n' * 50_000 + '{"id": ')


DAMAGES = [
    lambda folder: damaged_parquet(folder, checksum=True),
    parquet_without_a_page_header,
    csv_that_is_ragged_at_its_end,
    jsonl_that_is_cut_off,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=["checksum", "page", "csv", "jsonl"])
def test_deep_inspection_names_the_file_with_a_row_that_cannot_be_decoded(damage, tmp_path):
    damage(tmp_path)
    name = next(tmp_path.iterdir()).name
    assert "unreadable" not in [finding.name for finding in inspect(str(tmp_path)).findings]
    found = [f for f in inspect(str(tmp_path), deep=True).findings if f.name == "unreadable"]
    assert len(found) == 1 and found[0].kind == "refused" and name in found[0].message
    done = CliRunner().invoke(cli.app, ["data", "inspect", str(tmp_path), "--deep", "--json"])
    assert name in next(
        f["message"] for f in json.loads(done.stdout)["findings"] if f["name"] == "unreadable"
    )


def test_deep_inspection_cannot_see_another_value_in_a_page_without_a_checksum(tmp_path):
    """docs/guarantees.md says so."""
    damaged_parquet(tmp_path, checksum=False)
    found = inspect(str(tmp_path), deep=True)
    assert found.rows == 1000 and "unreadable" not in [finding.name for finding in found.findings]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_deep_inspection_of_sound_files_finds_nothing_more(kind, tmp_path):
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(tmp_path / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert inspect(str(tmp_path), deep=True) == inspect(str(tmp_path))
