"""A mapped file, whose bytes are also read straight to where they are wanted."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastic_dp.data.columns.mapped_file import MappedFile, mapped_file
from elastic_dp.storage import ObjectRewritten

CONTENT = np.arange(100_000, dtype=np.int64)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(CONTENT.tobytes())
    return path


def rows_of(path) -> np.ndarray:
    """All but the first eight numbers, as a view of the mapping of which nobody else knows."""
    return np.frombuffer(MappedFile(str(path)).content, np.int64)[8:].reshape(-1, 8)


def test_every_view_of_the_mapping_is_read_to_its_place(path):
    rows = rows_of(path)
    assert not rows.flags.writeable
    out = np.zeros((7, 8), np.int64)
    for start in (0, 1, len(rows) - 7):
        assert mapped_file(rows).read(rows[start : start + 7], out)
        assert np.array_equal(out, rows[start : start + 7])
    assert mapped_file(rows.view(np.uint8).reshape(-1)[5:]) is mapped_file(rows)


def test_mapping_is_found_through_arrow_and_a_memoryview(path):
    content = memoryview(MappedFile(str(path)).content)
    inner = pa.py_buffer(content).slice(64, 800)
    array = pa.Array.from_buffers(pa.int64(), 100, [None, inner.slice(0, 800)])
    numbers = np.frombuffer(array.buffers()[1], np.int64)
    assert mapped_file(numbers) is not None
    out = np.zeros(100, np.int64)
    assert mapped_file(numbers).read(numbers, out) and np.array_equal(out, CONTENT[8:108])


def test_memory_of_another_kind_is_of_no_file(path):
    assert mapped_file(CONTENT) is None
    assert mapped_file(rows_of(path).copy()) is None
    assert mapped_file(np.frombuffer(pa.py_buffer(b"12345678"), np.int64)) is None
    assert mapped_file(np.frombuffer(b"12345678", np.int64)) is None


def test_the_mapping_goes_with_its_last_view(path):
    def is_mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    rows = rows_of(path)
    assert is_mapped()
    del rows
    assert not is_mapped()


def test_a_mapping_keeps_no_descriptor(path):
    before = len(os.listdir("/proc/self/fd"))
    rows = rows_of(path)
    assert mapped_file(rows).read(rows, np.empty_like(rows))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [8, 64, 64 + 8, CONTENT.nbytes - 1])
def test_a_file_that_was_cut_off_is_an_error(path, size):
    rows = rows_of(path)
    os.truncate(path, size)
    with pytest.raises(ObjectRewritten, match=str(path)):
        mapped_file(rows).read(rows, np.empty_like(rows))
    with pytest.raises(ObjectRewritten):  # also where the wanted rows are still there
        mapped_file(rows).read(rows[:0], np.empty_like(rows[:0]))


def test_a_file_that_was_written_to_is_an_error(path):
    rows = rows_of(path)
    with open(path, "r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(0, 0))  # the clock of a file system may be coarse
    with pytest.raises(ObjectRewritten, match=str(path)):
        mapped_file(rows).read(rows, np.empty_like(rows))


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.replace(f"{path}.new", path)])
def test_mapping_stays_when_the_file_is_gone(path, change):
    path.with_suffix(".new").write_bytes(bytes(CONTENT.nbytes))
    rows, out = rows_of(path), np.zeros((len(CONTENT) // 8 - 1, 8), np.int64)
    change(path)
    assert not mapped_file(rows).read(rows, out)
    assert not out.any() and np.array_equal(rows.reshape(-1), CONTENT[8:])
