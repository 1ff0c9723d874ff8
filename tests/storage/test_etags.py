"""ETags as servers and proxies write them: weak, without quotes, of a compressed answer. And the
one request to Google Cloud Storage that fake-gcs-server lacks."""

import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from tests.storage.servers import (
    gcs_options,
    http_server,
    listing_server,
    recording_server,
    s3_options,
)

CONTENT = bytes(range(256)) * 8


@pytest.mark.parametrize(
    "weak", [{"GET"}, {"HEAD"}, {"GET", "HEAD"}], ids=lambda verbs: "-".join(sorted(verbs))
)
@pytest.mark.parametrize("suffix", ["", "?token=x"])
def test_http_tag_that_is_weak_in_some_answers_is_one_version(tmp_path, weak, suffix):
    (tmp_path / "shard").write_bytes(CONTENT)
    with http_server(tmp_path, weak=weak) as url:
        store = Store(f"{url}/shard{suffix}")
        (entry,) = store.find(store.path)
        assert bytes(store.read(store.path, 3, 9, entry.version)) == CONTENT[3:9]
        assert store.counts.retries == 0
        (tmp_path / "shard").write_bytes(CONTENT[::-1])
        (after,) = store.find(store.path)
        assert after.version != entry.version


@pytest.mark.parametrize("listed", ['"{}"', "{}", 'W/"{}"'])
@pytest.mark.parametrize("weak", [set(), {"GET", "HEAD"}], ids=["strong", "weak"])
def test_s3_tag_that_is_listed_otherwise_than_got_is_one_version(tmp_path, listed, weak):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/shard").write_bytes(CONTENT)
    with listing_server(tmp_path, "bucket", listed, weak=weak) as url:
        store = Store("s3://bucket/", s3_options(url))
        (entry,) = store.find("")
        assert store.look_up("shard") == entry
        assert bytes(store.read("shard", 3, 9, entry.version)) == CONTENT[3:9]
        assert store.counts.retries == 0


def test_server_that_compresses_what_may_be_compressed_is_read_by_ranges(tmp_path):
    """If a client accepts gzip, it sends the whole file; aiohttp accepts gzip by default."""
    (tmp_path / "shard").write_bytes(CONTENT)
    with http_server(tmp_path, gzips="where accepted") as url:
        for suffix in ("", "?token=x"):
            store = Store(f"{url}/shard{suffix}")
            (entry,) = store.find(store.path)
            assert bytes(store.read(store.path, 3, 9, entry.version)) == CONTENT[3:9]


def test_answer_that_was_compressed_unasked_is_refused_by_name(tmp_path):
    (tmp_path / "shard").write_bytes(CONTENT)
    with http_server(tmp_path, weak={"GET"}, gzips="always") as url:
        store = Store(f"{url}/shard")
        (entry,) = store.find(store.path)
        with pytest.raises(StorageError, match=r"shard came as gzip.*turn compression off"):
            store.read(store.path, 3, 9, entry.version)


def test_create_only_refuses_the_second_where_all_tags_are_weak(tmp_path):
    (tmp_path / "bucket").mkdir()
    with listing_server(tmp_path, "bucket", "{}", weak={"GET", "HEAD", "PUT"}) as url:
        store = Store("s3://bucket/", s3_options(url))
        store.write("seal", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.write("seal", b"second", create_only=True)
        assert bytes(store.read_all("seal")) == b"first"


def test_obstore_creates_on_google_only_where_there_is_no_generation():
    """fake-gcs-server has no XML uploads, so the answers here are those that Google documents."""
    with recording_server([200, 412], {"ETag": '"a"', "x-goog-generation": "1"}) as (url, seen):
        store = Store("gs://bucket/runs", gcs_options(url))
        store.write("runs/seal", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.write("runs/seal", b"second", create_only=True)
    assert [(method, path) for method, path, _ in seen] == [("PUT", "/bucket/runs%2Fseal")] * 2
    assert all(headers["x-goog-if-generation-match"] == "0" for _, _, headers in seen)
