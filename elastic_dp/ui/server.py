"""The server of the report of a run, until Ctrl-C.

The page asks for the report every second, with the version that it has. All clients see the same
report. Requests that steer the run are methods of `Run`, which checks their values.

- A request must name this server as this machine does: 127.0.0.1 or `localhost`. A page of another
  site that lets its own name point here (DNS rebinding) names that site.
- All that tells of a run, or changes one, needs the token, as a header that no page of another site
  can set (`Authorization: Bearer`): other users of this machine reach its ports, too.
- A request that changes a run must not come from another origin.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Protocol

from elastic_dp.errors import ClusterError, ElasticError, SpecError
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.storage import StorageURL
from elastic_dp.storage.redact import redact
from elastic_dp.wording import counted

SHORTEST_TOKEN = 16
_NAMES = ("127.0.0.1", "localhost")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_IDLE_S = 30.0  # of a connection
_MOST_BYTES = 16 * 1024  # of a request's body
_LOCAL_S, _REMOTE_S = 0.5, 2.0  # between two looks at a folder
_FIELDS = {  # of each verb
    "scale": '{"size": number}',
    "drain": '{"worker": text}',
    "checkpoint": "{}",
    "stop": "{}",
}
_ASSETS = {"page.js": "text/javascript", "live.js": "text/javascript", "page.css": "text/css"}


class ControlledRun(Protocol):
    """The methods of `Run` that the page calls. They return at once."""

    def scale(self, size: int | None = None) -> None: ...
    def drain(self, worker: str) -> None: ...
    def checkpoint(self) -> None: ...
    def stop(self, reason: str = ...) -> None: ...


class ServedRun:
    """The run. `find_live` returns it if it is live, or raises ClusterError; None: nobody steers.
    Any thread may call a method."""

    def __init__(
        self, name: str, url: StorageURL, find_live: Callable[[], ControlledRun] | None = None
    ) -> None:
        self.name, self.find_live = name, find_live
        self._url, self._lock = url, threading.Lock()
        self._folder = RunFolder(name, url)
        self._usual_s = _LOCAL_S if self._folder.is_local else _REMOTE_S
        self._json, self._version, self._due = "", 0, -float("inf")

    def newest(self) -> tuple[str, str]:
        """Return the report of at most a moment ago as JSON in ASCII, and its version. Raises
        StorageError."""
        with self._lock:
            began = time.monotonic()
            if began >= self._due:
                before, report = self._json, self._folder.report(time.time())
                self._json = json.dumps(report.to_json(), allow_nan=False)
                self._version += self._json != before
                # Building takes at most a third of the time.
                self._due = began + max(self._usual_s, 3 * (time.monotonic() - began))
            return self._json, str(self._version)

    def clean(self, text: str) -> str:
        """Return a text without credentials."""
        return redact(text, self._url.options)

    def print_error(self) -> None:
        """Print the exception that is being handled to standard error, without credentials."""
        print(self.clean(traceback.format_exc()), file=sys.stderr, flush=True)


def act(run: ControlledRun, verb: str, body: Any) -> str:
    """Ask a run for something. Return what happens next. Raises SpecError for other fields."""
    match verb, body:
        case "scale", {"size": int() as size, **rest} if not rest:
            run.scale(size)
            return f"{counted(size, 'worker')} asked for"
        case "drain", {"worker": str() as worker, **rest} if not rest:
            run.drain(worker)
            return f"{worker} leaves once it is replaced"
        case "checkpoint", {**rest} if not rest:
            run.checkpoint()
            return "a checkpoint of one of the next steps will be made"
        case "stop", {**rest} if not rest:
            run.stop("asked on the page")
            return "the run ends after one of its next steps, with a checkpoint"
    raise SpecError(f"the body of {verb} must be {_FIELDS[verb]}")


def serve(run: ServedRun, token: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve on this machine until the process is told to end. `ready` gets the address.

    Raises SpecError if plotly is missing, the token is short, or the port is taken.
    """
    with ReportServer(run, token, port) as server:
        ready(f"http://127.0.0.1:{server.server_address[1]}/")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


class ReportServer(ThreadingTCPServer):
    """A thread for each request. It listens when it is made."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, run: ServedRun, token: str, port: int) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise SpecError(f"the token is too short, must have at least {SHORTEST_TOKEN} letters")
        plotly_script()
        self.run, self.token = run, token
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise SpecError(
                f"--port is {port}: {error}. Choose another one, or 0 for any that is free"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of the server."""
        if not isinstance(sys.exception(), OSError):
            self.run.print_error()


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


