"""What a URL means: which files are shards, what is said of those that are not, and why there is
none."""

import itertools
import logging
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import DataError, StorageError
from tests.data.shards import config, refused, write_arrow
from tests.data.values import in_place
from tests.storage.conftest import send
from tests.storage.servers import s3_options

_numbers = itertools.count()


def rows(start, count):
    return pa.table({"id": pa.array(range(start, start + count), pa.int64())})


def put(path, start=0, count=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows(start, count), path)
    return path


def names(index):
    return [index.name(number) for number in range(index.num_shards)]


def ids(wanted):
    """Read the ids as a worker does, which lists nothing."""
    return in_place(wanted)["id"]


@pytest.fixture
def said(caplog):
    """What opening a data set warns of."""

    def of(wanted):
        caplog.clear()
        read_index(wanted)
        return [r.message for r in caplog.records if r.levelno >= logging.WARNING]

    return of


def test_folder_named_like_a_shard_is_said_to_be_left_out(tmp_path, said):
    put(tmp_path / "a.parquet")
    put(tmp_path / "b.parquet" / "part-0.parquet", 2)
    for url in (tmp_path, tmp_path / "*.parquet"):
        (line,) = said(config(url))
        assert "1 folder (b.parquet/) with what lies below; '**'" in line
    assert sorted(ids(config(f"{tmp_path}/**"))) == [0, 1, 2, 3]
    assert said(config(f"{tmp_path}/**")) == []
    assert ids(config(tmp_path / "b.parquet")) == [2, 3]


def test_shard_that_a_list_names_twice_is_said(tmp_path, said):
    for number, name in enumerate(("a.parquet", "b.parquet")):
        put(tmp_path / name, 2 * number)
    a, b = tmp_path / "a.parquet", tmp_path / "b.parquet"
    (line,) = said(config([a, f"file://{tmp_path}/*.parquet"]))
    assert f"names 1 shard more than once ({a}): the rows come as often" in line
    assert said(config([a, b])) == said(config({str(a): 0.5, f"{tmp_path}/*": 0.5})) == []


def test_linked_folder_is_read_by_a_deep_glob(tmp_path):
    put(tmp_path / "set" / "a.parquet")
    put(tmp_path / "elsewhere" / "b.parquet", 2)
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "round").symlink_to(tmp_path / "set")
    wanted = config(f"{tmp_path}/set/**/*.parquet")
    assert names(read_index(wanted)) == ["a.parquet", "link/b.parquet"]
    assert ids(wanted) == [0, 1, 2, 3]


