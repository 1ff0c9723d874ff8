"""The application that `elastic-dp ui` serves: pages, reports, live changes, and requests to runs.

    /  /runs/RUN              pages; they hold nothing of a run
    /assets/FILE              their scripts and styles
    /api/runs[/RUN]           reports as JSON
    /api/runs/RUN/stream      a report and its changes as server-sent events
    /api/runs/RUN/VERB        POST: scale, drain, checkpoint, stop
    /api/openapi.json         the description of the API

Reading a folder and asking a controller block, so both are done in threads.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from elastic_dp.errors import ClusterError, ElasticError, SpecError
from elastic_dp.report.report_page import asset, fill_page, plotly_script
from elastic_dp.ui.access import AccessCheck, AccessRules
from elastic_dp.ui.api_description import api_description
from elastic_dp.ui.report_changes import changes
from elastic_dp.ui.run_control import VERBS, RunControls, fields_of
from elastic_dp.ui.served_runs import ServedRun, ServedRuns

_LOOK_S = 0.1  # between two looks for a new report, in each stream
_QUIET_S = 10.0  # a stream is not silent for longer, so that both sides notice the other's end
_MOST_STREAMS = 64
_MOST_BYTES = 16 * 1024  # of a request's body


def served_app(
    runs: ServedRuns,
    rules: AccessRules,
    controls: RunControls | None,
    stopping: Callable[[], bool],
) -> Starlette:
    """Return the application. `controls` finds live runs; None: nobody steers. `stopping`: streams
    are to end.
    """
    server = _Server(runs, rules, controls, stopping)
    read, post = ["GET"], ["POST"]
    return Starlette(
        routes=[
            Route("/", server.start_page, methods=read),
            Route("/runs/{run}", server.run_page, methods=read),
            Route("/assets/{file}", server.asset, methods=read),
            Route("/api/openapi.json", server.description, methods=read),
            Route("/api/runs", server.list_runs, methods=read),
            Route("/api/runs/{run}", server.report, methods=read),
            Route("/api/runs/{run}/stream", server.stream, methods=read),
            Route("/api/runs/{run}/{verb}", server.ask, methods=post),
        ],
        middleware=[Middleware(AccessCheck, rules=rules, print_error=runs.print_error)],
        exception_handlers={HTTPException: _refused, ElasticError: server.failed},
    )


class _Server:
    def __init__(
        self,
        runs: ServedRuns,
        rules: AccessRules,
        controls: RunControls | None,
        stopping: Callable[[], bool],
    ) -> None:
        self._runs, self._rules, self._controls = runs, rules, controls
        self._stopping = stopping
        self._streams = 0

    # ----------------------------------------------------------------------------- pages

    async def start_page(self, request: Request) -> Response:
        if self._runs.only is not None:
            return RedirectResponse(request.url_for("run_page", run=self._runs.only).path)
        return self._page("Runs", {"mode": "list"})

    async def run_page(self, request: Request) -> Response:
        name = request.path_params["run"]
        several = self._runs.only is None
        return self._page(name, {"mode": "live", "run": name, "several": several})

    async def asset(self, request: Request) -> Response:
        scripts = {"page.js": "javascript", "live.js": "javascript", "page.css": "css"}
        file = request.path_params["file"]
        if file == "plotly.js":
            text = await asyncio.to_thread(plotly_script)
            cached = {"cache-control": "private, max-age=86400"}
            return Response(text, media_type="text/javascript", headers=cached)
        if file not in scripts:
            raise HTTPException(404, "no such file")
        return Response(asset(file), media_type=f"text/{scripts[file]}")

    def _page(self, title: str, settings: dict[str, Any]) -> Response:
        steers = self._controls is not None and self._rules.token is not None
        names = ("plotly.js", "page.js", "live.js")
        page = fill_page(
            title=title,
            words=(),
            policy="",
            style='<link rel="stylesheet" href="/assets/page.css">',
            settings=settings | {"control": steers},
            report=None,
            scripts="".join(f'<script src="/assets/{name}"></script>\n' for name in names),
        )
        return HTMLResponse(page)

    # ----------------------------------------------------------------------------- reading

    async def description(self, request: Request) -> Response:
        return _json_response(api_description())

    async def list_runs(self, request: Request) -> Response:
        runs, number = await asyncio.to_thread(self._runs.summaries)
        return _json_response({"runs": runs, "number": number})

    async def report(self, request: Request) -> Response:
        run = await self._find(request)
        return _json_response(await asyncio.to_thread(run.report))

    async def stream(self, request: Request) -> Response:
        run = await self._find(request)
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(503, f"{_MOST_STREAMS} clients follow runs here already")
        return StreamingResponse(self._events(run), media_type="text/event-stream")

    async def _events(self, run: ServedRun) -> AsyncIterator[str]:
        """Yield the report of a run, and then its changes, until the client has gone."""
        shown: dict[str, Any] | None = None
        report: dict[str, Any] | None = None
        said_at = time.monotonic()
        self._streams += 1
        try:
            while not self._stopping():
                try:
                    report = await asyncio.to_thread(run.report)
                except ElasticError as error:
                    yield _event("problem", self._runs.clean(str(error)))
                    said_at = time.monotonic()
                    await asyncio.sleep(1.0)
                if report is not None and report is not shown:
                    if shown is None:
                        yield _event("report", report)
                    else:
                        yield _event("change", changes(shown, report))
                    shown, said_at = report, time.monotonic()
                elif time.monotonic() > said_at + _QUIET_S:
                    yield ": still here\n\n"
                    said_at = time.monotonic()
                await asyncio.sleep(_LOOK_S)
        finally:
            self._streams -= 1

    async def _find(self, request: Request) -> ServedRun:
        name = request.path_params["run"]
        run = await asyncio.to_thread(self._runs.find, name)
        if run is None:
            raise HTTPException(404, f"no run named {name[:80]!r} is here")
        return run

    # ---------------------------------------------------------------------------- steering

    async def ask(self, request: Request) -> Response:
        """Ask a live run for something. `AccessCheck` has seen the token."""
        verb = request.path_params["verb"]
        if verb not in VERBS:
            raise HTTPException(404, f"no verb {verb[:40]!r}; there are: {', '.join(VERBS)}")
        if self._controls is None:
            raise HTTPException(403, "this server only shows runs")
        fields = fields_of(verb, await _json(request))
        run = await self._find(request)
        done = await asyncio.to_thread(self._do, run, verb, fields)
        return _json_response({"done": done}, 202)

    def _do(self, run: ServedRun, verb: str, fields: dict[str, Any]) -> str:
        assert self._controls is not None
        act, _ = VERBS[verb]
        try:
            return act(self._controls.live(run.name, run.url), *fields.values())
        except ElasticError:
            raise
        except Exception as error:  # whatever Ray raises
            self._runs.print_error()
            what = f"the run's controller does not answer: {type(error).__name__}"
            raise HTTPException(503, what) from error

    async def failed(self, request: Request, error: Exception) -> Response:
        statuses = {SpecError: 422, ClusterError: 409}
        status = next((code for kind, code in statuses.items() if isinstance(error, kind)), 503)
        return _json_response({"error": self._runs.clean(str(error))}, status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json_response({"error": error.detail}, error.status_code, headers=error.headers)


def _json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return the value as JSON in ASCII: a text of a run may hold half a character."""
    text = json.dumps(value, allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


async def _json(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be application/json")
    content = b""
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > _MOST_BYTES:
                raise HTTPException(413, f"the body has more than {_MOST_BYTES} bytes")
        return json.loads(content)
    except ClientDisconnect:
        raise HTTPException(400, "the body is not complete") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, allow_nan=False)}\n\n"
