"""Files that go to the disk from where they lie in memory: the same bytes, whatever the file system
thinks of it."""

import errno
import os

import numpy as np
import pytest

from elastic_dp.errors import FileDamaged, StorageError
from elastic_dp.storage import Store
from elastic_dp.storage.local_backend import PAGE_BYTES, LocalBackend


def content(offset):
    """3 MiB and 5 bytes that begin so far behind a page."""
    room = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5 + 2 * PAGE_BYTES, np.uint8)
    first = -room.ctypes.data % PAGE_BYTES + offset
    return memoryview(room)[first : first + (3 << 20) + 5]


@pytest.mark.parametrize("offset", [0, 1, 512])
@pytest.mark.parametrize("taken", [None, 0, PAGE_BYTES, 100], ids=str)
def test_all_bytes_are_there(tmp_path, monkeypatch, offset, taken):
    """`taken`: of the first direct write, then it is refused; None: whatever this file system
    does."""
    write, direct = os.write, []

    def writing(descriptor, rest):
        direct.append(len(rest))
        if taken is not None and (len(direct) > 1 or not taken):
            raise OSError(errno.EINVAL, "not here")
        return write(descriptor, rest if taken is None else rest[:taken])

    monkeypatch.setattr("elastic_dp.storage.local_backend.os.write", writing)
    store, wanted = Store(str(tmp_path)), content(offset)
    store.write(f"{store.path}/one", wanted)
    assert bytes(store.read_all(f"{store.path}/one")) == wanted
    assert bool(direct) == (offset == 0), "only what is aligned goes this way"


def test_a_link_to_itself_is_not_listed_and_is_named_where_it_is_read(tmp_path):
    (tmp_path / "one").write_text("1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "into").symlink_to(tmp_path)
    store = Store(str(tmp_path))
    assert [entry.path for entry in store.find(f"{store.path}/")] == [f"{store.path}/one"]
    assert store.find(f"{store.path}/loop/") == []
    with pytest.raises(FileDamaged, match=r"loop is damaged: it is a link to itself. Delete it"):
        store.read_all(f"{store.path}/loop")


def test_folder_or_pipe_in_place_of_a_file_is_named_without_waiting(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    store = Store(str(tmp_path))
    for name in ("folder", "pipe"):
        with pytest.raises(FileDamaged, match=f"{name} is damaged: it is not a file"):
            store.read_all(f"{store.path}/{name}")
    with pytest.raises(FileDamaged, match="folder is damaged: it is a folder where a file must be"):
        store.write(f"{store.path}/folder", b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileDamaged, match="file is damaged: it is not a folder"):
        store.write(f"{store.path}/file/x", b"", create_only=True)


def test_look_up_below_a_file_finds_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(str(tmp_path))
    assert store.look_up(f"{store.path}/file/x") is None


@pytest.mark.parametrize("create_only", [True, False])
def test_write_starts_again_if_its_temporary_file_is_swept_away(tmp_path, monkeypatch, create_only):
    """Another process deletes temporary files in this folder, as the retention of checkpoints
    does."""
    real, calls = getattr(os, name := "link" if create_only else "replace"), []

    def sweep_first(aside, path):
        calls.append(aside)
        if len(calls) == 1:
            os.unlink(aside)
        real(aside, path)

    monkeypatch.setattr(os, name, sweep_first)
    path = str(tmp_path / "checkpoints" / "claim")
    LocalBackend(str(tmp_path)).write(path, b"content", create_only)
    assert len(calls) == 2
    assert os.listdir(tmp_path / "checkpoints") == ["claim"]
    assert (tmp_path / "checkpoints" / "claim").read_bytes() == b"content"


def test_write_whose_temporary_file_always_vanishes_says_so(tmp_path, monkeypatch):
    def vanish(aside, path):
        os.unlink(aside)
        raise FileNotFoundError(aside)

    monkeypatch.setattr(os, "link", vanish)
    with pytest.raises(StorageError, match="deleted 5 times"):
        LocalBackend(str(tmp_path)).write(str(tmp_path / "x"), b"content", True)
    assert os.listdir(tmp_path) == []