def test_link_to_nothing_is_named(tmp_path, said):
    put(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").symlink_to("gone.parquet")
    (tmp_path / "c.parquet").symlink_to("c.parquet")
    for url in (tmp_path, tmp_path / "**"):
        (line,) = said(config(url))
        assert "2 files: 2 links to nothing (such as b.parquet)" in line


def test_hidden_shard_among_hidden_notes_is_said(tmp_path, said):
    put(tmp_path / "a.parquet")
    for name in ("_1", "_2", "_3"):
        (tmp_path / name).write_text("")
    assert said(config(tmp_path)) == []
    put(tmp_path / "_part.parquet")
    (line,) = said(config(tmp_path))
    assert "4 files: 4 hidden by a leading '.' or '_'" in line


@pytest.mark.parametrize("name", ["what?.parquet", "a[1].parquet", "a*.parquet", "[ab].parquet"])
def test_marks_of_patterns_in_names_are_escaped(name, tmp_path):
    put(tmp_path / name)
    put(tmp_path / "z.parquet", 2)
    assert sorted(ids(config(tmp_path))) == [0, 1, 2, 3]
    escaped = re.sub(r"([*?[])", r"[\1]", name)
    assert ids(config(tmp_path / escaped)) == ids(config([str(tmp_path / escaped)])) == [0, 1]
    if name.startswith("[") or "1" in name:
        assert "write '[[]' for '['" in no_shard(tmp_path / name)


def test_name_that_is_a_file_and_a_pattern_is_refused(tmp_path):
    put(tmp_path / "a[1].parquet")
    put(tmp_path / "a1.parquet")
    words = r"name of a file, and also a pattern that matches a1\.par"
    refused(config(tmp_path / "a[1].parquet"), words)
    assert names(read_index(config(f"{tmp_path}/a[[]1].parquet"))) == ["a[1].parquet"]


@pytest.mark.parametrize("name", ["a.parq", "a.pq", "A.PARQUET", "a.Parq"])
def test_parquet_with_other_endings_is_read(name, tmp_path):
    put(tmp_path / "set" / name)
    assert ids(config(tmp_path / "set")) == [0, 1]


@pytest.mark.parametrize("key", ["set//b.parquet", "set/x/../c.parquet"])
def test_key_of_s3_that_is_no_path_is_named(key, moto):
    bucket = f"keys-{next(_numbers)}"
    send("PUT", f"{moto}/{bucket}")
    buffer = pa.BufferOutputStream()
    pq.write_table(rows(0, 2), buffer)
    for each in ("set/a.parquet", key):
        send("PUT", f"{moto}/{bucket}/{each}", buffer.getvalue().to_pybytes())
    deep = config(f"s3://{bucket}/set/**/*.parquet", storage_options=s3_options(moto))
    with pytest.raises(StorageError, match=r"set cannot be listed, .*'\.\.' part .*rename"):
        read_index(deep)


def test_pipe_with_the_name_of_a_shard_is_named(tmp_path, said):
    put(tmp_path / "a.parquet")
    os.mkfifo(tmp_path / "b.parquet")
    for url in (tmp_path, tmp_path / "**"):
        (line,) = said(config(url))
        assert "1 file: 1 pipes, sockets or devices (such as b.parquet)" in line


def test_objects_that_stand_for_folders_are_no_shards(moto, said, caplog):
    bucket = f"keys-{next(_numbers)}-markers"
    send("PUT", f"{moto}/{bucket}")
    buffer = pa.BufferOutputStream()
    pq.write_table(rows(0, 2), buffer)
    for key in ("set/", "set/x/", "set/x/b.parquet/"):
        send("PUT", f"{moto}/{bucket}/{key}", b"")
    send("PUT", f"{moto}/{bucket}/set/x/b.parquet/part-0.parquet", buffer.getvalue().to_pybytes())
    caplog.set_level(logging.INFO)
    for url in (f"s3://{bucket}/set/**", f"s3://{bucket}/set/x/b.parquet/"):
        wanted = config(url, storage_options=s3_options(moto))
        assert said(wanted) == [] and ids(wanted) == [0, 1]
    assert "not read" not in caplog.text


def spark(folder):
    """A folder as Spark leaves it: most partitions without a row, notes, and checksums."""
    for number, count in enumerate([0, 3, 0, 2]):
        put(folder / f"part-{number:05d}-a.snappy.parquet", 10 * number, count)
        (folder / f".part-{number:05d}-a.snappy.parquet.crc").write_bytes(b"crc")
    for name in ("_SUCCESS", "_metadata", "_common_metadata"):
        (folder / name).write_bytes(b"")


def test_empty_parts_are_passed_over(tmp_path, said, caplog):
    spark(tmp_path)
    assert said(config(tmp_path)) == []
    assert ids(config(tmp_path)) == [10, 11, 12, 30, 31]
    caplog.set_level(logging.INFO)
    read_index(config(tmp_path))
    assert "7 files: 7 hidden by a leading '.' or '_'" in caplog.text


def test_arrow_file_without_a_row_is_passed_over(tmp_path, said):
    write_arrow(tmp_path / "a.arrow", rows(0, 0))
    write_arrow(tmp_path / "b.arrow", rows(0, 2))
    assert said(config(tmp_path)) == []
    assert ids(config(tmp_path)) == [0, 1]


def test_source_without_a_row_is_refused_only_where_it_has_a_weight(tmp_path):
    put(tmp_path / "none" / "a.parquet", 0, 0)
    put(tmp_path / "some" / "a.parquet", 0, 2)
    none, some = str(tmp_path / "none"), str(tmp_path / "some")
    assert ids(config([some, none])) == ids(config([none, some])) == [0, 1]
    with pytest.raises(DataError, match=rf"{none} has no rows; leave this source out"):
        open_data(config({some: 1, none: 1}), virtual_workers=1)
    refused(config(none), rf"no shard at '{none}' holds a row: a\.parquet")


def no_shard(url):
    with pytest.raises(DataError) as error:
        read_index(config(url))
    assert str(error.value).startswith("DataConfig.url: no shard (*.")
    return str(error.value)


def test_no_shard_says_why(tmp_path):
    (tmp_path / "other" / "inside").mkdir(parents=True)
    (tmp_path / "other" / "images.7z").write_bytes(b"x")
    (tmp_path / "link.parquet").symlink_to("gone")
    put(tmp_path / "deep" / "day=1" / "a.snappy.parquet")
    nothing = "no file of that name or below it; look at its spelling"
    for url, words in {
        "gone": nothing,
        "gone.parquet": nothing,
        "gone/*.parquet": "no file matches the pattern",
        "link.parquet": nothing,
        "other": "none of the files can be read: 1 file: 1 .7z (such as images.7z); there are "
        f"folders (inside/): '{tmp_path}/other/**' reads what lies below",
        "other/images.7z": "none of the files can be read: 1 file: 1 .7z (such as images.7z)",
        "deep": f"there are folders (day=1/): '{tmp_path}/deep/**' reads what lies below",
    }.items():
        assert words in no_shard(tmp_path / url), url
    assert ids(config(f"{tmp_path}/deep/**")) == [0, 1]
    assert nothing in no_shard("memory://nothing-of-that-name")


def test_no_shard_but_hidden_ones(tmp_path):
    put(tmp_path / "_part-0.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    for url in (tmp_path, f"{tmp_path}/*"):
        words = no_shard(url)
        assert "only 2 files: 2 hidden by a leading '.' or '_' (such as _SUCCESS)" in words
        assert "rename them if they are shards" in words


@pytest.mark.parametrize(
    ("pattern", "fixed"),
    [("**.parquet", "**/*.parquet"), ("part**", "part*"), ("a**b/*.parquet", "a*b/*.parquet")],
)
def test_two_stars_in_a_name_are_refused_with_the_pattern_that_was_meant(pattern, fixed, tmp_path):
    put(tmp_path / "part.parquet")
    with pytest.raises(DataError, match=r"'\*\*' is part of a name") as error:
        read_index(config(f"{tmp_path}/{pattern}"))
    assert f"write '{tmp_path}/{fixed}'" in str(error.value)
