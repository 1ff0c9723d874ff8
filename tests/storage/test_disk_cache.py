"""The cache on the disk: what it returns is right, and its limit holds, whoever is killed or
stopped."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from elastic_dp.storage import Store, disk_cache
from elastic_dp.storage.disk_cache import DiskCache

PIECE = 1000  # bytes of a range
STORED = PIECE + disk_cache.CHECKSUM_BYTES  # those of its file


def content_of(key, nbytes=PIECE):
    return random.Random(key).randbytes(nbytes)


class Far:
    """A store that counts what is read from it, through a cache of ten ranges."""

    def __init__(self, folder, limit=10 * STORED, dataset="a"):
        self.said = []
        self.fetched = []
        self.cache = DiskCache(str(folder), limit, dataset, self.said.append)

    def read(self, *keys):
        for key in keys:
            content = self.cache.read(key, PIECE, lambda key=key: self.fetch(key))
            assert bytes(content) == content_of(key)

    def fetch(self, key):
        self.fetched.append(key)
        return content_of(key)


def files(folder):
    """The ranges that are cached or being written."""
    own = {"cache.lock", "open"}
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in own]


def size(folder):
    return sum(path.stat().st_size for path in files(folder))


KEYS = [f"key {number}" for number in range(25)]


def test_range_is_read_from_the_store_once(tmp_path):
    far = Far(tmp_path / "new" / "cache")
    far.read("x", "x", "y", "x")
    again = Far(tmp_path / "new" / "cache")  # another process, or the same after a restart
    again.read("x", "y")
    assert (far.fetched, again.fetched) == (["x", "y"], [])
    assert (far.cache.bytes_read, again.cache.bytes_read) == (2 * PIECE, 2 * PIECE)


def test_misses_are_told_for_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_RECENT_S", 1e6)  # whatever the machine does meanwhile
    far = Far(tmp_path)
    assert not far.cache.misses
    far.read("x")
    assert far.cache.misses
    monkeypatch.setattr(disk_cache, "_RECENT_S", 0.0)
    far.read("x")
    assert not far.cache.misses


def test_limit_holds_and_what_is_kept_stays_for_every_epoch(tmp_path):
    far = Far(tmp_path)
    for epoch in range(4):
        far.fetched.clear()
        for key in random.Random(epoch).sample(KEYS, len(KEYS)):
            far.read(key)
            assert size(tmp_path) <= 10 * STORED
        assert len(far.fetched) == (15 if epoch else 25)
    assert not far.said


def test_space_of_data_sets_that_nobody_has_open_is_used(tmp_path):
    first, second = Far(tmp_path, dataset="first"), Far(tmp_path, dataset="second")
    first.read(*KEYS[:4])
    second.read(*KEYS[:4])
    third = Far(tmp_path, dataset="third")
    third.read(*KEYS[:5])
    assert len(files(tmp_path)) == 10, "all are open, so nothing is deleted"
    first.cache.close()
    third.cache._full_until = 0.0
    third.read(*KEYS[:6])
    assert len(files(tmp_path)) == 10 and third.cache.bytes_read == 2 * PIECE
    second.read(*KEYS[:4])
    assert len(second.fetched) == 4
    Far(tmp_path, dataset="first").read(KEYS[0])


def test_files_of_others_in_the_folder_are_neither_deleted_nor_counted(tmp_path, monkeypatch):
    """A folder such as /mnt/nvme, which holds more than the cache."""
    names = ("thesis/text.txt", "0" * 32 + "/open", "x.ranges/text", "boot")
    theirs = [tmp_path / name for name in names]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 50 * PIECE)
    for boot in ("one", "two"):
        (tmp_path / "boot id").write_text(boot)
        monkeypatch.setattr(disk_cache, "_BOOT_ID", tmp_path / "boot id")
        far = Far(tmp_path, dataset=boot)
        far.read(*KEYS, *KEYS)  # it is full, and looks for what can be deleted
        assert far.cache.bytes_read == 10 * PIECE and not far.said
        far.cache.close()
        os.utime(far.cache._dataset, (1.0, 1.0))  # before this machine started
        assert [path.read_bytes() for path in theirs] == [b"x" * 50 * PIECE] * 4


def test_limit_that_was_lowered_holds_once_the_data_set_is_opened(tmp_path):
    first = Far(tmp_path)
    first.read(*KEYS)
    first.cache.close()
    other = Far(tmp_path, dataset="other")
    later = Far(tmp_path, limit=4 * STORED)
    later.read(KEYS[0])
    assert size(tmp_path) <= 4 * STORED
    later.read(*KEYS)
    assert size(tmp_path) == 4 * STORED and not later.said
    other.read(*KEYS)
    assert size(tmp_path) <= 10 * STORED


def test_range_of_no_bytes_is_read(tmp_path):
    cache = Far(tmp_path).cache
    assert [bytes(cache.read("x", 0, lambda: b"")) for _ in range(2)] == [b"", b""]


def test_range_larger_than_the_limit_is_read_from_the_store(tmp_path):
    far = Far(tmp_path, limit=STORED - 1)
    far.read("x", "x")
    assert far.fetched == ["x", "x"] and not files(tmp_path)


def test_error_of_the_store_is_raised_and_leaves_nothing(tmp_path):
    far = Far(tmp_path)

    def fail():
        raise OSError("the store")

    for _ in range(2):
        with pytest.raises(OSError, match="the store"):
            far.cache.read("x", PIECE, fail)
    assert not files(tmp_path) and not far.said
    far.read("x")


def test_file_of_another_length_is_not_used(tmp_path):
    far = Far(tmp_path)
    far.read("x")
    os.truncate(files(tmp_path)[0], STORED - 1)
    far.read("x", "x")
    assert far.fetched == ["x", "x"]


@pytest.mark.parametrize("nbytes", [PIECE, 2 * disk_cache._MAPPED_BYTES])
@pytest.mark.parametrize("at", [0, -1, -disk_cache.CHECKSUM_BYTES - 1])
def test_file_with_a_flipped_byte_is_not_used(at, nbytes, tmp_path):
    content, fetched = content_of("x", nbytes), []
    cache = DiskCache(str(tmp_path), 100 * nbytes, "a", print)

    def read():
        assert cache.read("x", nbytes, lambda: fetched.append("x") or content) == content

    read()
    with open(files(tmp_path)[0], "r+b") as file:
        file.seek(at, os.SEEK_SET if at == 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    read()
    read()
    assert fetched == ["x", "x"]


def test_files_of_an_earlier_boot_are_deleted_and_those_of_another_host_are_not(
    tmp_path, monkeypatch
):
    boot, folder = tmp_path / "boot id", tmp_path / "cache"
    earlier, other_host = Far(folder, dataset="earlier"), Far(folder, dataset="other host")
    for far in (earlier, other_host):
        far.read(*KEYS[:4])
        far.cache.close()  # hosts that share a folder may not see each other's locks
    os.utime(earlier.cache._dataset, (1.0, 1.0))
    boot.write_text("other")
    monkeypatch.setattr(disk_cache, "_BOOT_ID", boot)
    far = Far(folder, dataset="earlier")
    far.read(*KEYS[:4])
    assert len(far.fetched) == 4 and size(folder) == 8 * STORED
    assert not earlier.cache._dataset.exists()
    other_host.read(*KEYS[:4])
    assert len(other_host.fetched) == 4


@pytest.mark.parametrize("nbytes", [PIECE, 2 * disk_cache._MAPPED_BYTES])
def test_ranges_in_use_hold_no_descriptors(tmp_path, nbytes):
    cache = DiskCache(str(tmp_path), 100 * nbytes, "a", print)
    for _ in range(2):
        content = content_of("x", nbytes)
        held = [cache.read(key, nbytes, lambda c=content: c) for key in KEYS]
    del content
    opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert [path for path in opened if str(tmp_path) in path] == [str(cache._dataset / "open")]
    assert all(bytes(each) == content_of("x", nbytes) for each in held)
    assert cache.bytes_read == len(KEYS) * nbytes


def test_threads_that_need_the_same_range_keep_it_once(tmp_path):
    far, both = Far(tmp_path), threading.Barrier(8)

    def read():
        both.wait()
        far.read("x")

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert size(tmp_path) == (tmp_path / "cache.lock").stat().st_size == STORED and not far.said


def test_folder_that_cannot_be_used_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    far = Far(tmp_path / "file")
    far.read("x", "x", "y")
    assert far.fetched == ["x", "x", "y"]
    assert len(far.said) == 1 and "DataConfig.cache_dir" in far.said[0]
    assert str(tmp_path) in far.said[0] and "File exists" in far.said[0]


def test_full_disk_is_said_once_and_gives_back_what_was_taken(tmp_path, monkeypatch):
    far = Far(tmp_path)
    far.read("x")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_cache.os, "link", full)
    far.read("y", "y", "x")
    assert far.fetched == ["x", "y", "y"] and len(far.said) == 1
    assert "No space left" in far.said[0]
    assert len(files(tmp_path)) == 1 and (tmp_path / "cache.lock").stat().st_size == STORED


def test_folder_that_is_deleted_meanwhile_is_no_error(tmp_path):
    far = Far(tmp_path / "cache")
    far.read("x")
    os.rename(tmp_path / "cache", tmp_path / "elsewhere")
    far.read("x", "y")
    assert far.fetched == ["x", "x", "y"] and len(far.said) == 1


_OTHER = """
import random, signal, sys, time
from elastic_dp.storage.disk_cache import DiskCache

