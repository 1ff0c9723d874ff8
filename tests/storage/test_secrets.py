"""A canary is planted wherever a credential may stand; then everything goes wrong, and nobody says
it."""

import logging
import sys
import traceback
import warnings

import pytest

from elastic_dp.errors import StorageError
from elastic_dp.storage import Store, redact_url
from elastic_dp.storage.redact import redact
from tests.storage.proxy import FaultProxy
from tests.storage.servers import answering_server

CANARY = "canary/+9f8e7d6c5b4a"
TOLD = "canary%2F%2B9f8e7d6c5b4a"  # as in URLs
# What S3 sends back when a signature is wrong: the request that it was computed over.
ECHO = (
    '<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code>'
    "<Message>The request signature we calculated does not match the signature you "
    "provided.</Message>"
    f"<AWSAccessKeyId>{CANARY}</AWSAccessKeyId><CanonicalRequest>GET\n"
    f"x-amz-security-token:{CANARY}</CanonicalRequest></Error>"
).encode()
PLAIN_ECHO = f"you sent Authorization: Bearer {CANARY}, {TOLD} and {CANARY}".encode()


def options(url="", **more):
    secret = {"access_key_id": CANARY, "secret_access_key": CANARY, "token": CANARY}
    return {**secret, "endpoint": url, "region": "us-east-1", **more}


def everything_said(error):
    """Return all texts of an exception and of what hangs on it."""
    said, seen = [], error
    while seen is not None:
        said += [str(seen), repr(seen), repr(seen.args)]
        seen = seen.__cause__ or seen.__context__
    return said + traceback.format_exception(error)


def calls(store):
    path = store.path.rstrip("/") + "/shard"
    yield lambda: store.find(store.path)
    yield lambda: store.find(path + "*")
    yield lambda: store.read(path, 0, 5)
    yield lambda: store.read(path, 0, 5, "version")
    yield lambda: store.read_all(path)
    yield lambda: store.write(path, b"x")
    yield lambda: store.write(path, b"x", create_only=True)
    yield lambda: store.delete(path)


def assert_silent(said):
    for text in said:
        assert CANARY not in text, text
        assert TOLD not in text, text
        assert "9f8e7d6c5b4a" not in text, text


def provoke(url, opts, caplog):
    """Everything that is said when a store is opened and used."""
    said = []
    with (
        warnings.catch_warnings(record=True) as warned,
        caplog.at_level(logging.DEBUG, "elastic_dp"),
    ):
        warnings.simplefilter("always")
        try:
            store = Store(url, opts, timeout_s=0.05)
        except StorageError as error:
            return everything_said(error)
        said += [repr(store), str(store), store.url, store.path, repr(store.counts)]
        for call in calls(store):
            try:
                call()
            except (StorageError, FileExistsError) as error:
                said += everything_said(error)
    said += [str(w.message) for w in warned]
    said += [r.getMessage() for r in caplog.records if r.name.startswith("elastic_dp")]
    return said


IN_CI = ((403, "xml"), (404, "plain"), (500, "plain"), (503, "xml"))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(
            *(status, body),
            id=f"{name}-{status}",
            marks=() if (status, name) in IN_CI else pytest.mark.slow,
        )
        for name, body in (("xml", ECHO), ("plain", PLAIN_ECHO))
        for status in (400, 401, 403, 404, 409, 500, 503)
    ],
)
def test_stores_that_echo_the_request(status, body, caplog):
    with answering_server(status, body) as url:
        host = url.removeprefix("http://")
        said = provoke("s3://bucket/folder", options(url), caplog)
        if status != 404:
            assert any(str(status) in text for text in said)
        if status == 403 and body is ECHO:
            assert any("The request signature we calculated" in text for text in said)
        said += provoke(
            f"{url}/folder", {"default_headers": {"Authorization": f"Bearer {CANARY}"}}, caplog
        )
        said += provoke(f"http://user:{TOLD}@{host}/folder", {}, caplog)
        said += provoke(f"{url}/folder?X-Amz-Signature={TOLD}", {}, caplog)
        assert_silent(said)


def test_stores_that_are_away(caplog):
    with FaultProxy("http://127.0.0.1:1") as proxy:
        proxy.go_away()  # and nobody else can take the port
        url, host = proxy.url, proxy.url.removeprefix("http://")
        said = provoke("s3://bucket/folder", options(url), caplog)
        said += provoke(f"http://user:{TOLD}@{host}/folder", {}, caplog)
        said += provoke(f"{url}/folder?sig={TOLD}", {}, caplog)
    assert len(said) > 30
    assert_silent(said)


