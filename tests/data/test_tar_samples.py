"""Which samples a WebDataset tar has, and which members are refused."""

import tarfile

import pytest
from webdataset.tariterators import group_by_keys, tar_file_iterator

from elastic_dp.data.discovery.index import read_index
from elastic_dp.errors import BadShard, DataError
from tests.data.shards import add, config, in_memory, refused, rows_of, write_tar


@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_samples_of_tar_shards(where, tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.data.formats.tar.GROUP_BYTES", 20_000)
    rows = write_tar(tmp_path / "a.tar", 0, 40) + write_tar(tmp_path / "b.tar", 40, 3)
    found, counts = rows_of(where(tmp_path))
    assert found == rows
    assert len(counts) > 5
    some, _ = rows_of(where(tmp_path), columns=["seg.png", "cls"])
    assert some == [{"seg.png": row["seg.png"], "cls": row["cls"]} for row in rows]


def put_tar(path, *members):
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            add(tar, *member)
    return path


def link(name):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "a.jpg"
    return member


@pytest.mark.parametrize("where", [str, in_memory], ids=["file", "store"])
def test_notes_and_links_in_a_tar_are_no_samples(where, tmp_path):
    sample = [("a.jpg", b"1"), ("a.cls", b"7")]
    notes = [("LICENSE", b"free"), ("docs/README.md", b"read"), ("Makefile", b"all:")]
    put_tar(tmp_path / "a.tar", notes[0], *sample, notes[1], notes[2], link("LATEST"))
    put_tar(tmp_path / "b.tar", notes[0], ("license.jpg", b"2"), ("license.cls", b"8"))
    rows, _ = rows_of(where(tmp_path))
    assert rows == [
        {"__key__": "a", "jpg": b"1", "cls": 7},
        {"__key__": "license", "jpg": b"2", "cls": 8},
    ]


def test_samples_of_tar_shards_are_those_that_webdataset_finds(tmp_path):
    members = [
        ("LICENSE", b"free"),
        ("x/a.b.jpg", b"1"),
        ("x/a.txt", b"one"),
        ("c.b.jpg", b"2"),
        ("c.txt", b"2"),
    ]
    put_tar(tmp_path / "a.tar", *members)
    with open(tmp_path / "a.tar", "rb") as file:
        found = list(group_by_keys({**m, "__url__": ""} for m in tar_file_iterator(file)))
    rows, _ = rows_of(tmp_path)
    assert [row["__key__"] for row in rows] == [sample["__key__"] for sample in found]
    assert [row["txt"] for row in rows] == [sample["txt"].decode() for sample in found]


@pytest.mark.parametrize("again", ["a.jpg", "a.JPG"])
def test_member_of_a_tar_that_comes_twice_is_refused(again, tmp_path):
    put_tar(tmp_path / "a.tar", ("a.jpg", b"1"), ("a.cls", b"7"), (again, b"2"))
    refused(config(tmp_path), rf"a\.tar has '{again}' twice \(the sample 'a' has two col")


def test_key_of_a_tar_that_comes_again_later_is_another_sample(tmp_path):
    put_tar(tmp_path / "a.tar", ("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3"))
    rows, _ = rows_of(tmp_path)
    assert [row["jpg"] for row in rows] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "k.cls",
            b"cat\n",
            r"'k\.cls' of a\.tar holds 'cat\\n', and '\.cls' must be a whole number",
        ),
        ("k.cls", b"9" * 30, r"'k\.cls' of a\.tar holds a number of more than 64 bits"),
        ("k.txt", b"caf\xe9", r"'k\.txt' of a\.tar is no text in UTF-8 \(.* at byte 3\)"),
    ],
)
def test_value_of_a_tar_that_cannot_be_read_names_the_member(name, content, said, tmp_path):
    put_tar(tmp_path / "a.tar", ("j." + name.partition(".")[2], b"1"), (name, content))
    with pytest.raises(DataError, match=said) as error:
        rows_of(tmp_path)
    assert not isinstance(error.value, BadShard), "it is not damaged, so it is not to be skipped"


@pytest.mark.parametrize("name", ["img.{}.jpg", "{0}/img.{0}.jpg", "{}.cls"])
def test_keys_with_dots_whose_columns_grow_with_the_samples_are_refused(name, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(100):
            add(tar, name.format(f"{number:04}"), b"7")
    if name == "{}.cls":
        assert read_index(config(tmp_path)).num_rows == 100
        return
    refused(config(tmp_path), r"a\.tar has 100 columns .* such as '0000\.jpg' and '0001")