_Answer = tuple[int, str, str, Mapping[str, str]]  # status, kind, content, headers


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._serve(self._read)

    def do_POST(self) -> None:
        self._serve(self._steer)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""

    def _serve(self, answer: Callable[[str], _Answer]) -> None:
        """No error leaves it, and every answer gets the headers."""
        more: Mapping[str, str] = {}
        try:
            path = self.path.partition("?")[0]
            self._check(path)
            status, kind, content, more = answer(path)
        except Exception as error:
            status, text = self._failure(error)
            kind, content = "application/json", json.dumps({"error": text})
        if status == 401:
            more = {"www-authenticate": "Bearer"}
        self.send_response_only(status)
        body = content.encode()
        facts = {"content-type": f"{kind}; charset=utf-8", "content-length": str(len(body))}
        for name, value in {**_HEADERS, **facts, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _failure(self, error: Exception) -> tuple[int, str]:
        run = self.server.run
        if isinstance(error, _Refused):
            return error.status, str(error)
        if isinstance(error, ElasticError):
            wrong, over = isinstance(error, SpecError), isinstance(error, ClusterError)
            return 422 if wrong else 409 if over else 503, run.clean(str(error))
        run.print_error()  # a bug of ours: told there, and not to whoever asked
        return 500, "this server has failed; its terminal says why"

    def _check(self, path: str) -> None:
        headers, writes = self.headers, self.command == "POST"
        host = headers.get("host", "")
        if host.partition(":")[0].lower() not in _NAMES:
            raise _Refused(421, f"this server is known as {' or '.join(_NAMES)}")
        if writes or path.startswith("/api/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            token = self.server.token.encode()
            same = hmac.compare_digest(given.strip().encode(errors="replace"), token)
            if not same or scheme.lower() != "bearer":
                text = "the token is missing or wrong; it is in the address that was printed"
                raise _Refused(401, text)
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if writes and (foreign or headers.get("sec-fetch-site", "none") == "cross-site"):
            raise _Refused(403, "a request from another site")

    def _read(self, path: str) -> _Answer:
        run, name = self.server.run, path.removeprefix("/assets/")
        if path == "/":
            scripts = ("plotly.js", "page.js", "live.js")
            page = fill_page(
                title=run.name,
                words=(),
                policy="",
                style='<link rel="stylesheet" href="/assets/page.css">',
                settings={"mode": "live", "control": run.find_live is not None},
                report=None,
                scripts="".join(f'<script src="/assets/{name}"></script>\n' for name in scripts),
            )
            return 200, "text/html", page, {}
        if path == "/assets/plotly.js":
            cached = {"cache-control": "private, max-age=86400"}
            return 200, "text/javascript", plotly_script(), cached
        if path.startswith("/assets/") and name in _ASSETS:
            return 200, _ASSETS[name], asset(name), {}
        if path != "/api/report":
            raise _Refused(404, "there is nothing of this name")
        text, version = run.newest()
        if self.headers.get("if-none-match") == version:
            return 304, "application/json", "", {"etag": version}
        return 200, "application/json", text, {"etag": version}

    def _steer(self, path: str) -> _Answer:
        """Ask the live run for something. `_check` has seen the token."""
        run, verb = self.server.run, path.removeprefix("/api/")
        if verb not in _FIELDS:
            raise _Refused(404, f"no verb {verb[:40]!r}; there are: {', '.join(_FIELDS)}")
        if run.find_live is None:
            raise _Refused(403, "this server only shows the run; --control lets it steer")
        if self.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise _Refused(415, "the body must be application/json")
        length = self.headers.get("content-length", "")
        content = self.rfile.read(min(int(length), 8 * _MOST_BYTES) if length.isdecimal() else 0)
        if len(content) > _MOST_BYTES:
            raise _Refused(413, f"the body has more than {_MOST_BYTES} bytes")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise _Refused(400, "the body is not JSON") from None
        try:
            done = act(run.find_live(), verb, body)
        except ElasticError:
            raise
        except Exception as error:  # whatever Ray raises
            run.print_error()
            what = f"the run's controller does not answer: {type(error).__name__}"
            raise _Refused(503, what) from error
        return 202, "application/json", json.dumps({"done": done}), {}
