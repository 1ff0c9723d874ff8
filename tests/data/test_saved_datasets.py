"""Folders of Hugging Face `datasets` in which `map` and `filter` have cached results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from elastic_dp.data.discovery.index import read_index
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError
from tests.data.test_listing import config, ids
from tests.imported_when_used import ImportedWhenUsed

datasets = ImportedWhenUsed("datasets")


def arrow(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.arrow"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Rows 0 to 8 in two shards, beside the results of `map` and `filter`."""
    folder = tmp_path_factory.mktemp("saved") / "set"
    datasets.Dataset.from_dict({"id": range(9)}).save_to_disk(folder, num_shards=2)
    assert len(arrow(folder)) == 2
    loaded = datasets.load_from_disk(folder, keep_in_memory=False)
    loaded.map(lambda row: {"id": row["id"] + 100})
    loaded.map(lambda row: {"id": -1}, cache_file_name=str(folder / "mine.arrow"))
    assert len(loaded.filter(lambda row: row["id"] < 3)) == 3
    assert len(arrow(folder)) == 5, "datasets writes its results beside the data"
    return folder


def without_filtered(folder: Path) -> Path:
    """Without the result of `filter`, which has the numbers of rows, and so other columns."""
    (path,) = [
        path
        for path in folder.glob("cache-*.arrow")
        if pa.ipc.open_stream(path.read_bytes()).schema.names != ["id"]
    ]
    path.unlink()
    return folder


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "set"))


@pytest.mark.parametrize("url", ["set", "set/*.arrow", "**/*.arrow", "s*/*"])
def test_cached_results_beside_a_saved_dataset_are_counted_and_not_read(
    url, saved, tmp_path, caplog
):
    url = str(tmp_path / url)
    assert ids(config(url)) == list(range(9))
    (line,) = {record.message for record in caplog.records}
    assert "3 cached results of Hugging Face datasets (such as" in line
    done = convert(url, str(tmp_path.parent / f"{tmp_path.name}-out"))
    assert done.rows in (9, 18)  # a glob names mine.arrow
    assert inspect(url).shards == 2


def test_cached_results_that_a_glob_names_alone_are_read(saved, tmp_path):
    assert ids(config(saved / "mine.arrow")) == [-1] * 9
    assert ids(config(f"{saved}/mi*.arrow")) == [-1] * 9
    assert convert(f"{saved}/mi*.arrow", str(tmp_path / "out")).rows == 9


def test_cached_results_without_a_state_are_known_by_their_names(saved, tmp_path):
    (saved / "state.json").unlink()  # as in the cache of `load_dataset`
    (without_filtered(saved) / "mine.arrow").unlink()
    assert ids(config(saved)) == list(range(9))
    assert convert(str(saved), str(tmp_path / "out")).rows == 9
    (saved / "dataset_info.json").unlink()
    assert read_index(config(saved)).num_rows == 18, "no folder of datasets"


def test_cached_results_in_a_list_of_files_are_warned_of(saved, caplog):
    files = sorted(map(str, without_filtered(saved).glob("cache-*.arrow")))
    named = sorted(map(str, saved.glob("data-*.arrow")))
    read_index(config(named))
    read_index(config(files[:1]))
    assert not caplog.records
    read_index(config([*named, *files[:1]]))
    (record,) = caplog.records
    assert "1 file of the list is a cached result of Hugging Face datasets" in record.message
    assert Path(files[0]).name in record.message


def test_saved_dataset_without_one_of_its_files_is_refused(saved, tmp_path):
    (saved / "data-00001-of-00002.arrow").unlink()
    for url in (str(saved), f"{saved}/*.arrow"):
        for read in (
            lambda: read_index(config(url)),  # noqa: B023
            lambda: convert(str(saved), str(tmp_path / "out")),
        ):
            with pytest.raises(DataError, match=r"state\.json names 'data-00001-of-00002\.arrow'"):
                read()
    assert ids(config(f"{saved}/data-00000*.arrow")) == list(range(5))


def test_saved_dataset_with_indices_is_refused(saved, tmp_path):
    state = json.loads((saved / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    with pa.ipc.new_stream(saved / "indices.arrow", pa.schema({"indices": pa.uint64()})):
        pass
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"DataConfig\.url: state\.json names files of indices"):
        read_index(config(saved))
    with pytest.raises(DataError, match=r"flatten_indices\(\)"):
        convert(str(saved), str(tmp_path / "out"))
