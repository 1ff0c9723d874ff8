"""Which backend serves a URL, and what it is told of the options."""

import base64
import os

import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from elastic_dp.storage.obstore_backend import ObstoreBackend
from tests.storage.servers import http_server, recording_server


@pytest.fixture(autouse=True)
def no_files_of_botocore(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("s3://bucket/a/b.parquet", "a/b.parquet"),
        ("s3a://bucket/a/*.parquet", "a/*.parquet"),
        ("s3://bucket", ""),
        ("s3://bucket/a?/[b]#c.parquet", "a?/[b]#c.parquet"),
        ("http://host:1/a%20b/c.parquet", "a b/c.parquet"),
        ("/tmp/a/*.parquet", "/tmp/a/*.parquet"),
        ("file:///tmp/a", "/tmp/a"),
        ("memory://a/b", "a/b"),
    ],
)
def test_store_path_is_that_of_its_url(url, path):
    assert Store(url).path == path


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", {"access_key_id": "k", "secret_access_key": "s", "token": "t"}),
        ("s3a://bucket", {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "region": None}),
        ("s3://bucket", {"aws_region": "r", "AWS_ALLOW_HTTP": "true", "endpoint_url": "http://x"}),
        ("s3://bucket", {"skip_signature": True, "default_headers": {"A": "b"}}),
        ("gs://bucket", {"skip_signature": "true"}),
        ("gcs://bucket", {"google_skip_signature": "true"}),
        ("az://box", {"azure_storage_account_name": "a", "account_key": "azg="}),
        ("abfss://box@account.dfs.core.windows.net/x", {"sas_token": "a=b"}),
        ("http://host/x", {"default_headers": {"A": "b"}, "user_agent": "u"}),
        ("http://host/x?sig=1", {}),
    ],
)
def test_options_are_those_of_obstore(url, options):
    assert type(Store(url, options)._backend) is ObstoreBackend


@pytest.mark.parametrize("named", [{"AWS_PROFILE": "other"}, {}], ids=["profile", "file"])
def test_credentials_in_files_of_botocore_are_sent(monkeypatch, tmp_path, named):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=default\naws_secret_access_key=s\n"
        "[other]\naws_access_key_id=other\naws_secret_access_key=s\n"
    )
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    with recording_server([200], {"ETag": '"a"'}) as (url, seen):
        store = Store("s3://bucket", {"endpoint": url, "region": "r"})
        store.write("a", b"x", create_only=True)
    [(_, _, headers)] = seen
    assert f"Credential={named.get('AWS_PROFILE', 'default')}/" in headers["authorization"]


def test_user_and_password_of_an_http_url_are_sent_and_not_said(tmp_path):
    with recording_server([200], {"ETag": '"a"'}) as (url, seen):
        store = Store(url.replace("://", "://user:pass%2Fword@") + "/a?token=t")
        store.write(store.path, b"x")
    [(_, path, headers)] = seen
    assert path == "/a?token=t" and "pass" not in store.url
    assert headers["authorization"] == f"Basic {base64.b64encode(b'user:pass/word').decode()}"


def test_a_chained_url_is_read(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"0123456789")
    chained = Store(f"simplecache::file://{tmp_path}/")
    (entry,) = chained.find(chained.path)
    assert bytes(chained.read(entry.path, 2, 5, entry.version)) == b"234"


def test_a_folder_of_another_file_system_is_read_and_written(tmp_path):
    store = Store(f"dir::file://{tmp_path}", timeout_s=1.0)
    path = f"{store.path}/deep/a.bin"
    store.write(path, b"0123456789")
    assert (tmp_path / "deep/a.bin").read_bytes() == b"0123456789"
    (entry,) = store.find(store.path)
    assert bytes(store.read(entry.path, 2, 5, entry.version)) == b"234"
    store.delete(path)
    store.delete(path)
    assert store.find(store.path) == []


@pytest.mark.parametrize(
    "endpoint", ["", "minio:9000", "localhost:9000", "http//x", "ftp://x", "http:// bad", 7]
)
def test_an_endpoint_that_is_no_url(endpoint):
    """Otherwise obstore panics, in whatever thread reads first."""
    with pytest.raises(StorageError, match=r"the endpoint is .*as 'http://minio:9000'"):
        Store("s3://bucket/x", {"access_key_id": "k", "endpoint": endpoint})


