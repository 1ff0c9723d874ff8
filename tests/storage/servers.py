"""Real servers for the tests: moto's S3 in a process of its own, and files over HTTP with
ranges."""

import contextlib
import http.server
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote

KEY, SECRET = "AKIAEXAMPLE", "canary-secret-of-the-tests"
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
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


def azurite() -> str | None:
    """Microsoft's emulator of Azure's blob storage, where `.ci/run` puts it, or on the path."""
    ours = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
    return str(ours) if ours.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite_server(folder: Path):
    """Yields the URL of its account."""
    process = subprocess.Popen(
        [
            *(azurite(), "--blobPort", "0", "--inMemoryPersistence"),
            *("--disableTelemetry", "--skipApiVersionCheck"),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = ""
        while not (found := re.search(r"listens on http://[\d.]+:(\d+)", said)):
            line = process.stdout.readline()
            assert line, said
            said += line
        yield f"http://127.0.0.1:{found[1]}/{AZURE_ACCOUNT}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def azure_options(endpoint: str) -> dict:
    return {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY, "endpoint": endpoint}


def azure_connection_string(endpoint: str) -> str:
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};"
        f"BlobEndpoint={endpoint};"
    )


def s3_options(endpoint: str) -> dict:
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
    }


@contextlib.contextmanager
def http_server(folder: Path):
    """Serves the folder's files with ranges, ETags and Last-Modified. Yields the URL."""

    class Handler(_Files):
        root = folder
        wbufsize = (
            1 << 16
        )  # head and body in one packet: else each answer waits 40 ms for an acknowledgement

    yield from _serving(Handler)


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

    def do_GET(self):
        file = self.root / unquote(self.path.partition("?")[0]).lstrip("/")
        if not file.is_file():
            self._answer(404, b"", {})
            return
        content = file.read_bytes()
        changed = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(file.stat().st_mtime))
        headers = {
            "ETag": f'"{file.stat().st_mtime_ns:x}"',
            "Last-Modified": changed,
            "Accept-Ranges": "bytes",
        }
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

    do_HEAD = do_GET

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
def answering_server(status: int, body: bytes, headers: dict | None = None):
    """Gives every request the same answer. Yields the URL."""

    class Handler(_Files):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(status, body, headers or {})

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    yield from _serving(Handler)
