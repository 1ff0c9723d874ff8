"""A source that changes while it is read is refused by name: never half of each version."""

import json
import os

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.data.formats import text as text_format
from elastic_dp.dataprep import convert, inspect
from elastic_dp.dataprep.inspection import shard_survey
from elastic_dp.dataprep.sources import row_stream
from elastic_dp.errors import DataError
from elastic_dp.storage import look_up

ROWS = 200


def csv(first):
    return "id,x\n" + "".join(f"{i},{i / 4}\n" for i in range(first, first + ROWS))


def jsonl(first):
    return "".join(json.dumps({"id": i, "x": i / 4}) + "\n" for i in range(first, first + ROWS))


def parquet(first):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(first, first + ROWS)}), sink, row_group_size=50)
    return sink.getvalue().to_pybytes()


def arrow(first):
    sink = pa.BufferOutputStream()
    table = pa.table({"id": range(first, first + ROWS)})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return sink.getvalue().to_pybytes()


KINDS = {"a.csv": csv, "a.jsonl": jsonl, "a.parquet": parquet, "a.arrow": arrow}
PLACES = ["file", "memory", "s3"]


@pytest.fixture
def folder(request, tmp_path, moto, monkeypatch):
    """URL of an empty folder of a store, its file system and path."""
    options = {}
    url = {"file": str(tmp_path / "source"), "memory": f"memory://{tmp_path.name}"}.get(
        request.param
    )
    if request.param == "s3":
        options = {"key": "test", "secret": "test", "endpoint_url": moto}
        url = f"s3://changes/{tmp_path.name}"
        system = fsspec.filesystem("s3", **options)
        system.mkdirs("changes", exist_ok=True)
    system, path = fsspec.core.url_to_fs(url, **options)
    system.makedirs(path, exist_ok=True)
    return url, system, path, options


def write(system, path, content):
    """A new file under the name, as most writers do it; a mapped file stays what it was."""
    content = content if isinstance(content, bytes) else content.encode()
    if os.path.exists(path):
        os.unlink(path)
    system.pipe_file(path, content)


def after_schemas(monkeypatch, change):
    """`change()` before the first row is read: between the two passes."""
    before = row_stream.Rows.__init__

    def init(self, schema, batches, *rest):
        def changed():
            change()
            yield from batches()

        before(self, schema, changed, *rest)

    monkeypatch.setattr(row_stream.Rows, "__init__", init)


@pytest.mark.parametrize("folder", PLACES, indirect=True)
@pytest.mark.parametrize("name", KINDS)
def test_file_that_changes_between_the_passes_of_convert_is_refused(
    name, folder, tmp_path, monkeypatch
):
    url, system, path, options = folder
    write(system, f"{path}/{name}", KINDS[name](1000))
    after_schemas(monkeypatch, lambda: write(system, f"{path}/{name}", KINDS[name](2000)))
    with pytest.raises(DataError, match=rf"{name} was changed while it was read"):
        convert(url, str(tmp_path / "to"), storage_options=options)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", KINDS)
def test_file_that_is_removed_between_the_passes_of_convert_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / name
    write(fsspec.filesystem("file"), str(path), KINDS[name](1000))
    after_schemas(monkeypatch, path.unlink)
    with pytest.raises(DataError, match=rf"{name} was removed while it was read"):
        convert(str(path), str(tmp_path / "to"))


@pytest.mark.parametrize("name", KINDS)
def test_file_that_changes_while_convert_reads_its_rows_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(text_format, "GROUP_BYTES", 500)
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / name
    write(fsspec.filesystem("file"), str(path), KINDS[name](1000))
    changes = iter([lambda: write(fsspec.filesystem("file"), str(path), KINDS[name](2000))])
    with pytest.raises(DataError, match=rf"{name} was changed while it was read"):
        convert(
            str(path),
            str(tmp_path / "to"),
            on_progress=lambda now: next(changes, lambda: None)(),
        )
    assert not (tmp_path / "to").exists()


def test_change_that_reads_as_damage_is_named_as_a_change(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text(csv(0))
    after_schemas(monkeypatch, lambda: path.write_text("id,x\n1,2,3\n"))
    with pytest.raises(DataError, match=r"a\.csv was changed while it was read"):
        convert(str(path), str(tmp_path / "to"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_file_that_changes_while_inspect_reads_it_is_refused(name, tmp_path, monkeypatch):
    path = tmp_path / name
    write(fsspec.filesystem("file"), str(path), KINDS[name](1000))
    take = "open_footer" if name == "a.parquet" else "_take_batch"
    before = getattr(shard_survey, take)

    def changed(*given):
        write(fsspec.filesystem("file"), str(path), KINDS[name](2000))
        return before(*given)

    monkeypatch.setattr(shard_survey, take, changed)
    with pytest.raises(DataError, match=rf"{name} was changed while it was read"):
        inspect(str(tmp_path))


def test_image_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    for number in (1, 2):
        (tmp_path / "source" / f"class{number}").mkdir(parents=True)
        (tmp_path / "source" / f"class{number}" / "a.png").write_bytes(b"old")
    image = tmp_path / "source" / "class2" / "a.png"
    after_schemas(monkeypatch, lambda: image.write_bytes(b"new bytes"))
    with pytest.raises(DataError, match=r"class2/a\.png was changed while it was read"):
        convert(str(tmp_path / "source"), str(tmp_path / "to"))


@pytest.mark.parametrize("folder", PLACES, indirect=True)
def test_file_that_was_changed_before_is_read_as_it_is_now(folder, tmp_path):
    """Listings are cached by file systems of fsspec."""
    url, system, path, options = folder
    for number in (1, 2):
        write(system, f"{path}/a.csv", csv(1000 * number))
        convert(url, str(tmp_path / f"{number}"), storage_options=options)
        rows = pq.read_table(tmp_path / f"{number}")
        assert rows["id"].to_pylist() == list(range(1000 * number, 1000 * number + ROWS))


def test_look_up_of_a_local_folder_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        look_up(fsspec.filesystem("file"), str(tmp_path))
