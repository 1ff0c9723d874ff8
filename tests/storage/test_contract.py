"""What every store must do, whatever is behind its URL; one that only reads, what reads."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Entry, ObjectMissing, ObjectRewritten
from tests.storage.conftest import KINDS

CONTENT = bytes(range(256)) * 40


HTTP = ["http", "http-presigned"]
LISTS = [kind for kind in KINDS if kind not in HTTP]
every_store_that_lists = pytest.mark.parametrize("place", LISTS, indirect=True)
# fake-gcs-server 1.54 has no XML uploads, which obstore sends
every_store_that_writes = pytest.mark.parametrize(
    "place", [kind for kind in LISTS if kind != "gs"], indirect=True
)


def names(store, entries):
    root = store.path.rstrip("/") + "/"
    assert all(entry.path.startswith(root) for entry in entries)
    return [entry.path.removeprefix(root) for entry in entries]


@every_store_that_lists
def test_a_folder_is_listed_with_sizes_and_versions(place):
    for number, name in enumerate(["b.parquet", "a.parquet", "sub/c.parquet", "sub/d/e.txt"]):
        place.plant(name, b"x" * number)
    store = place.open()
    found = store.find(store.path)
    assert names(store, found) == ["a.parquet", "b.parquet", "sub/c.parquet", "sub/d/e.txt"]
    assert [entry.size for entry in found] == [1, 0, 2, 3]
    assert all(entry.version for entry in found)
    assert store.counts.requests == 1  # no request per file
    assert store.find(store.path.rstrip("/")) == store.find(store.path.rstrip("/") + "/") == found


@every_store_that_lists
def test_look_into_a_folder_gives_its_files_and_folders_or_all_files_below(place):
    for name in ("b.parquet", "a.parquet/c.txt", "sub/deep/d.txt", "subway"):
        place.plant(name, b"x")
    store = place.open()
    root = store.path.rstrip("/")
    here = store.look(root, deep=False)
    assert names(store, here.entries) == ["b.parquet", "subway"]
    assert here.folders == [f"{root}/a.parquet", f"{root}/sub"]
    below = store.look(f"{root}/", deep=True)
    assert below.entries == store.find(f"{root}/") and not below.folders
    assert not here.unreadable and not below.unreadable
    for deep in (False, True):
        nothing = store.look(f"{root}/su", deep=deep)
        assert not nothing.entries and not nothing.folders
        assert [e.path for e in store.look(f"{root}/sub/deep", deep=deep).entries] == [
            f"{root}/sub/deep/d.txt"
        ]


@every_store_that_lists
def test_look_up_finds_one_file_whatever_is_in_its_name(place):
    place.plant("a[1].parquet", CONTENT)
    store = place.open()
    path = f"{store.path.rstrip('/')}/a[1].parquet"
    entry = store.look_up(path)
    assert entry is not None and (entry.path, entry.size) == (path, len(CONTENT))
    assert bytes(store.read_all(path, entry.version)) == CONTENT
    assert store.look_up(f"{path}.gone") is None
    assert store.look_up(store.path.rstrip("/")) is None


@every_store_that_lists
def test_a_folder_whose_name_another_begins_with_is_not_mixed_up(place):
    place.plant("a/1", b"1")
    place.plant("ab/2", b"2")
    store = place.open("a")
    assert names(store, store.find(store.path)) == ["1"]


def test_find_of_a_file_gives_that_file(place):
    place.plant("one.parquet", CONTENT)
    store = place.open("one.parquet")
    (entry,) = store.find(store.path)
    assert (entry.path, entry.size) == (store.path, len(CONTENT))
    assert bytes(store.read_all(entry.path, entry.version)) == CONTENT


@every_store_that_lists
def test_find_of_a_missing_path_gives_no_entries(place):
    store = place.open("nowhere")
    assert store.find(store.path) == []
    assert store.find(store.path + "/*.parquet") == []


def test_ranges_are_exact(place):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    for start, end in [(0, 1), (0, len(CONTENT)), (17, 4000), (len(CONTENT) - 1, len(CONTENT))]:
        content = store.read(store.path, start, end)
        assert memoryview(content).nbytes == end - start
        assert bytes(content) == CONTENT[start:end]
    assert store.read(store.path, 5, 5) == b""
    assert bytes(store.read_all(store.path)) == CONTENT


@pytest.mark.parametrize("start", [len(CONTENT) - 10, len(CONTENT), len(CONTENT) + 10])
def test_read_past_the_end_is_an_error(place, start):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    with pytest.raises(ObjectRewritten, match="shard"):
        store.read(store.path, start, len(CONTENT) + 20)
    assert store.counts.retries == 0


def test_an_empty_object_is_read(place):
    place.plant("empty", b"")
    store = place.open("empty")
    assert bytes(store.read_all(store.path)) == b""


def test_a_missing_object_is_said_at_once(place):
    place.plant("shard", CONTENT)
    store = place.open("other")
    for read in (
        lambda: store.read(store.path, 0, 5),
        lambda: store.read_all(store.path),
        lambda: store.read(store.path, 0, 5, "some-version"),
    ):
        with pytest.raises(ObjectMissing, match="other"):
            read()
    assert store.counts.retries == 0


def test_a_rewritten_object_is_not_read_as_the_old_one(place):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    (before,) = store.find(store.path)
    assert bytes(store.read(store.path, 3, 9, before.version)) == CONTENT[3:9]
    place.plant("shard", CONTENT[::-1])
    with pytest.raises(ObjectRewritten, match="version"):
        store.read(store.path, 3, 9, before.version)
    assert store.counts.retries > 0  # it might have been a stale cache
    (after,) = store.find(store.path)
    assert after.version != before.version
    assert bytes(store.read(store.path, 3, 9, after.version)) == CONTENT[::-1][3:9]


@every_store_that_writes
def test_write_is_read_back(place):
    store = place.open()
    path = store.path.rstrip("/") + "/deep/er/part-0"
    store.write(path, CONTENT)
    store.write(path, memoryview(CONTENT)[1:])
    assert bytes(store.read_all(path)) == CONTENT[1:]
    store.write(path, b"")
    assert [(e.path, e.size) for e in store.find(store.path)] == [(path, 0)]


@every_store_that_writes
def test_create_only_refuses_the_second(place):
    store = place.open()
    path = store.path.rstrip("/") + "/seal"
    store.write(path, b"first", create_only=True)
    with pytest.raises(FileExistsError):
        store.write(path, b"second", create_only=True)
    assert bytes(store.read_all(path)) == b"first"
    assert names(store, store.find(store.path)) == ["seal"]  # nothing is left aside


@every_store_that_writes
def test_create_only_by_many_writers_has_one_winner(place):
    store = place.open()
    path = store.path.rstrip("/") + "/seal"

    def create(number):
        try:
            store.write(path, f"creator {number}".encode(), create_only=True)
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(create, range(8)) if number is not None]
    assert len(winners) == 1
    assert bytes(store.read_all(path)) == f"creator {winners[0]}".encode()


@every_store_that_lists
def test_delete_removes_a_file(place):
    place.plant("old", b"x")
    store = place.open()
    path = store.path.rstrip("/") + "/old"
    store.delete(path)
    store.delete(path)
    assert store.find(store.path) == []


@pytest.mark.parametrize("place", HTTP, indirect=True)
def test_http_says_that_it_cannot_list_or_create(place):
    store = place.open()
    for path in (store.path, store.path + "*.parquet", store.path + "folder/"):
        with pytest.raises(StorageError, match="no listing"):
            store.find(path)
    with pytest.raises(StorageError, match="only if there is none"):
        store.write(store.path + "seal", b"x", create_only=True)


def test_names_with_odd_characters(place):
    name = "a b+c%20ü=#1,.bin"
    place.plant(name, CONTENT)
    if place.lists:
        store = place.open()
        (entry,) = store.find(store.path)
        assert names(store, [entry]) == [name]
    else:
        store = place.open("a%20b+c%2520%C3%BC=%231,.bin")
        (entry,) = store.find(store.path)
    assert bytes(store.read(entry.path, 1, 5, entry.version)) == CONTENT[1:5]


def test_counts_add_up_requests_and_bytes(place):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    for start in range(7):
        store.read(store.path, start, start + 100)
    counts = store.counts
    assert (counts.requests, counts.retries, counts.bytes_read) == (7, 0, 700)


def test_a_pickled_store_reads_on(place):
    place.plant("shard", CONTENT)
    store = place.open("shard", timeout_s=7.0)
    again = pickle.loads(pickle.dumps(store))
    assert bytes(again.read_all(again.path)) == CONTENT
    assert (again.path, again.url, again._timeout_s) == (store.path, store.url, 7.0)
    entry = Entry("p", 1, "v")
    assert pickle.loads(pickle.dumps(entry)) == entry


def test_32_threads_share_one_store(place):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    chance = random.Random(0)
    spans = [sorted(chance.sample(range(len(CONTENT)), 2)) for _ in range(160)]

    def read(span):
        return bytes(store.read(store.path, *span)) == CONTENT[slice(*span)]

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(read, spans))
    assert store.counts.requests == len(spans)
    assert store.counts.bytes_read == sum(end - start for start, end in spans)


def test_local_path_is_for_local_files(place):
    place.plant("shard", CONTENT)
    store = place.open("shard")
    local = store.local_path(store.path)
    if place.url.startswith("file:"):
        assert Path(local).read_bytes() == CONTENT
    else:
        assert local is None
