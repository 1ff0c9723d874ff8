"""Which backend serves a URL, and what it is told of the options."""

import inspect
import json
import os

import fsspec
import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store, open_file_system
from elastic_dp.storage.obstore_backend import _TRANSLATIONS, _az, _gs, _s3
from elastic_dp.storage.option_names import WORDS, fsspec_options, known_options
from tests.storage.servers import http_server, s3_options


@pytest.fixture(autouse=True)
def no_files_of_botocore(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)


def backend(url, options=None):
    return type(Store(url, options)._backend).__name__


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
        ("memory://a/b", "/a/b"),
    ],
)
def test_store_path_is_that_of_its_url(url, path):
    assert Store(url).path == path


def test_the_words_of_s3fs_are_put_into_those_of_obstore():
    told = _TRANSLATIONS["s3"](
        "bucket", {**s3_options("http://e"), "token": "t", "use_listings_cache": 1}
    )
    assert told == {
        "access_key_id": "AKIAEXAMPLE",
        "secret_access_key": "canary-secret-of-the-tests",
        "session_token": "t",
        "endpoint": "http://e",
        "region": "us-east-1",
    }
    assert _TRANSLATIONS["s3"]("bucket", {"anon": True}) == {"skip_signature": True}


def test_the_words_of_gcsfs_and_adlfs():
    gs, az = _TRANSLATIONS["gs"], _TRANSLATIONS["abfss"]
    assert gs("b", {"token": "/key.json", "project": "p"}) == {"service_account": "/key.json"}
    assert gs("b", {"token": "anon"}) == {"skip_signature": True}
    assert gs("b", {"token": {"k": 1}}) == {"service_account_key": '{"k": 1}'}
    assert gs("b", {"token": "browser"}) is None
    assert az("c@acc.dfs.core.windows.net", {"account_key": "k"}) == {
        "account_name": "acc",
        "account_key": "k",
    }
    assert az("c", {"connection_string": "x"}) is None


def test_option_that_obstore_lacks_goes_through_fsspec():
    assert backend("s3://bucket", {"key": "k", "secret": "s"}) == "ObstoreBackend"
    assert backend("s3://bucket", {"profile": "p"}) == "FsspecBackend"
    assert backend("s3://bucket", {"client_kwargs": {"verify": False}}) == "FsspecBackend"
    assert backend("http://host/x") == "ObstoreBackend"
    assert backend("http://host/x?sig=1") == "FsspecBackend"
    assert backend("http://host/x", {"headers": {"A": "b"}}) == "FsspecBackend"


def test_credentials_in_botocore_s_file_go_through_s3fs(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[default]")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert backend("s3://bucket") == "FsspecBackend"
    assert backend("s3://bucket", {"key": "k", "secret": "s"}) == "ObstoreBackend"
    assert backend("s3://bucket", {"anon": True}) == "ObstoreBackend"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert backend("s3://bucket") == "ObstoreBackend"


def test_a_chained_url_is_read():
    store = Store("memory://chained/folder")
    store.write("/chained/folder/a.parquet", b"0123456789")
    chained = Store("simplecache::memory://chained/folder/*.parquet")
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
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint}}
    with pytest.raises(StorageError, match=r"endpoint_url is .*as 'http://minio:9000'"):
        Store("s3://bucket/x", options)


def test_a_panic_is_an_error_of_the_store(monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*anything):
        raise PanicException("unwrap on None")

    store = Store("s3://bucket/x", {"key": "k", "secret": "s"})
    monkeypatch.setattr(store._backend, "read", panic)
    with pytest.raises(StorageError, match=r"panic.*unwrap on None"):
        store.read("a", 0, 1)


def test_an_endpoint_of_the_environment_is_looked_at_too_and_no_secret_is_said(monkeypatch):
    with pytest.raises(StorageError) as caught:
        Store("s3://bucket/x", {"key": "k", "secret": "s", "endpoint_url": "id:canary@minio:9000"})
    assert "'minio:9000'" in str(caught.value) and "canary" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(StorageError, match="endpoint_url is 'minio:9000'"):
        Store("s3://bucket/x", {"key": "k", "secret": "s"})
    Store("s3://bucket/x", {"key": "k", "secret": "s", "endpoint_url": "http://minio:9000"})


