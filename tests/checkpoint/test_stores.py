"""On real stores: the trial that a store must pass, faults on the way, and that a restore reads by
ranges."""

import contextlib

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.checkpoint.storage_probe import probe
from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from elastic_dp.storage.obstore_backend import ObstoreBackend
from tests.checkpoint.states import big_tree, checkpoint, same
from tests.checkpoint.states import memory_store as memory_run
from tests.storage.conftest import bucket  # noqa: F401
from tests.storage.proxy import FaultProxy
from tests.storage.servers import s3_options

WRITE = ObstoreBackend.write


@pytest.fixture(params=["file", "memory", "s3"])
def store(request, tmp_path):
    if request.param == "file":
        return Store(f"file://{tmp_path}/run")
    if request.param == "memory":
        return memory_run()
    endpoint, name = request.getfixturevalue("bucket")
    return Store(f"s3://{name}/run", s3_options(endpoint))


def test_everywhere_the_same(store):
    probe(store, "a1")
    probe(store, "a2")
    catalog = Catalog(store)
    assert catalog.names() == []
    catalog.claim(1, None)
    tree = big_tree(3 << 20)
    for step in (1, 2):
        checkpoint(catalog, step, tree, workers=2)
    assert [name.step for name in catalog.names()] == [1, 2]
    assert same(load_newest(catalog, on_damage=pytest.fail)[1], tree)
    assert not [entry for entry in store.find(f"{catalog.folder}/") if "trial" in entry.path]


def test_checkpoint_at_the_root_of_a_bucket_is_read_back(bucket):  # noqa: F811
    endpoint, name = bucket
    store = Store(f"s3://{name}", s3_options(endpoint))
    probe(store, "a1")
    checkpoint(Catalog(store), 1, {"x": 1})
    assert load_newest(Catalog(store), on_damage=pytest.fail)[1] == {"x": 1}


def overwriting(self, path, content, create_only):
    """Write as some stores do: the condition is accepted, and ignored."""
    WRITE(self, path, content, False)


def refusing_and_overwriting(self, path, content, create_only):
    with contextlib.suppress(FileNotFoundError):
        self.stat(path)
        WRITE(self, path, content, False)
        raise FileExistsError(path)
    WRITE(self, path, content, False)


@pytest.mark.parametrize(
    ("write", "words"),
    [(overwriting, "overwrites an object"), (refusing_and_overwriting, "but overwrote it")],
)
def test_a_store_that_overwrites_is_found_out(monkeypatch, write, words):
    monkeypatch.setattr(ObstoreBackend, "write", write)
    store = memory_run()
    with pytest.raises(StorageError, match=words):
        probe(store, "a1")
    assert store.find(f"{store.path}/checkpoints/") == []


def test_a_store_that_cannot_create_only_is_refused():
    with pytest.raises(StorageError, match="cannot create an object only if there is none"):
        probe(Store("http://127.0.0.1:1/run"), "a1")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        probe(Store(str(tmp_path / "file" / "run")), "a1")


def test_checkpoints_through_a_faulty_store_are_complete(bucket):  # noqa: F811
    """Requests that fail, are cut, or are reset after the server did what was asked: nothing of it
    shows."""
    endpoint, name = bucket
    tree = big_tree(6 << 20)
    with FaultProxy(
        endpoint, {"error": 0.05, "cut": 0.1, "reset": 0.1}, seed=3, retry_after_s=0
    ) as proxy:
        catalog = Catalog(Store(f"s3://{name}/run", s3_options(proxy.url)))
        catalog.claim(1, None)
        for step in (1, 2, 3):
            checkpoint(catalog, step, tree, workers=2, saved_at=float(step))
        assert [name.step for name in catalog.names()] == [1, 2, 3]
        assert same(load_newest(catalog, on_damage=pytest.fail)[1], tree)
        assert sum(proxy.faults.values()) >= 3