def test_a_panic_is_an_error_of_the_store(monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*anything):
        raise PanicException("unwrap on None")

    store = Store("s3://bucket/x", {"access_key_id": "k", "secret_access_key": "s"})
    monkeypatch.setattr(store._backend, "read", panic)
    with pytest.raises(StorageError, match=r"panic.*unwrap on None"):
        store.read("a", 0, 1)


def test_an_endpoint_of_the_environment_is_looked_at_too_and_no_secret_is_said(monkeypatch):
    with pytest.raises(StorageError) as caught:
        Store("s3://bucket/x", {"access_key_id": "k", "endpoint_url": "id:canary@minio:9000"})
    assert "'minio:9000'" in str(caught.value) and "canary" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    keys = {"access_key_id": "k", "secret_access_key": "s"}
    with pytest.raises(StorageError, match="the endpoint is 'minio:9000'"):
        Store("s3://bucket/x", {"access_key_id": "k", "secret_access_key": "s"})
    Store("s3://bucket/x", {**keys, "endpoint_url": "http://minio:9000"})


@pytest.mark.parametrize(
    ("url", "wrong", "right"),
    [
        ("s3://bucket/x", "key", "write access_key_id"),
        ("s3://bucket/x", "secret", "write secret_access_key"),
        ("s3://bucket/x", "client_kwargs", "write endpoint and region"),
        ("s3://bucket/x", "anon", "write skip_signature"),
        ("s3://bucket/x", "profile", "leave it out"),
        ("gs://bucket/x", "token", "write service_account"),
        ("az://box/x", "connection_string", "write account_name, account_key"),
        ("http://host/x", "headers", "write default_headers"),
        ("https://host/x", "key", "write .*default_headers"),
        *(
            (f"{scheme}://x/x", "no_such", "a name that obstore has")
            for scheme in ("s3", "gs", "az")
        ),
    ],
)
def test_an_option_that_obstore_does_not_have_is_refused_with_its_name_there(url, wrong, right):
    with pytest.raises(StorageError, match=f"'{wrong}', which .* does not know; .*{right}") as said:
        Store(url, {wrong: "a-secret-value"})
    assert "a-secret-value" not in str(said.value)


@pytest.mark.parametrize("refused", [401, 403, 405, 501])
@pytest.mark.parametrize("gets", [True, False])
def test_http_server_that_refuses_head_is_asked_by_get_or_named_with_its_status(
    tmp_path, refused, gets
):
    (tmp_path / "shard").write_bytes(b"0123456789")
    refuses = {"HEAD": refused} if gets else {"HEAD": refused, "GET": refused}
    with http_server(tmp_path, refuses=refuses) as url:
        store = Store(f"{url}/shard")
        if gets:
            (entry,) = store.find(store.path)
            assert entry.size == 10
            assert bytes(store.read(store.path, 2, 5, entry.version)) == b"234"
        else:
            with pytest.raises(StorageError, match=rf"refuses HEAD.*{refused}.*GET.*{refused}"):
                store.find(store.path)


def test_only_404_is_a_missing_object(tmp_path):
    with http_server(tmp_path, refuses={"HEAD": 405}) as url:
        assert Store(f"{url}/gone").look_up("gone") is None
        with pytest.raises(StorageError, match="no file 'gone' there"):
            Store(f"{url}/gone").find("gone")


def test_local_name_that_is_not_utf8_is_listed_as_unreadable(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.parquet", "wb"):
        (tmp_path / "a.parquet").write_bytes(b"x")
    store = Store(str(tmp_path))
    found = store.look(store.path, deep=True)
    assert found.unreadable == {"names that are not UTF-8": [rf"{tmp_path}/caf\xe9.parquet"]}
    assert found.entries == store.find(f"{store.path}/")
    with pytest.raises(StorageError, match=r"caf\\xe9.parquet: the name is not UTF-8"):
        Store(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.parquet"))
