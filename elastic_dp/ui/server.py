"""The application, and the server that runs it until Ctrl-C.

A page asks for the report of its run every second, with the version that it has. Requests that
steer a run are methods of `Run`, which checks their values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from elastic_dp.errors import ClusterError, ElasticError, SpecError
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from elastic_dp.storage import StorageURL
from elastic_dp.ui.access import AccessCheck, AccessRules
from elastic_dp.ui.served_runs import ServedRun, ServedRuns
from elastic_dp.wording import counted

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_CONNECTIONS = 256
_MOST_BYTES = 16 * 1024  # of a request's body
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


class RunControls(Protocol):
    """Finds live runs."""

    def live(self, name: str, url: StorageURL) -> ControlledRun:
        """Return the live run of that name in that folder. Raises ClusterError."""


class RayControls:
    """The live runs of the Ray cluster that has the first one that is asked for."""

    def __init__(self, address: str | None) -> None:
        self._address, self._lock = address, threading.Lock()

    def live(self, name: str, url: StorageURL) -> ControlledRun:
        from elastic_dp.cluster.runs.attach import find_live

        with self._lock:
            return find_live(name, url, self._address)


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


def serve(
    runs: ServedRuns,
    rules: AccessRules,
    controls: RunControls | None,
    port: int,
    ready: Callable[[str], None],
) -> None:
    """Serve until the process is told to end. `ready` gets the address.

    Raises SpecError if packages are missing, or the address cannot be listened on.
    """
    server = web_server(runs, rules, controls)
    with listening_socket(rules.host, port) as listening:
        name = f"[{rules.host}]" if ":" in rules.host else rules.host
        ready(f"http://{name}:{listening.getsockname()[1]}/")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def web_server(
    runs: ServedRuns, rules: AccessRules, controls: RunControls | None
) -> uvicorn.Server:
    """Return the server, which does not listen yet. Raises SpecError if packages are missing."""
    try:
        import uvicorn

        app = served_app(runs, rules, controls)
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


def served_app(runs: ServedRuns, rules: AccessRules, controls: RunControls | None) -> Starlette:
    """Return the application. `controls` finds live runs; None: nobody steers."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import HTMLResponse, RedirectResponse, Response
    from starlette.routing import Route

    def json_response(value: Any, status: int = 200) -> Response:
        """As ASCII: a text of a run may hold half a character."""
        return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")

    def page(title: str, settings: dict[str, Any]) -> Response:
        scripts = ("plotly.js", "page.js", "live.js")
        text = fill_page(
            title=title,
            words=(),
            policy="",
            style='<link rel="stylesheet" href="/assets/page.css">',
            settings=settings | {"control": controls is not None},
            report=None,
            scripts="".join(f'<script src="/assets/{name}"></script>\n' for name in scripts),
        )
        return HTMLResponse(text)

    async def start_page(request: Request) -> Response:
        if runs.only is not None:
            return RedirectResponse(request.url_for("run_page", run=runs.only).path)
        return page("Runs", {"mode": "list"})

    async def run_page(request: Request) -> Response:
        name = request.path_params["run"]
        return page(name, {"mode": "live", "run": name, "several": runs.only is None})

    async def asset_file(request: Request) -> Response:
        name = request.path_params["file"]
        if name == "plotly.js":
            text = await asyncio.to_thread(plotly_script)
            cached = {"cache-control": "private, max-age=86400"}
            return Response(text, media_type="text/javascript", headers=cached)
        if name not in _ASSETS:
            raise HTTPException(404, "no such file")
        return Response(asset(name), media_type=_ASSETS[name])

    async def list_runs(request: Request) -> Response:
        rows, number = await asyncio.to_thread(runs.summaries)
        return json_response({"runs": rows, "number": number})

    async def find(request: Request) -> ServedRun:
        name = request.path_params["run"]
        run = await asyncio.to_thread(runs.find, name)
        if run is None:
            raise HTTPException(404, f"no run named {name[:80]!r} is here")
        return run

    async def report(request: Request) -> Response:
        run = await find(request)
        text, version = await asyncio.to_thread(run.newest)
        headers = {"etag": version}
        if request.headers.get("if-none-match") == version:
            return Response(status_code=304, headers=headers)
        return Response(text, media_type="application/json", headers=headers)

    async def steer(request: Request) -> Response:
        """Ask a live run for something. `AccessCheck` has seen the token."""
        verb = request.path_params["verb"]
        if verb not in _FIELDS:
            raise HTTPException(404, f"no verb {verb[:40]!r}; there are: {', '.join(_FIELDS)}")
        if controls is None:
            raise HTTPException(403, "this server only shows runs; --control lets it steer them")
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
        run = await find(request)

        def do() -> str:
            try:
                return act(controls.live(run.name, run.url), verb, body)
            except ElasticError:
                raise
            except Exception as error:  # whatever Ray raises
                runs.print_error()
                what = f"the run's controller does not answer: {type(error).__name__}"
                raise HTTPException(503, what) from error

        return json_response({"done": await asyncio.to_thread(do)}, 202)

    async def failed(request: Request, error: Exception) -> Response:
        wrong, over = isinstance(error, SpecError), isinstance(error, ClusterError)
        status = 422 if wrong else 409 if over else 503
        return json_response({"error": runs.clean(str(error))}, status)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return json_response({"error": error.detail}, error.status_code)

    return Starlette(
        routes=[
            Route("/", start_page, methods=["GET"]),
            Route("/runs/{run}", run_page, methods=["GET"], name="run_page"),
            Route("/assets/{file}", asset_file, methods=["GET"]),
            Route("/api/runs", list_runs, methods=["GET"]),
            Route("/api/runs/{run}", report, methods=["GET"]),
            Route("/api/runs/{run}/{verb}", steer, methods=["POST"]),
        ],
        middleware=[Middleware(AccessCheck, rules=rules, print_error=runs.print_error)],
        exception_handlers={HTTPException: refused, ElasticError: failed},
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises SpecError, which names the option."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
    except OSError as error:
        raise SpecError(f"--host is {host!r}: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # who comes before the server is up waits
    except OSError as error:
        listening.close()
        raise SpecError(
            f"--port is {port}: {error}. Choose another one, or 0 for any that is free"
        ) from None
    return listening
