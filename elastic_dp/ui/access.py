"""Who may read and who may steer, as an ASGI middleware before everything else.

- A request must name this server as this machine does: 127.0.0.1 or `localhost`. A page of another
  site that lets its own name point here (DNS rebinding) names that site.
- All that tells of a run, or changes one, needs the token, as a header that no page of another site
  can set (`Authorization: Bearer`): other users of this machine reach its ports, too.
- A request that changes a run must not come from another origin.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from elastic_dp.errors import SpecError

SHORTEST_TOKEN = 16
_NAMES = ("127.0.0.1", "localhost")
_API = "/api/"
_METHODS = ("GET", "HEAD", "POST")  # of which only POST changes anything
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; script-src 'self'; "
    b"style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'",
}
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def check_token(token: str) -> str:
    """Return the token. Raises SpecError for a short one."""
    if len(token) < SHORTEST_TOKEN:
        raise SpecError(f"the token is too short, must have at least {SHORTEST_TOKEN} letters")
    return token


class AccessCheck:
    """The middleware. It also sets the headers of every answer, and no error leaves it."""

    def __init__(self, app: _App, token: str, print_error: Callable[[], None]) -> None:
        """`print_error` prints the exception that is being handled, without credentials."""
        self._app, self._token, self._print_error = app, token, print_error

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def answer(message: _Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                given = {name.lower(): value for name, value in message.get("headers", ())}
                message = {**message, "headers": [*(_HEADERS | given).items()]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(answer, *refusal)
            return
        try:
            await self._app(scope, receive, answer)
        except Exception:  # a bug of ours: told here, and not to whoever asked
            self._print_error()
            if not begun:
                await _refuse(answer, 500, "this server has failed; its terminal says why")

    def _refusal(self, scope: _Message) -> tuple[int, str] | None:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if host.partition(":")[0].lower() not in _NAMES:
            return 421, f"this server is known as {' or '.join(_NAMES)}"
        if scope["method"] not in _METHODS:
            return 405, "this server knows no such method"
        writes = scope["method"] == "POST"
        asks = writes or scope["path"].startswith(_API)
        if asks and not self._has_token(headers.get(b"authorization", "")):
            return 401, "the token is missing or wrong; it is in the address that was printed"
        origin = headers.get(b"origin")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if writes and (foreign or headers.get(b"sec-fetch-site", "none") == "cross-site"):
            return 403, "a request from another site"
        return None

    def _has_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="replace"), self._token.encode())
        return same and scheme.lower() == "bearer"


async def _refuse(send: _Send, status: int, error: str) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