@pytest.mark.parametrize(
    ("url", "opts"),
    [
        ("s3://bucket", options(endpoint="not a url")),
        ("s3://bucket", {"key": CANARY, "secret": object(), "client_kwargs": {"verify": CANARY}}),
        ("s3://bucket", {"access_key_id": object(), "secret_access_key": CANARY}),
        ("s3://bucket", {"no_such_option": CANARY}),
        ("gs://bucket", {"service_account_key": CANARY}),
        ("http://host/x", {"headers": {"Authorization": CANARY}}),
        ("gs://bucket", {"token": {"private_key": CANARY, "client_email": "a@b"}}),
        ("gs://bucket", {"token": CANARY}),
        ("az://container", {"account_name": "a", "account_key": CANARY}),
        ("az://container", {"connection_string": f"AccountKey={CANARY}"}),
        (f"nosuch://user:{TOLD}@host/path", {}),
        (f"ftp://user:{TOLD}@127.0.0.1:1/path", {}),
        (f"simplecache::http://127.0.0.1:1/x?sig={TOLD}", {}),
        (f"simplecache::http://u:{TOLD}@127.0.0.1:1/x", {}),
        ("memory://x", {"no_such_option": CANARY}),
        ("file:///no/such/folder", {"password": CANARY}),
    ],
    ids=lambda value: value.split("/")[0] if isinstance(value, str) else None,
)
def test_options_that_are_wrong(url, opts, caplog):
    said = provoke(url, opts, caplog)
    assert said
    assert_silent(said)


def test_the_message_of_a_wait_is_clean():
    said = []
    with answering_server(503, PLAIN_ECHO) as url:

        def on_wait(message):
            said.append(message)
            store.close()

        store = Store("s3://bucket/x", options(url), timeout_s=0.0, on_wait=on_wait)
        with pytest.raises(StorageError):
            store.read("x", 0, 5)
    assert "503" in said[0]
    assert_silent(said)


def test_a_url_for_people():
    assert redact_url("https://u:p@host/a/b.parquet?sig=1&x=2") == "https://host/a/b.parquet"
    assert redact_url("s3://bucket/a?.parquet") == "s3://bucket/a?.parquet"
    assert redact_url("/local/a?/*.parquet") == "/local/a?/*.parquet"
    assert redact_url("simplecache::https://h/x?sig=1") == "simplecache::https://h/x"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:Se/cret@host:9/x.parquet", "http://host:9/x.parquet"),
        ("https://:a/b/c@host/x", "https://host/x"),
        ("ftp://u:12345678/x@host/a@b", "ftp://host/a@b"),
        *(
            (url, url)
            for url in (
                *("http://minio:9000/rows@v1/x.parquet", "s3://bucket/a:b@c/x", "/a:b/c@d"),
                *("s3://arn:aws:s3:eu-west-1:1:accesspoint/p/x@1", "http://[::1]:80/a@b"),
                *("http://[2001:db8::1]/a@b", "zip://a.parquet::s3://bucket/b@c", "abfs://c@a/b@c"),
            )
        ),
    ],
)
def test_password_with_a_slash_is_not_printed_and_paths_with_an_at_sign_stay(url, shown):
    assert redact_url(url) == shown
    assert redact_url(f"cannot open '{url}': no") == f"cannot open '{shown}': no"


def test_redact_keeps_options_that_are_no_secrets():
    opts = {
        **{"access_key": "user-1", "inner": {"endpoint_url": "http://store:9000"}},
        **{"anon": "false", "profile": "production"},
    }
    assert (
        redact("http://store:9000/false/production denied user-1", opts)
        == "http://store:9000/false/production denied ***"
    )


def test_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", CANARY)
    assert_silent([redact(f"token {CANARY}", {})])


def test_words_of_the_environment_are_not_hidden(monkeypatch):
    """Variables whose names hold TOKEN, and values that are words."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-but-long")
    monkeypatch.setenv("MAX_TOKENS", "40960000")
    monkeypatch.setenv("WANDB_API_KEY", "false")
    monkeypatch.setenv("MY_PASSWORD", "positives")
    text = "s3://b/false_positives/false-but-long/40960000/false"
    assert redact(text, {"timeout": "false_po"}) == text
    assert redact("of positives, \\npositives, x%3Dpositives", {}) == "of ***, \\n***, x%3D***"


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        *(("s3://bucket/x", "s3"), ("gs://bucket/x", "gs"), ("az://container/x", "az")),
        *(("abfss://container@account.dfs.core.windows.net/x", "az"), ("https://host/x", "http")),
    ],
)
def test_a_url_without_its_package_names_the_extra(url, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StorageError, match=rf"pip install 'elastic_dp\[{extra}\]'"):
        Store(url)


def test_the_key_within_a_connection_string_is_hidden_alone_too():
    text = (
        "DefaultEndpointsProtocol=https;AccountName=acme;AccountKey=c2VjcmV0LWtleQ==;"
        "EndpointSuffix=core.windows.net"
    )
    said = redact("refused: c2VjcmV0LWtleQ== of acme", {"connection_string": text})
    assert said == "refused: *** of acme"


def test_an_unknown_scheme_is_said():
    with pytest.raises(StorageError, match="nosuch"):
        Store("nosuch://bucket/x")
