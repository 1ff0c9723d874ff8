"""Serves the report of a run until Ctrl-C.

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
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from elastic_dp.errors import ClusterError, ElasticError, SpecError
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.storage import StorageURL
from elastic_dp.storage.redact import redact
from elastic_dp.wording import counted

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run

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
_MOST_BYTES = 16 * 1024  # of a request's body
_LOCAL_S, _REMOTE_S = 0.5, 2.0  # between two looks at a folder
_FIELDS = {"scale": '{"size": number}', "checkpoint": "{}", "stop": "{}"}  # of each verb
_SCRIPTS = ("plotly.js", "page.js", "live.js")
_JSON = "application/json"


class ServedRun:
    """The run. `find_live` returns it if it is live, or raises ClusterError; None: nobody steers.
    Any thread may call a method."""

    def __init__(
        self, name: str, url: StorageURL, find_live: Callable[[], Run] | None = None
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


def act(run: Run, verb: str, body: Any) -> str:
    """Ask a run for something. Return what happens next. Raises SpecError for other fields."""
    match verb, body:
        case "scale", {"size": int() as size, **rest} if not rest:
            run.scale(size)
            return f"{counted(size, 'worker')} asked for"
        case "checkpoint", {**rest} if not rest:
            run.checkpoint()
            return "a checkpoint of one of the next steps will be made"
        case "stop", {**rest} if not rest:
            run.stop("asked on the page")
            return "the run ends after one of its next steps, with a checkpoint"
    raise SpecError(f"the body of {verb} must be {_FIELDS[verb]}")


class PageServer(socketserver.ThreadingTCPServer):
    """Listens on this machine. Raises SpecError if the token is short, plotly is not installed, or
    the port is taken."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, run: ServedRun, token: str, port: int) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise SpecError(f"the token is too short, must have at least {SHORTEST_TOKEN} letters")
        plotly_script()
        self.shown, self.token = run, token.encode()
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except OSError as error:
            raise SpecError(
                f"--port is {port}: {error}. Choose another one, or 0 for any that is free"
            ) from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has gone; what is wrong here `_Request` has printed."""


class _Refused(Exception):
    """(status, reason)"""


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0  # seconds to wait for the client
    server_version, sys_version = "elastic_dp", ""

    def do_GET(self) -> None:
        self._respond(self._show)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        # All of it, within limits: a client that still sends may not see the answer.
        self._body = self.rfile.read(min(int(length), 4 * _MOST_BYTES)) if length.isdigit() else b""
        self._respond(self._steer)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What `BaseHTTPRequestHandler` refuses. 501: it is none of the methods above."""
        self._answer(405 if code == 501 else code, _error(message or "a wrong request"))

    def _respond(self, act: Callable[[str], None]) -> None:
        """Call `act` with the path. No error leaves it."""
        run = self.server.shown
        try:
            self._check()
            act(self.path.partition("?")[0])
        except _Refused as refusal:
            self._answer(refusal.args[0], _error(refusal.args[1]))
        except ElasticError as error:
            wrong, over = isinstance(error, SpecError), isinstance(error, ClusterError)
            self._answer(422 if wrong else 409 if over else 503, _error(run.clean(str(error))))
        except (ConnectionError, TimeoutError):
            raise
        except Exception:  # a bug of ours: told here, and not to whoever asked
            run.print_error()
            self._answer(500, _error("this server has failed; its terminal says why"))

    def _check(self) -> None:
        host, origin = self.headers.get("host", ""), self.headers.get("origin")
        if host.partition(":")[0].lower() not in _NAMES:
            raise _Refused(421, f"this server is known as {' or '.join(_NAMES)}")
        writes = self.command == "POST"
        if writes or self.path.startswith("/api/"):
            scheme, _, given = self.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(errors="replace"), self.server.token)
            if not same or scheme.lower() != "bearer":
                what = "the token is missing or wrong; it is in the address that was printed"
                raise _Refused(401, what)
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if writes and (foreign or self.headers.get("sec-fetch-site", "none") == "cross-site"):
            raise _Refused(403, "a request from another site")

    def _show(self, path: str) -> None:
        run, file = self.server.shown, path.removeprefix("/assets/")
        if path == "/":
            scripts = (f'<script src="/assets/{name}"></script>\n' for name in _SCRIPTS)
            page = fill_page(
                title=run.name,
                words=(),
                policy="",
                style='<link rel="stylesheet" href="/assets/page.css">',
                settings={"mode": "live", "control": run.find_live is not None},
                report=None,
                scripts="".join(scripts),
            )
            self._answer(200, page, "text/html; charset=utf-8")
        elif path == "/api/report":
            text, version = run.newest()
            is_known = self.headers.get("if-none-match") == version
            self._answer(304 if is_known else 200, "" if is_known else text, etag=version)
        elif path == "/assets/plotly.js":
            cached = {"cache-control": "private, max-age=86400"}
            self._answer(200, plotly_script(), "text/javascript; charset=utf-8", **cached)
        elif path == f"/assets/{file}" and file in (*_SCRIPTS, "page.css"):
            kind = "css" if file == "page.css" else "javascript"
            self._answer(200, asset(file), f"text/{kind}; charset=utf-8")
        else:
            raise _Refused(404, "no such page")

    def _steer(self, path: str) -> None:
        """Ask the live run for something. `_check` has seen the token."""
        run, verb = self.server.shown, path.removeprefix("/api/")
        if verb not in _FIELDS:
            raise _Refused(404, f"no verb {verb[:40]!r}; there are: {', '.join(_FIELDS)}")
        if run.find_live is None:
            raise _Refused(403, "this server only shows the run; --control lets it steer")
        if self.headers.get("content-type", "").partition(";")[0] != _JSON:
            raise _Refused(415, f"the body must be {_JSON}")
        if len(self._body) > _MOST_BYTES:
            raise _Refused(413, f"the body has more than {_MOST_BYTES} bytes")
        try:
            body = json.loads(self._body)
        except (ValueError, RecursionError):
            raise _Refused(400, "the body is not JSON, or has no length") from None
        try:
            done = act(run.find_live(), verb, body)
        except ElasticError:
            raise
        except Exception as error:  # whatever Ray raises
            run.print_error()
            what = f"the run's controller does not answer: {type(error).__name__}"
            raise _Refused(503, what) from error
        self._answer(202, json.dumps({"done": done}))

    def _answer(self, status: int, text: str, kind: str = _JSON, **headers: str) -> None:
        content = text.encode(errors="replace")
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        self.send_response(status)
        own = {"content-type": kind, "content-length": str(len(content))}
        for name, value in (_HEADERS | own | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _error(text: str) -> str:
    """As ASCII: a text of a run may hold half a character."""
    return json.dumps({"error": text})


def serve(run: ServedRun, token: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until the process is told to end. `ready` gets the address. Raises what `PageServer`
    raises."""
    with PageServer(run, token, port) as server:
        ready(server.url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
