"""A destination is a data set when all of it is there, and not before."""

import uuid

import fsspec
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.data.formats import text as text_format
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError, StorageError
from tests.dataprep.conversions import write_jsonl


@pytest.fixture(scope="module")
def bucket(moto):
    """URL of an empty bucket on a server that speaks S3."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL", moto)
        system = fsspec.get_filesystem_class("s3")
        system.clear_instance_cache()
        system().mkdir("conversions")
        yield "s3://conversions"
    system.clear_instance_cache()


@pytest.fixture
def empty(request, tmp_path):
    """(URL of a place where nothing is yet, its file system, the path in it): of the store that is
    named."""
    folder = {"file": tmp_path, "memory": "memory:/"}.get(request.param)
    url = f"{folder or request.getfixturevalue('bucket')}/{uuid.uuid4()}/out"
    return (url, *fsspec.core.url_to_fs(url))


class _Broken(KeyboardInterrupt):
    pass


def _break_off(after: int):
    calls = []

    def on_progress(now):
        calls.append(now)
        if len(calls) == after:
            assert now.shards > 1
            raise _Broken

    return on_progress


@pytest.mark.parametrize("empty", ["file", "memory", "s3"], indirect=True)
def test_convert_that_fails_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch, empty):
    out, system, path = empty
    monkeypatch.setattr(text_format, "GROUP_BYTES", 2000)
    write_jsonl(tmp_path)
    shape = {"rows_per_group": 10, "shard_bytes": 2000}
    while_there = []

    def look(now):
        system.invalidate_cache()
        while_there.append([f.rpartition("/")[2] for f in system.find(path)])

    with pytest.raises(_Broken):
        convert(str(tmp_path), out, on_progress=_break_off(9), **shape)
    system.invalidate_cache()
    assert system.find(path) == [] and not list(tmp_path.glob(".*"))
    made = convert(str(tmp_path), out, on_progress=look, **shape)
    assert len(while_there) > 1
    for names in while_there:
        assert names == [] if out.startswith("/") else "_incomplete" in names
    system.invalidate_cache()
    assert len(system.find(path)) == made.shards and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("empty", ["file", "memory", "s3"], indirect=True)
def test_convert_that_was_killed_leaves_no_readable_data_set(tmp_path, empty):
    """A kill is an exception that nobody handles: what lies there in the middle is looked at."""
    write_jsonl(tmp_path)
    out = empty[0]
    refused, options = [], {"anon": False} if out.startswith("s3:") else None

    def on_progress(now):
        train = DataConfig([out, f"{out}/*.parquet"], micro_batch_size=1, storage_options=options)
        for again in (
            lambda: convert(out, str(tmp_path / "again")),
            lambda: convert(f"{out}/*.parquet", str(tmp_path / "again")),
            lambda: inspect(out),
            lambda: read_index(train),
            lambda: convert(str(tmp_path), out),
        ):
            with pytest.raises(DataError) as error:
                again()
            refused.append(str(error.value))

    convert(str(tmp_path), out, rows_per_group=10, shard_bytes=2000, on_progress=on_progress)
    *as_source, as_destination = refused[:5]
    for said in as_source:
        assert ("at" if out.startswith("/") else "is not complete") in said
    assert "is not empty" in as_destination


def test_a_destination_with_something_in_it_is_refused(tmp_path):
    write_jsonl(tmp_path)
    convert(str(tmp_path), str(tmp_path / "out"))
    before = (tmp_path / "out" / "part-00000.parquet").read_bytes()
    with pytest.raises(DataError, match=r"is not empty: 1 files.*name another destination"):
        convert(str(tmp_path / "a.jsonl"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "part-00000.parquet").read_bytes() == before
    (tmp_path / "empty").mkdir()
    convert(str(tmp_path / "a.jsonl"), str(tmp_path / "empty"))


def test_a_store_that_refuses_is_a_storage_error(tmp_path):
    write_jsonl(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        convert(str(tmp_path / "a.jsonl"), str(tmp_path / "file" / "out"))


def test_a_bucket_that_is_not_there(tmp_path, bucket):
    write_jsonl(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write to 's3://not-there/out'.*does not exist"):
        convert(str(tmp_path), "s3://not-there/out")
    with pytest.raises(DataError, match=r"cannot list 's3://not-there/in'.*does not exist"):
        convert("s3://not-there/in", str(tmp_path / "out"))
