"""A server from which the workers of a test's Ray are forked, with what each of them would import
for two seconds: `python -m tests.ray.forked_workers SOCKET`.

It imports nothing of Ray, whose identities and connections each worker makes itself. It ends when
its standard input does. See minimal/sitecustomize.py for the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import types

import elastic_dp.cluster.worker  # noqa: F401 - what workers need, but for Ray

_CHUNK = 1 << 16


def _become(words: list[str], variables: dict[str, str], folder: str, files: list[int]) -> None:
    """This process is the worker that Ray would have started by these words."""
    *streams, network = files
    for number, file in enumerate(streams):
        os.dup2(file, number)
    _enter(network)
    for file in files:
        os.close(file)
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= variables
    if "CHAOS_CLOCK" in variables:
        importlib.reload(sys.modules["sitecustomize"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    random.seed()
    script, *_ = sys.argv = words
    sys.path[0] = os.path.dirname(script)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)


def _enter(network: int) -> None:
    """From now on, this process is in this network namespace."""
    if os.path.samestat(os.fstat(network), os.stat("/proc/self/ns/net")):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, 0):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace of a worker")


def _asked(connection: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    _, files, *_ = socket.recv_fds(connection, 1, 4)
    chunks = iter(lambda: connection.recv(_CHUNK), b"")
    words, variables, folder = json.loads(b"".join(chunks))
    return words, variables, folder, files


def main(address: str) -> None:
    gc.collect()
    gc.freeze()  # no search for garbage in a worker visits, and so copies, what all share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as either:
        server.bind(address)
        server.listen(16)
        either.register(server, selectors.EVENT_READ)
        either.register(sys.stdin, selectors.EVENT_READ)
        print("listens", flush=True)
        while not any(key.fileobj is sys.stdin for key, _ in either.select()):
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError, ValueError):  # who asked was killed
                asked = _asked(connection)
                if os.fork() == 0:
                    connection.detach()  # it is closed when this process ends
                    break
                for file in asked[3]:
                    os.close(file)
        else:
            return
    _become(*asked)


if __name__ == "__main__":
    main(sys.argv[1])
