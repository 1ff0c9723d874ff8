"""A proxy that fails as stores do, at given rates, in an order that its seed fixes.

It speaks HTTP/1.1 to both sides and changes nothing but what a fault changes. Faults, each with a
rate from 0 to 1:

    error     500, 503 or 429, the latter two with Retry-After; the request did not reach the server
    stall     part of the answer, then nothing until the client gives up, or for `stall_s` and then
              the end
    cut       the whole answer's headers, half of its body, end of connection
    reset     the connection is reset before the server saw the request, or after it did what was
              asked
    stale     a GET is answered with the object as it was before its last PUT through here, old ETag
              included

`go_away()` closes the port and every connection until `come_back()`; meanwhile nobody else can take
the port. Runs in a thread of its own.
"""

import asyncio
import contextlib
import random
import re
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field

from tests.patience import PATIENCE_S

FAULTS = ("error", "stall", "cut", "reset", "stale")
_ANSWERS = {500: "Internal Server Error", 503: "Slow Down", 429: "Too Many Requests"}


@dataclass
class Message:
    """A request or a response. `start` is its first line; headers keep their case and order."""

    start: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def get(self, name):
        return next((value for key, value in self.headers if key.lower() == name), "")

    def encode(self):
        lines = [self.start, *(f"{key}: {value}" for key, value in self.headers), "", ""]
        return "\r\n".join(lines).encode("latin-1") + self.body


@dataclass
class FaultProxy:
    """`with FaultProxy("http://127.0.0.1:5000", {"cut": 0.05}, seed=1) as proxy: … proxy.url …`"""

    upstream: str
    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    retry_after_s: int = 1
    stall_s: float | None = None

    def start(self):
        assert set(self.rates) <= set(FAULTS), self.rates
        self.requests, self.faults = 0, Counter()
        self._chance = random.Random(self.seed)
        self._older = {}  # by path: what a GET gave before the last PUT
        self._open = set()
        self._serving = set()
        self._kept = socket.socket()  # bound and not listening: keeps the port, refuses connections
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self._port = self._kept.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy")
        self._thread.start()
        self.come_back()
        return self

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def go_away(self):
        self._run(self._close())

    def come_back(self):
        self._run(self._listen())

    def stop(self):
        self._run(self._close())
        self._run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._kept.close()

    def __enter__(self):
        return self.start()

    def __exit__(self, *error):
        self.stop()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=PATIENCE_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self._port, limit=1 << 20, backlog=256
        )

    async def _close(self) -> None:
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0.01)  # a server that is closed loses those that it just accepted
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:  # one that is cancelled while it connects leaves the connection open
            await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in list(self._open):  # of tasks that had not begun
            writer.transport.abort()
        await asyncio.sleep(0.01)  # an aborted connection is closed by the loop's next turn

    def _accept(self, reader, writer):
        self._open.add(writer)
        self._serving.add(task := self._loop.create_task(self._serve(reader, writer)))
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader, writer) -> None:
        """One connection of a client, request after request."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort() if self._loop.is_running() else None

    async def _serve_one(self, reader, writer) -> bool:
        request = await _read(reader)
        self.requests += 1
        fault = self._draw(request)
        if fault:
            self.faults[fault] += 1
        if fault == "error":
            writer.write(self._refusal().encode())
        elif fault == "reset" and self._chance.random() < 0.5:
            return False
        else:
            answer = await self._forward(request)
            if fault == "reset":
                return False
            if fault == "stale":
                answer = _span(self._older[_key(request)], request)
            head = request.start.startswith("HEAD")
            whole = (Message(answer.start, answer.headers) if head else answer).encode()
            if fault in ("stall", "cut"):
                # At least one byte is kept back, of the headers where there is no body.
                writer.write(whole[: len(whole) - (len(answer.body) + 1) // 2 - 1])
                await writer.drain()
                if fault == "stall":
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), self.stall_s)
                else:
                    writer.close()
                    await writer.wait_closed()
                return False
            writer.write(whole)
        await writer.drain()
        return True

    def _draw(self, request):
        """At most one fault; always one draw for it, so that the order does not depend on the
        rates."""
        drawn = self._chance.random()
        for fault in FAULTS:
            drawn -= self.rates.get(fault, 0.0)
            if drawn < 0:
                stale = fault == "stale"
                known = request.start.startswith("GET") and _key(request) in self._older
                return None if stale and not known else fault
        return None

    def _refusal(self):
        status = self._chance.choice(list(_ANSWERS))
        body = f"<Error><Code>{_ANSWERS[status]}</Code><Message>a fault</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        if status != 500:
            headers.append(("Retry-After", str(self.retry_after_s)))
        return Message(f"HTTP/1.1 {status} {_ANSWERS[status]}", headers, body)

    async def _forward(self, request: Message) -> Message:
        if request.start.startswith("PUT") and self.rates.get("stale"):
            before = await self._ask(_whole_get(request))
            if before.start.split()[1] == "200":
                self._older[_key(request)] = before
        return await self._ask(request)

    async def _ask(self, request: Message) -> Message:
        host, port = self.upstream.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            once = [(k, v) for k, v in request.headers if k.lower() != "connection"]
            writer.write(
                Message(request.start, [*once, ("Connection", "close")], request.body).encode()
            )
            await writer.drain()
            return await _read(reader, head=request.start.startswith("HEAD"))
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def _key(request):
    return request.start.split()[1].partition("?")[0]


def _whole_get(put):
    kept = ("host", "authorization", "x-amz-date")
    return Message(
        f"GET {_key(put)} HTTP/1.1", [(k, v) for k, v in put.headers if k.lower() in kept]
    )


def _span(older, request):
    """The part of an old answer that a request asks for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.get("range"))
    if not found:
        return older
    start, end = int(found[1]), min(int(found[2] or len(older.body)) + 1, len(older.body))
    kept = [(k, v) for k, v in older.headers if k.lower() != "content-length"]
    if start >= len(older.body):
        return Message("HTTP/1.1 416 Range Not Satisfiable", [("Content-Length", "0")])
    return Message(
        "HTTP/1.1 206 Partial Content",
        [
            *kept,
            ("Content-Length", str(end - start)),
            ("Content-Range", f"bytes {start}-{end - 1}/{len(older.body)}"),
        ],
        older.body[start:end],
    )


async def _read(reader: asyncio.StreamReader, head: bool = False) -> Message:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *lines = raw.strip().split("\r\n")
    headers = [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines)]
    message = Message(start, headers)
    if head:
        return message
    if message.get("transfer-encoding").lower() == "chunked":
        message.body = await _read_chunks(reader)
        message.headers = [(k, v) for k, v in headers if k.lower() != "transfer-encoding"]
        message.headers.append(("Content-Length", str(len(message.body))))
    else:
        message.body = await reader.readexactly(int(message.get("content-length") or 0))
    return message


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return b"".join(chunks)
