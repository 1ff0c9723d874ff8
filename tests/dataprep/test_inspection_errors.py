"""Errors and findings of `inspect` name the file, and no secret."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

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


def tar_with(folder: Path, name: str, **last: bytes) -> None:
    """Samples of `cls` and `txt`, of which the last one has other contents."""
    mode: Any = "w:gz" if name.endswith("gz") else "w"
    with tarfile.open(folder / name, mode) as tar:
        for i in range(5):
            for ending, content in {"cls": b"3", "txt": b"a", **(last if i == 4 else {})}.items():
                member = tarfile.TarInfo(f"{i}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def tar_whose_class_is_a_word(folder: Path) -> None:
    tar_with(folder, "b.tar", cls=b"cat")


def tar_whose_text_is_latin_1(folder: Path) -> None:
    tar_with(folder, "b.tar.gz", txt=b"caf\xe9")


DAMAGES = [
    lambda folder: damaged_parquet(folder, checksum=True),
    parquet_without_a_page_header,
    csv_that_is_ragged_at_its_end,
    jsonl_that_is_cut_off,
    tar_whose_class_is_a_word,
    tar_whose_text_is_latin_1,
]


@pytest.mark.parametrize(
    "damage", DAMAGES, ids=["checksum", "page", "csv", "jsonl", "tar", "tar.gz"]
)
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


def test_deep_inspection_of_a_tar_names_the_member_and_leaves_out_columns_that_are_not_read(
    tmp_path,
):
    tar_with(tmp_path, "b.tar", cls=b"cat", txt=b"\xff")
    for columns, words in (
        (["cls"], "'4.cls' of b.tar holds 'cat'"),
        (["txt"], "'4.txt' of b.tar"),
    ):
        found = inspect(str(tmp_path), columns=columns, deep=True).findings
        said = [finding.message for finding in found if finding.name == "unreadable"]
        assert len(said) == 1 and words in said[0]
    found = inspect(str(tmp_path), columns=["__key__"], deep=True).findings
    assert "unreadable" not in [finding.name for finding in found]


def test_deep_inspection_cannot_see_another_value_in_a_page_without_a_checksum(tmp_path):
    """docs/guarantees.md says so."""
    damaged_parquet(tmp_path, checksum=False)
    found = inspect(str(tmp_path), deep=True)
    assert found.rows == 1000 and "unreadable" not in [finding.name for finding in found.findings]


def test_deep_inspection_of_a_sound_tar_finds_nothing_more(tmp_path):
    tar_with(tmp_path, "b.tar")
    assert inspect(str(tmp_path), deep=True) == inspect(str(tmp_path))


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_deep_inspection_of_sound_files_finds_nothing_more(kind, tmp_path):
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(tmp_path / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert inspect(str(tmp_path), deep=True) == inspect(str(tmp_path))
