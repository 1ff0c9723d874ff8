"""The connections between the first process of a worker and those on other nodes.

A follower makes two: one for messages, and a watch, over which nothing is sent. A node that is cut
off closes no connection, and unsent data hides its loss for minutes, but an idle connection shows
it in seconds: there the kernels ask each other, however busy the processes are.

Both ends prove that they hold the secret before either reads anything else. A stranger costs one
thread for some seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection

from elastic_dp.distributed.link_times import socket_of
from elastic_dp.errors import ClusterError
from elastic_dp.threads import background

_PROOF_BYTES, _PROOF_LIMIT_S, _PROOFS_AT_ONCE = 32, 5, 128
_LOOK_EVERY_S = 0.2
# A lost node is noticed 1 + 3 · 1 s after the last sign of it.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


def accept(
    listener: socket.socket,
    secret: bytes,
    identity: str,
    numbers: Iterable[int],
    limit_s: float = 120.0,
) -> list[Connection]:
    """Waits for the followers with these numbers. `secret` is that of the run, `identity` the
    worker's. Returns their connections, in order. Raises ClusterError if one does not come in
    time."""
    key, until = _key(secret, identity), time.monotonic() + limit_s
    missing = {(number, is_watch) for number in numbers for is_watch in (False, True)}
    found: dict[tuple[int, bool], Connection] = {}
    proving = threading.BoundedSemaphore(_PROOFS_AT_ONCE)

    def take(accepted: socket.socket) -> None:
        connection = _connection(accepted)
        try:
            prove(connection, key, ours=b"leader", theirs=b"follower")
            number, is_watch = connection.recv()
            _set_limit(connection, 0)
            found[number, is_watch] = connection
        except (OSError, EOFError):  # a stranger
            connection.close()
        finally:
            proving.release()

    listener.settimeout(_LOOK_EVERY_S)
    with listener:
        while not missing <= found.keys():
            if time.monotonic() > until:
                lacking = {number + 1 for number, _ in missing - found.keys()}
                raise ClusterError(
                    f"processes {sorted(lacking)} of this worker, on other nodes, have not "
                    f"connected to {listener.getsockname()[0]} in {limit_s:g} s: see that the "
                    "nodes reach each other"
                )
            if proving.acquire(timeout=_LOOK_EVERY_S):
                try:
                    accepted, _ = listener.accept()
                except OSError:  # nobody came, or too many
                    proving.release()
                else:
                    background("follower", partial(take, accepted)).start()
    connections = [found[number, False] for number in sorted({number for number, _ in missing})]
    for number, is_watch in missing:
        if is_watch:
            watch(found[number, True], partial(shut, found[number, False]))
    return connections


def connect(
    address: tuple[str, int], secret: bytes, identity: str, number: int
) -> tuple[Connection, Connection]:
    """Connects follower `number` with the first process. Returns the connection for messages, and
    the watch. Raises OSError, and EOFError if the peer refuses."""
    made = []
    for is_watch in (False, True):
        connection = _connection(socket.create_connection(address, _PROOF_LIMIT_S))
        prove(connection, _key(secret, identity), ours=b"follower", theirs=b"leader")
        connection.send((number, is_watch))
        _set_limit(connection, 0)
        made.append(connection)
    return made[0], made[1]


def watch(connection: Connection, on_lost: Callable[[], object]) -> None:
    """Calls `on_lost` on a thread when the peer of a watch, or its node, is lost."""

    def wait() -> None:
        with contextlib.suppress(OSError, EOFError):
            connection.recv_bytes(0)
        on_lost()

    background("watch", wait).start()


def shut(connection: Connection) -> None:
    """Ends a connection for all processes that hold it."""
    with contextlib.suppress(OSError), socket_of(os.dup(connection.fileno())) as ended:
        ended.shutdown(socket.SHUT_RDWR)


def prove(connection: Connection, key: bytes, *, ours: bytes, theirs: bytes) -> None:
    """Proves to the peer that this end holds the key, and has it prove the same. The ends have
    different names. Raises ConnectionError, EOFError and OSError."""

    def proof(name: bytes, asked: bytes, other: bytes) -> bytes:
        return hashlib.blake2b(name + asked + other, key=key, digest_size=_PROOF_BYTES).digest()

    own = secrets.token_bytes(_PROOF_BYTES)
    connection.send_bytes(own)
    asked = connection.recv_bytes(_PROOF_BYTES)
    connection.send_bytes(proof(ours, asked, own))
    if not hmac.compare_digest(connection.recv_bytes(_PROOF_BYTES), proof(theirs, own, asked)):
        raise ConnectionError("the peer does not hold the secret of the run")


def _key(secret: bytes, identity: str) -> bytes:
    return hashlib.blake2b(f"processes of {identity}".encode(), key=secret).digest()


def _connection(made: socket.socket) -> Connection:
    made.setblocking(True)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    connection = Connection(made.detach())
    _set_limit(connection, _PROOF_LIMIT_S)
    return connection


def _set_limit(connection: Connection, seconds: int) -> None:
    """Sets how long one read may wait; 0: for ever."""
    with socket_of(os.dup(connection.fileno())) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
