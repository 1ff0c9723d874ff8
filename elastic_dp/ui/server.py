"""Runs the application on a socket, until Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_dp.errors import SpecError
from elastic_dp.report.report_page import plotly_script
from elastic_dp.ui.access import AccessRules
from elastic_dp.ui.run_control import RunControls
from elastic_dp.ui.served_runs import ServedRuns

if TYPE_CHECKING:
    import uvicorn

_MOST_CONNECTIONS = 256


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

        from elastic_dp.ui.served_app import served_app
    except ModuleNotFoundError as missing:
        what = (missing.name or "").partition(".")[0]
        raise SpecError(f"the page needs {what}: pip install 'elastic_dp[ui]'") from None
    plotly_script()
    config = uvicorn.Config(
        served_app(runs, rules, controls, lambda: server.should_exit),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    return server


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
