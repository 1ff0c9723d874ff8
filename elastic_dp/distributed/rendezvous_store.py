"""The store at which the members of a generation meet. Only holders of the run's secret can use it.

torch's TCPStore accepts any client, and one malformed message keeps its only thread busy for five
seconds (measured with torch 2.13: it resolves the symbols of a stack trace). This store has torch's
interface:

    server → client   nonce (16 bytes)
    client → server   nonce (16 bytes)
    then both ways    length (4 bytes) | MAC (16 bytes) | JSON

The MAC is keyed BLAKE2b over direction, counter and content; its key is derived from the secret and
both nonces. So the server parses only what a member has sent, and a recorded message cannot be
replayed. A connection that does not prove the secret within a few seconds, or that is not among the
newest few hundred, is closed. Values are not encrypted.

A group of 1,024 ranks costs the store less than a second. Gloo's record of a rank has a number of 8
bytes for each peer, which counts up, so a client sends it packed as differences. Every rank gets
the records of all in one answer, which is encoded once. Keys of generations before the last two are
dropped.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from elastic_dp.threads import background

_NONCE_BYTES, _MAC_BYTES = 16, 16
_HEAD = struct.Struct(f">I{_MAC_BYTES}s")
_MAX_BYTES = 1 << 24  # of one message
_MAX_STRANGER_BYTES = 1 << 14  # of the first message
_STRANGER_S = 5.0  # time to prove the secret
_MAX_STRANGERS = 256
_READ_BYTES = 1 << 16
_RETRY_S = 0.05
_PACKED_BYTES = 512  # values from this size on are packed


class _Wire:
    """One end of a connection: converts messages to signed bytes and back."""

    def __init__(self, secret: bytes, nonces: bytes, *, server: bool) -> None:
        self._key = hashlib.blake2b(
            b"elastic_dp rendezvous" + nonces, key=secret, digest_size=32
        ).digest()
        self._out, self._in = (b"s", b"c") if server else (b"c", b"s")
        self._sent = self._received = 0

    def sign(self, message: Any) -> bytes:
        return self.sign_encoded(_encoded(message))

    def sign_encoded(self, content: bytes) -> bytes:
        mac = self._mac(self._out, self._sent, content)
        self._sent += 1
        return _HEAD.pack(len(content), mac) + content

    def take(self, buffer: bytearray, most: int = _MAX_BYTES) -> Any:
        """Removes the first message from the buffer and returns it; None if it is incomplete.

        Raises ValueError if it is too long or not signed with the secret.
        """
        if len(buffer) < _HEAD.size:
            return None
        length, mac = _HEAD.unpack_from(buffer)
        if length > most:
            raise ValueError("too long")
        end = _HEAD.size + length
        if len(buffer) < end:
            return None
        content = bytes(buffer[_HEAD.size : end])
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, content)):
            raise ValueError("not signed with the run's secret")
        self._received += 1
        del buffer[:end]
        return json.loads(content)

    def _mac(self, direction: bytes, counter: int, content: bytes) -> bytes:
        signed = hashlib.blake2b(direction, key=self._key, digest_size=_MAC_BYTES)
        signed.update(counter.to_bytes(8, "big"))
        signed.update(content)
        return signed.digest()


def _encoded(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def packed(value: bytes) -> str:
    """Returns a value as a short text. Numbers of 8 bytes that count up take next to nothing."""
    if len(value) < _PACKED_BYTES:
        return "b" + base64.b64encode(value).decode()
    numbers = np.frombuffer(value, dtype=np.uint8)
    differences = numbers.copy()
    differences[8:] -= numbers[:-8]
    return "z" + base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode()


def unpacked(text: str) -> bytes:
    """Returns the value of `packed`, or of a number that `add` has made."""
    kind, content = text[:1], text[1:]
    if kind not in ("b", "z"):
        return text.encode()
    value = base64.b64decode(content)
    if kind == "b":
        return value
    differences = np.frombuffer(zlib.decompress(value), dtype=np.uint8)
    rows = np.pad(differences, (0, -len(differences) % 8)).reshape(-1, 8)
    return rows.cumsum(axis=0, dtype=np.uint8).tobytes()[: len(differences)]


class _Table:
    """The values that the ranks of a group set, below one parent key."""

    def __init__(self, parent: str, count: int) -> None:
        self.keys = [f"{parent}/{rank}" for rank in range(count)]
        self.missing: set[str] = set()
        self.waiting: list[tuple[_Client, int]] = []  # with the number of the request
        self.answer: bytes | None = None  # once all are there


class _Client:
    """A connection of the server.

    `wire` is set once the nonces are exchanged, `known` once a message was authentic.
    """

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.connection, self.until = connection, until
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.received, self.unsent = bytearray(), bytearray()
        self.wire: _Wire | None = None
        self.known = False


class RendezvousStoreServer:
    """The server, on one thread, which survives any input. It serves until `close`."""

    def __init__(self, host: str, secret: bytes) -> None:
        """`host` is the address of this machine at which members reach it."""
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, str] = {}
        # By the missing key: the client, the number of its request, and the keys.
        self._waiting: defaultdict[str, list[tuple[_Client, int, list[str]]]] = defaultdict(list)
        self._tables: dict[str, _Table] = {}  # by the parent of their keys
        self._generation = 0  # the newest
        self._strangers: dict[_Client, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False
        background("rendezvous", self._serve).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _serve(self) -> None:
        while not self._closed:
            for key, events in self._selector.select(1.0 if self._strangers else None):
                if key.data is None:
                    self._accept()
                    continue
                try:
                    self._go_on(key.data, events)
                except Exception:  # a broken or malicious client must not end this thread
                    self._drop(key.data)
            now = time.monotonic()
            for client in [c for c in self._strangers if c.until < now]:
                self._drop(client)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # perhaps unknown clients use all descriptors
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            elif not self._closed:
                time.sleep(_RETRY_S)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection, time.monotonic() + _STRANGER_S)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._strangers[client] = None
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, client.nonce)

    def _drop(self, client: _Client) -> None:
        self._strangers.pop(client, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()

    def _go_on(self, client: _Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(client, b"")
        if not events & selectors.EVENT_READ:
            return
        arrived = client.connection.recv(_READ_BYTES)
        if not arrived:
            self._drop(client)
            return
        client.received += arrived
        if client.wire is None:
            if len(client.received) < _NONCE_BYTES:
                return
            nonces = client.nonce + bytes(client.received[:_NONCE_BYTES])
            del client.received[:_NONCE_BYTES]
            client.wire = _Wire(self._secret, nonces, server=True)
        most = _MAX_BYTES if client.known else _MAX_STRANGER_BYTES
        while (message := client.wire.take(client.received, most)) is not None:
            client.known, most = True, _MAX_BYTES
            self._strangers.pop(client, None)
            number, operation, *arguments = message
            if operation == "set":
                self._set(*arguments)
            elif operation == "get":
                self._get(client, number, *arguments)
            elif operation == "all":
                self._get_all(client, number, *arguments)
            else:
                self._answer(client, number, getattr(self, f"_do_{operation}")(*arguments))

    def _set(self, key: str, value: str) -> None:
        generation = _generation_of(key)
        if generation > self._generation:
            self._generation = generation
            self._forget_before(generation - 1)
        self._values[key] = value
        table = self._tables.get(_parent(key))
        if table is not None and key in table.missing:
            table.missing.discard(key)
            self._answer_table(table)
        for client, number, keys in self._waiting.pop(key, ()):
            self._get(client, number, keys)

    def _do_add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._set(key, str(total))
        return total

    def _do_check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _do_delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _get(self, client: _Client, number: int, keys: list[str]) -> None:
        """Answers when all of the keys exist."""
        for key in keys:
            if key not in self._values:
                self._waiting[key].append((client, number, keys))
                return
        self._answer(client, number, {key: self._values[key] for key in keys})

    def _get_all(self, client: _Client, number: int, parent: str, count: int) -> None:
        """Answers with the values of all ranks below `parent` when they exist."""
        table = self._tables.get(parent)
        if table is None or len(table.keys) != count:
            table = self._tables[parent] = _Table(parent, count)
            table.missing = {key for key in table.keys if key not in self._values}
        table.waiting.append((client, number))
        self._answer_table(table)

    def _answer_table(self, table: _Table) -> None:
        if table.missing:
            return
        if table.answer is None:
            table.answer = _encoded([self._values[key] for key in table.keys])
        for client, number in table.waiting:
            self._send_answer(client, number, table.answer)
        table.waiting.clear()

    def _forget_before(self, generation: int) -> None:
        """Drops what was set for generations before this one. Its own groups may still form."""
        for kept in (self._values, self._waiting, self._tables):
            for key in [key for key in kept if 0 < _generation_of(key) < generation]:
                del kept[key]

    def _answer(self, client: _Client, number: int, answer: Any) -> None:
        self._send_answer(client, number, _encoded(answer))

    def _send_answer(self, client: _Client, number: int, answer: bytes) -> None:
        assert client.wire is not None
        if client.connection.fileno() >= 0:  # a waiting client may be gone
            self._send(client, client.wire.sign_encoded(b"[%d,%b]" % (number, answer)))

    def _send(self, client: _Client, content: bytes) -> None:
        client.unsent += content
        try:
            del client.unsent[: client.connection.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        more = selectors.EVENT_WRITE if client.unsent else 0
        self._selector.modify(client.connection, selectors.EVENT_READ | more, client)


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _generation_of(key: str) -> int:
    """Returns the generation of a key `run/generation/purpose/…`; 0 for another key."""
    parts = key.split("/", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0


class RendezvousStoreClient(dist.Store):
    """A client of the store.

    Raises DistStoreError if the server cannot be reached, is not of this run, or a key does not
    arrive in time. `set` does not wait for an answer: the member that asks for the value waits.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._address, self._secret, self._timeout = (host, port), secret, timeout
        self._rank: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._asked = 0
        self._of_all: str | None = None  # the parent of what each rank sets
        self._known: dict[str, str] = {}
        self._clones: list[RendezvousStoreClient] = []  # torch holds only their C++ part
        self._connect()

    def _connect(self) -> None:
        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                self._connection = socket.create_connection(self._address, self._left(until))
                weakref.finalize(self, self._connection.close)  # torch says no word when it is done
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._received = bytearray()
                self._read(_NONCE_BYTES, until)
                ours = secrets.token_bytes(_NONCE_BYTES)
                nonces = bytes(self._received[:_NONCE_BYTES]) + ours
                del self._received[:_NONCE_BYTES]
                self._wire = _Wire(self._secret, nonces, server=False)
                self._connection.sendall(ours)
                return
            except OSError as error:
                if time.monotonic() + _RETRY_S > until:
                    raise self._failed(f"cannot be reached: {error}") from error
                time.sleep(_RETRY_S)

    # ---------------------------------------------------------------------- torch's interface

    def set(self, key: str, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        if self._rank is not None and key.endswith(f"/{self._rank[0]}"):
            self._of_all = _parent(key)
        with self._lock:
            self._send(["set", key, packed(content)], self._until(None))

    def get(self, key: str) -> bytes:
        return unpacked(self._get([key], self._timeout)[key])

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        if self._rank is not None:  # Gloo passes its limit for connections, which come later
            timeout = self._timeout
        self._get(list(keys), timeout or self._timeout)

    def check(self, keys: Any) -> bool:
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> RendezvousStoreClient:
        self._clones.append(RendezvousStoreClient(*self._address, self._secret, self._timeout))
        return self._clones[-1]

    # ------------------------------------------------------------------------------------------

    def asks_for_all(self, rank: int, world_size: int) -> None:
        """Announces that every rank will set one key that ends with its number and ask for those of
        all.

        The keys are then fetched together instead of one by one.
        """
        self._rank, self._of_all, self._known = (rank, world_size), None, {}

    def _get(self, keys: list[str], timeout: timedelta) -> dict[str, str]:
        if self._rank is None or any(_parent(key) != self._of_all for key in keys):
            return dict(self._ask("get", keys, timeout=timeout))
        if not self._known:
            values = self._ask("all", self._of_all, self._rank[1], timeout=timeout)
            self._known = {f"{self._of_all}/{rank}": value for rank, value in enumerate(values)}
        return self._known

    def _ask(self, *request: Any, timeout: timedelta | None = None) -> Any:
        with self._lock:
            until = self._until(timeout)
            self._send(request, until)
            try:
                while True:  # answers to requests that timed out may come first
                    while (message := self._wire.take(self._received)) is None:
                        self._read(len(self._received) + 1, until)
                    if message[0] == self._asked:
                        return message[1]
            except TimeoutError:
                raise self._failed(f"has no answer to {request[:2]} in time") from None
            except (OSError, ValueError) as error:
                raise self._failed(f"is lost: {error}") from error

    def _send(self, request: Sequence[Any], until: float) -> None:
        self._asked += 1
        try:
            self._connection.settimeout(self._left(until))
            self._connection.sendall(self._wire.sign([self._asked, *request]))
        except OSError as error:
            raise self._failed(f"is lost: {error}") from error

    def _until(self, timeout: timedelta | None) -> float:
        return time.monotonic() + (timeout or self._timeout).total_seconds()

    def _read(self, wanted: int, until: float) -> None:
        while len(self._received) < wanted:
            self._connection.settimeout(self._left(until))
            arrived = self._connection.recv(_READ_BYTES)
            if not arrived:
                raise ConnectionError("the other side closed the connection")
            self._received += arrived

    def _left(self, until: float) -> float:
        return max(0.001, until - time.monotonic())

    def _failed(self, what: str) -> Exception:
        host, port = self._address
        return dist.DistStoreError(f"the rendezvous store at {host}:{port} {what}")
