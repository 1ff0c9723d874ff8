"""Who may read and who may steer, as an ASGI middleware before everything else.

- A request must name this server by an IP address, `localhost`, or a name that was allowed. A page
  of another site that lets its own name point here (DNS rebinding) names that site.
- All that tells of a run, or changes one, needs the token, as a header that no page of another site
  can set (`Authorization: Bearer`): other users of this machine reach its ports, too.
- A request that changes a run must not come from another origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from elastic_dp.errors import SpecError

SHORTEST_TOKEN = 16
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


@dataclass(frozen=True)
class AccessRules:
    """`host` is the address to listen on; `allowed` are further names by which requests may name
    this server. Raises SpecError for a short token.
    """

    host: str
    token: str
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.token) < SHORTEST_TOKEN:
            raise SpecError(f"the token is too short, must have at least {SHORTEST_TOKEN} letters")

    def names_us(self, host: str) -> bool:
        """Whether the Host header of a request names this server."""
        has_port = host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]:" in host)
        name = host.rpartition(":")[0] if has_port else host
        name = name.strip("[]").rstrip(".").lower()
        if name in ("localhost", self.host.lower(), *(each.lower() for each in self.allowed)):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def has_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="replace"), self.token.encode())
        return same and scheme.lower() == "bearer"


class AccessCheck:
    """The middleware. It also sets the headers of every answer, and no error leaves it."""

    def __init__(self, app: _App, rules: AccessRules, print_error: Callable[[], None]) -> None:
        """`print_error` prints the exception that is being handled, without credentials."""
        self._app, self._rules, self._print_error = app, rules, print_error

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
        host, rules = headers.get(b"host", ""), self._rules
        if not rules.names_us(host):
            return 421, "this server is not known by that name; see --allow-host"
        if scope["method"] not in _METHODS:
            return 405, "this server knows no such method"
        writes = scope["method"] == "POST"
        asks = writes or scope["path"].startswith(_API)
        if asks and not rules.has_token(headers.get(b"authorization", "")):
            return 401, "the token is missing or wrong; it is in the address that was printed"
        origin = headers.get(b"origin")
        foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
        if writes and (foreign or headers.get(b"sec-fetch-site", "none") == "cross-site"):
            return 403, "a request from another site"
        return None


async def _refuse(send: _Send, status: int, error: str) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