@pytest.mark.parametrize(
    "names",
    [
        {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://x", "region_name": "r"},
        {"access_key": "k", "secret_key": "s", "session_token": "t", "endpoint": "http://x"},
        {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_region": "r"},
        {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ALLOW_HTTP": "true"},
    ],
)
def test_options_of_s3_go_by_the_names_that_other_tools_give_them(names):
    config = _s3("bucket", known_options("s3", names))
    assert config["access_key_id"] == "k" and config["secret_access_key"] == "s"
    told = fsspec_options("s3", names)
    assert told["key"] == "k" and told["secret"] == "s" and "AWS_ALLOW_HTTP" not in told


def test_a_connection_string_of_azure_names_account_key_and_endpoint():
    text = (
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k==;"
        "EndpointSuffix=core.windows.net"
    )
    assert _az("box", {"connection_string": text}) == {
        **{"account_name": "a", "account_key": "k=="},
        "endpoint": "https://a.blob.core.windows.net",
    }
    own = "AccountName=a;AccountKey=k==;BlobEndpoint=http://127.0.0.1:10000/a/"
    assert _az("box", {"connection_string": own})["endpoint"] == "http://127.0.0.1:10000/a"


@pytest.mark.parametrize(
    ("url", "wrong", "right"),
    [
        ("s3://bucket/x", "secert", "secret"),
        ("s3://bucket/x", "endpoint_ulr", "endpoint_url"),
        ("gs://bucket/x", "tokne", "token"),
        ("az://box/x", "conection_string", "connection_string"),
        ("s3://bucket/x", "anonymous", "anon"),
        ("gs://bucket/x", "credentials", "token"),
        ("az://box/x", "key", "account_key"),
        ("abfs://box@account.dfs.core.windows.net/x", "acount_key", "account_key"),
    ],
)
@pytest.mark.parametrize("opened", [Store, open_file_system])
def test_an_option_of_an_unknown_name_is_refused_with_the_name_that_is_meant(
    opened, url, wrong, right
):
    with pytest.raises(StorageError, match=f"'{wrong}'.*did you mean '{right}'") as told:
        opened(url, {wrong: "a-secret-value"})
    assert "a-secret-value" not in str(told.value)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_option_of_the_fsspec_file_system_is_a_known_name(scheme):
    system = fsspec.get_filesystem_class(scheme)
    named = [
        name
        for name, parameter in inspect.signature(system.__init__).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    assert len(named) > 5
    assert set(known_options(scheme, dict.fromkeys(named[1:], ""))) == set(named[1:])


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_name_of_an_option_reaches_the_fsspec_file_system_as_one_it_has(scheme):
    """What it does not have it ignores, and asks elsewhere, or without credentials."""
    known = inspect.signature(fsspec.get_filesystem_class(scheme).__init__).parameters
    values = {"endpoint": "https://host", "service_account_key": "{}", "skip_signature": True}
    for name, word in WORDS[scheme].items():
        told = fsspec_options(scheme, {name: values.get(word, "x")})
        assert told and told.keys() <= known.keys(), name


def test_an_endpoint_of_azure_reaches_adlfs_with_the_credentials_for_it():
    account = {"account_name": "a", "account_key": "k=="}
    own = {"endpoint": "http://127.0.0.1:10000/a/"}
    assert fsspec_options("az", {**account, **own}) == {
        "connection_string": "BlobEndpoint=http://127.0.0.1:10000/a;AccountName=a;AccountKey=k=="
    }
    assert fsspec_options("az", {"account_name": "a", "sas_token": "?s=1", **own}) == {
        "connection_string": "BlobEndpoint=http://127.0.0.1:10000/a;AccountName=a;"
        "SharedAccessSignature=s=1"
    }
    assert fsspec_options("az", {**account, "account_url": "https://private.host"}) == {
        **account, "account_host": "private.host"
    }  # fmt: skip
    with pytest.raises(StorageError, match="account_key or sas_token"):
        fsspec_options("az", {"account_name": "a", "client_id": "c", **own})
    with pytest.raises(StorageError, match="as BlobEndpoint"):
        fsspec_options("az", {"connection_string": "AccountName=a;AccountKey=k==", **own})


def test_a_service_account_s_key_reaches_gcsfs_as_its_token():
    key = {"type": "service_account", "client_email": "a@b"}
    assert fsspec_options("gs", {"service_account_key": json.dumps(key)}) == {"token": key}
    for wrong in ("canary", "[1]"):
        with pytest.raises(StorageError, match="service_account_key is not") as told:
            fsspec_options("gs", {"service_account_key": wrong})
        assert "canary" not in str(told.value)


def test_options_go_to_the_fsspec_file_system_by_its_own_names():
    told = {"aws_access_key_id": "k", "secret_key": "s", "aws_region": "r", "profile": "p"}
    client = {"client_kwargs": {"verify": False}}
    assert fsspec_options("s3", {**told, **client}) == {
        **{"key": "k", "secret": "s", "profile": "p"},
        "client_kwargs": {"region_name": "r", "verify": False},
    }
    assert fsspec_options("gs", {"skip_signature": True}) == {"token": "anon"}
    assert fsspec_options("az", {"sas_key": "s", "account_name": "a"}) == {
        **{"sas_token": "s", "account_name": "a"}
    }


def test_options_of_gs_go_by_the_names_of_gcsfs_and_obstore():
    assert _gs("bucket", {"anon": True, "project": "p"}) == {"skip_signature": True}
    assert _gs("bucket", {"token": "anon"}) == {"skip_signature": True}
    assert _gs("bucket", {"google_service_account": "/a.json"}) == {"service_account": "/a.json"}
    assert fsspec_options("gs", {"GOOGLE_APPLICATION_CREDENTIALS": "/a.json"}) == {
        "token": "/a.json"
    }


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
