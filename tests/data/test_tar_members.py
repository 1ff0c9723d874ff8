"""Tars as GNU tar and Python write them: every kind of header is read, or refused with the member's
name."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from elastic_dp.config import DataConfig
from elastic_dp.errors import DataError
from tests.data.shards import add, refused
from tests.data.values import in_place

LONG = Path("d" * 90, "e" * 90, "f" * 90)
SAMPLES = range(3)
FORMATS = ("gnu", "oldgnu", "pax", "ustar", "v7")


def samples(folder, first=0):
    for i in SAMPLES:
        (folder / f"{first + i:03}.txt").write_text(f"é{first + i}")
        (folder / f"{first + i:03}.cls").write_text(str(first + i))


def gnu_tar(folder, fill, *options):
    source = folder / "source"
    source.mkdir()
    samples(source)
    fill(source)
    tar = folder / "tars" / "a.tar"
    tar.parent.mkdir(exist_ok=True)
    command = ["tar", "-C", source, "--sort=name", *options, "-cf", tar, "."]
    subprocess.run(command, check=True, capture_output=True)
    return tar


def nothing(folder):
    pass


def config(tar):
    return DataConfig(str(tar.parent), micro_batch_size=1)


def check(tar, prefix="./"):
    found = in_place(config(tar))
    assert found["__key__"][-3:] == [f"{prefix}{i:03}" for i in SAMPLES]
    assert found["txt"][-3:] == [f"é{i}" for i in SAMPLES]
    assert found["cls"][-3:] == list(SAMPLES)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_tar_of_any_format_is_read(format, tmp_path):
    assert len(check(gnu_tar(tmp_path, nothing, f"--format={format}"))["cls"]) == 3


@pytest.mark.parametrize("format", ["gnu", "oldgnu", "pax"])
def test_tar_with_long_names_is_read(format, tmp_path):
    def fill(folder):
        (folder / LONG).mkdir(parents=True)
        for file in folder.glob("*.*"):
            file.rename(folder / LONG / file.name)

    check(gnu_tar(tmp_path, fill, f"--format={format}"), f"./{LONG}/")


@pytest.mark.parametrize("format", FORMATS)
def test_tar_with_names_beyond_ascii_is_read(format, tmp_path):
    tar = gnu_tar(tmp_path, lambda f: (f / "日本.txt").write_text("x"), f"--format={format}")
    with pytest.raises(DataError, match="'cls'"):  # of which that sample has none
        in_place(config(tar))
    found = in_place(DataConfig(str(tar), micro_batch_size=1, columns=["__key__", "txt"]))
    assert ("./日本", "x") in zip(found["__key__"], found["txt"], strict=True)


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=oldgnu"],
        *(["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0")),
    ],
)
def test_sparse_member_is_refused_by_name(options, tmp_path):
    def fill(folder):
        with (folder / "003.bin").open("wb") as file:
            file.seek(5 << 20)
            file.write(b"end")

    tar = gnu_tar(tmp_path, fill, "--sparse", *options)
    refused(config(tar), r"003\.bin is a sparse member.*--sparse")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_link_is_refused_and_read_with_the_options_that_are_named(link, format, tmp_path):
    def fill(folder):
        link(folder / "001.txt" if link is os.link else "001.txt", folder / "003.txt")
        (folder / "003.cls").write_text("3")

    for name, options in (("as it is", []), ("options", ["--dereference", "--hard-dereference"])):
        (tmp_path / name).mkdir()
        tar = gnu_tar(tmp_path / name, fill, f"--format={format}", *options)
        if options:
            assert in_place(config(tar))["txt"] == ["é0", "é1", "é2", "é1"]
        else:
            refused(
                config(tar), r"a\.tar.*003\.txt is a link to .*001\.txt.*tar --dereference --hard"
            )


def test_tar_behind_a_tar_is_refused_and_read_where_they_were_joined(tmp_path):
    one = gnu_tar(tmp_path, nothing)
    (tmp_path / "more").mkdir()
    other = gnu_tar(tmp_path / "more", lambda folder: samples(folder, 3))
    both = one.read_bytes() + other.read_bytes()
    subprocess.run(["tar", "--concatenate", "-f", one, other], check=True)
    assert in_place(config(one))["cls"] == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    one.write_bytes(both)
    refused(config(one), r"a\.tar.*more follows its end, which is at byte \d+.*--concatenate")


def test_padding_behind_a_tar_is_no_second_tar(tmp_path):
    tar = gnu_tar(tmp_path, nothing, "--blocking-factor=4000")
    assert tar.stat().st_size > 2_000_000
    check(tar)


def test_extended_headers_of_the_whole_tar_and_of_members_are_read(tmp_path):
    """The tar begins as one of `git archive`, with a path and a size that only an extended header
    has."""
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "0" * 40}
    ) as tar:
        for i in SAMPLES:
            add(tar, f"{i:03}.txt", f"é{i}".encode(), pax_headers={"LIBARCHIVE.x": "y" * 2000})
            add(tar, f"{i:03}.cls", str(i).encode(), mtime=1e9 + 0.25)
    check(tmp_path / "a.tar", "")


def test_name_that_is_not_utf_8_is_refused(tmp_path):
    with tarfile.open(
        tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT, encoding="latin-1"
    ) as tar:
        add(tar, "é.txt", b"x")
    refused(config(tmp_path / "a.tar"), r"a\.tar")


def test_volume_label_is_no_sample(tmp_path):
    check(gnu_tar(tmp_path, nothing, "--label=set.1"))
