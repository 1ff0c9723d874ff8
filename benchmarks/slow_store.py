"""A small S3-like server over a folder, in a process of its own, with the shape of a far store.

    with serving(folder, latency_s=0.02, bytes_per_s=90e6) as url: ...

It answers listings, HEAD and ranged GET of one bucket, unsigned or signed alike. Each answer comes
`latency_s` after its request; a connection then sends at most `bytes_per_s` (None: as fast as it
can). Bodies go by sendfile, so that the server takes little of the cores that it shares with what
is measured.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
_PIECE = 256 << 10  # sent at once where there is a limit
_DATE = "Sat, 21 Nov 2026 00:00:00 GMT"


@contextlib.contextmanager
def serving(folder: Path, *, latency_s: float, bytes_per_s: float | None) -> Iterator[str]:
    """The endpoint's URL."""
    command = [sys.executable, "-m", "benchmarks.slow_store", str(folder), str(latency_s)]
    command.append(str(bytes_per_s or 0))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: Path
    latency_s: float
    bytes_per_s: float

    def do_HEAD(self) -> None:
        time.sleep(self.latency_s)
        size = os.path.getsize(self._path())
        self._begin(200, size, {"ETag": f'"{size}"', "Last-Modified": _DATE})

    def do_GET(self) -> None:
        until = time.perf_counter() + self.latency_s
        parts = urlsplit(self.path)
        if parts.path.strip("/") == BUCKET:
            self._list(parse_qs(parts.query).get("prefix", [""])[0])
            return
        with open(self._path(), "rb") as file:
            size = os.path.getsize(file.fileno())
            start, end = self._range(size)
            time.sleep(max(0.0, until - time.perf_counter()))
            headers = {"Content-Range": f"bytes {start}-{end - 1}/{size}", "ETag": f'"{size}"'}
            self._begin(206, end - start, {**headers, "Last-Modified": _DATE})
            self._send(file.fileno(), start, end)

    def _list(self, prefix: str) -> None:
        time.sleep(self.latency_s)
        found = [p for p in sorted(self.folder.rglob("*")) if p.is_file()]
        keys = [(str(p.relative_to(self.folder)), p.stat().st_size) for p in found]
        contents = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{size}&quot;</ETag><Size>{size}</Size></Contents>"
            for key, size in keys
            if key.startswith(prefix)
        )
        body = (
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{prefix}</Prefix>"
            f"<KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        ).encode()
        self._begin(200, len(body), {"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _path(self) -> Path:
        return self.folder / unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _range(self, size: int) -> tuple[int, int]:
        start, _, last = self.headers.get("Range", f"bytes=0-{size - 1}")[6:].partition("-")
        if not start:
            return size - int(last), size
        return int(start), min(int(last or size - 1) + 1, size)

    def _begin(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, file: int, start: int, end: int) -> None:
        self.wfile.flush()
        begun_at, at = time.perf_counter(), start
        piece = _PIECE if self.bytes_per_s else end - start
        while at < end:
            at += os.sendfile(self.connection.fileno(), file, at, min(piece, end - at))
            if self.bytes_per_s:
                due = begun_at + (at - start) / self.bytes_per_s
                time.sleep(max(0.0, due - time.perf_counter()))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


def main(folder: str, latency_s: str, bytes_per_s: str) -> None:
    Handler.folder, Handler.latency_s = Path(folder), float(latency_s)
    Handler.bytes_per_s = float(bytes_per_s)
    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:4])