folder, limit, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
cache = DiskCache(folder, limit, "a", print)

def content_of(key):
    return random.Random(key).randbytes(1000)

chance, reads = random.Random(), 0
print("began", flush=True)
if what == "hang":
    with cache._locked():
        print("locked", flush=True)
        time.sleep(1000)
while True:
    key = f"key {chance.randrange(25)}"
    assert bytes(cache.read(key, 1000, lambda: content_of(key))) == content_of(key), key
    reads += 1
    if reads % 200 == 0:
        print("reads", flush=True)
"""


def other(folder, what):
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(folder), str(10 * STORED), what],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "began\n"
    return process


def kill(process):
    process.kill()
    process.communicate()


@contextmanager
def stopped(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    yield
    process.send_signal(signal.SIGCONT)


def test_process_that_is_stopped_with_the_lock_holds_nobody_up_for_long(tmp_path, monkeypatch):
    process = other(tmp_path, "hang")
    try:
        assert process.stdout.readline() == "locked\n"
        with stopped(process):
            monkeypatch.setattr(disk_cache, "_WAIT_S", 0.1)
            far = Far(tmp_path)
            far.read("x", "x")
            assert far.fetched == ["x", "x"] and "holds its lock" in far.said[0]
    finally:
        kill(process)
    Far(tmp_path).read("x")


def test_limit_holds_and_content_is_right_while_processes_are_killed(tmp_path, monkeypatch):
    """Wherever they are: reading, taking space, writing."""
    chance, processes = random.Random(0), [other(tmp_path, "read") for _ in range(2)]
    try:
        for _ in range(6):
            time.sleep(chance.uniform(0.0, 0.2))
            process = processes.pop(0)
            assert process.poll() is None, "it met other content"
            kill(process)
            with stopped(processes[0]):  # else files come and go while they are added up
                assert size(tmp_path) <= 10 * STORED
            processes.append(other(tmp_path, "read"))
        for process in processes:
            assert process.stdout.readline() == "reads\n"
    finally:
        for process in processes:
            kill(process)
    monkeypatch.setattr(disk_cache, "_WRITE_S", 0.0)
    far = Far(tmp_path)
    far.read(*KEYS, *KEYS)
    assert size(tmp_path) <= 10 * STORED and not far.said
    assert far.cache.bytes_read >= 2 * 9 * PIECE  # the space of those that were killed is used
    assert not list(tmp_path.rglob("*.tmp"))


def test_store_keeps_ranges_of_a_version_and_nothing_else(tmp_path):
    cache = DiskCache(str(tmp_path / "cache"), 1 << 20, "a", print)
    store = Store("memory://cached", cache=cache)
    path = f"{store.path}/file"
    store.write(path, b"0123456789")
    version = store.look_up(path).version
    for _ in range(2):
        assert bytes(store.read(path, 2, 5, version)) == b"234"
        assert bytes(store.read(path, 5, 8, version)) == b"567"
        assert bytes(store.read(path, 2, 5)) == b"234"
    assert store.counts.bytes_read == 3 + 3 + 2 * 3 and cache.bytes_read == 6


def test_files_of_the_machine_are_not_copied(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    cache = DiskCache(str(tmp_path / "cache"), 1 << 20, "a", print)
    store = Store(str(tmp_path), cache=cache)
    entry = store.look_up(f"{store.path}/file")
    assert bytes(store.read(entry.path, 2, 5, entry.version)) == b"234"
    assert not (tmp_path / "cache").exists()
