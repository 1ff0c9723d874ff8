"""The application that serves the report of a run, and the server that runs it until Ctrl-C.

The page asks for the report every second, with the version that it has. All clients see the same
report. Requests that steer the run are methods of `Run`, which checks their values.

- A request must name this server as this machine does: 127.0.0.1 or `localhost`. A page of another
  site that lets its own name point here (DNS rebinding) names that site.
- All that tells of a run, or changes one, needs the token, as a header that no page of another site
  can set (`Authorization: Bearer`): other users of this machine reach its ports, too.
- A request that changes a run must not come from another origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_dp.errors import ClusterError, ElasticError, SpecError
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.storage import StorageURL
from elastic_dp.storage.redact import redact
from elastic_dp.wording import counted

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from elastic_dp.cluster.run_handle import Run

SHORTEST_TOKEN = 16
_NAMES = ("127.0.0.1", "localhost")
_METHODS = ("GET", "HEAD", "POST")  # of which only POST changes anything
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
_MOST_CONNECTIONS = 256
_MOST_BYTES = 16 * 1024  # of a request's body
_LOCAL_S, _REMOTE_S = 0.5, 2.0  # between two looks at a folder
_FIELDS = {  # of each verb
    "scale": '{"size": number}',
    "drain": '{"worker": text}',
    "checkpoint": "{}",
    "stop": "{}",
}
_ASSETS = {"page.js": "text/javascript", "live.js": "text/javascript", "page.css": "text/css"}


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

    Raises SpecError if packages are missing, the token is short, or the port is taken.
    """
    server = web_server(run, token)
    with listening_socket(port) as listening:
        ready(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def web_server(run: ServedRun, token: str) -> uvicorn.Server:
    """Return the server, which does not listen yet. Raises SpecError if packages are missing, or
    the token is short."""
    if len(token) < SHORTEST_TOKEN:
        raise SpecError(f"the token is too short, must have at least {SHORTEST_TOKEN} letters")
    try:
        import uvicorn

        app = served_app(run, token)
    except ModuleNotFoundError as missing:
        what = (missing.name or "").partition(".")[0]
        raise SpecError(f"the page needs {what}: pip install 'elastic_dp[ui]'") from None
    plotly_script()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def served_app(run: ServedRun, token: str) -> Starlette:
    """Return the application."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    find_live = run.find_live

    def json_response(value: Any, status: int = 200) -> Response:
        """As ASCII: a text of a run may hold half a character."""
        return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")

    async def check(request: Request, call_next: Callable[[Request], Any]) -> Response:
        """Before everything else. No error leaves it, and every answer gets the headers."""
        if (refusal := _refusal(request, token)) is not None:
            response = json_response({"error": refusal[1]}, refusal[0])
        else:
            try:
                response = await call_next(request)
            except Exception:  # a bug of ours: told here, and not to whoever asked
                run.print_error()
                failure = "this server has failed; its terminal says why"
                response = json_response({"error": failure}, 500)
        if response.status_code == 401:
            response.headers["www-authenticate"] = "Bearer"
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def page(request: Request) -> Response:
        scripts = ("plotly.js", "page.js", "live.js")
        text = fill_page(
            title=run.name,
            words=(),
            policy="",
            style='<link rel="stylesheet" href="/assets/page.css">',
            settings={"mode": "live", "control": find_live is not None},
            report=None,
            scripts="".join(f'<script src="/assets/{name}"></script>\n' for name in scripts),
        )
        return HTMLResponse(text)

    async def asset_file(request: Request) -> Response:
        name = request.path_params["file"]
        if name == "plotly.js":
            text = await asyncio.to_thread(plotly_script)
            cached = {"cache-control": "private, max-age=86400"}
            return Response(text, media_type="text/javascript", headers=cached)
        if name not in _ASSETS:
            raise HTTPException(404, "no such file")
        return Response(asset(name), media_type=_ASSETS[name])

    async def report(request: Request) -> Response:
        text, version = await asyncio.to_thread(run.newest)
        headers = {"etag": version}
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304, headers=headers)
        return Response(text, media_type="application/json", headers=headers)

    async def steer(request: Request) -> Response:
        """Ask the live run for something. `check` has seen the token."""
        verb = request.path_params["verb"]
        if verb not in _FIELDS:
            raise HTTPException(404, f"no verb {verb[:40]!r}; there are: {', '.join(_FIELDS)}")
        if find_live is None:
            raise HTTPException(403, "this server only shows the run; --control lets it steer")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "the body must be application/json")
        content = b""
        try:
            async for chunk in request.stream():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise HTTPException(413, f"the body has more than {_MOST_BYTES} bytes")
            body = json.loads(content)
        except (ClientDisconnect, ValueError, RecursionError):
            raise HTTPException(400, "the body is not JSON") from None

        def do() -> str:
            try:
                return act(find_live(), verb, body)
            except ElasticError:
                raise
            except Exception as error:  # whatever Ray raises
                run.print_error()
                what = f"the run's controller does not answer: {type(error).__name__}"
                raise HTTPException(503, what) from error

        return json_response({"done": await asyncio.to_thread(do)}, 202)

    async def failed(request: Request, error: Exception) -> Response:
        wrong, over = isinstance(error, SpecError), isinstance(error, ClusterError)
        status = 422 if wrong else 409 if over else 503
        return json_response({"error": run.clean(str(error))}, status)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return json_response({"error": error.detail}, error.status_code)

    return Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/assets/{file}", asset_file, methods=["GET"]),
            Route("/api/report", report, methods=["GET"]),
            Route("/api/{verb}", steer, methods=["POST"]),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
        exception_handlers={HTTPException: refused, ElasticError: failed},
    )


def _refusal(request: Request, token: str) -> tuple[int, str] | None:
    headers = request.headers
    host = headers.get("host", "")
    if host.partition(":")[0].lower() not in _NAMES:
        return 421, f"this server is known as {' or '.join(_NAMES)}"
    if request.method not in _METHODS:
        return 405, "this server knows no such method"
    writes = request.method == "POST"
    if writes or request.scope["path"].startswith("/api/"):
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
        if not same or scheme.lower() != "bearer":
            return 401, "the token is missing or wrong; it is in the address that was printed"
    origin = headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if writes and (foreign or headers.get("sec-fetch-site", "none") == "cross-site"):
        return 403, "a request from another site"
    return None


def listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on this machine. Raises SpecError, which names the option."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen()  # who comes before the server is up waits
    except OSError as error:
        listening.close()
        raise SpecError(
            f"--port is {port}: {error}. Choose another one, or 0 for any that is free"
        ) from None
    return listening
