"""Ray and torch without what takes seconds of the start of each process, and no test of them looks
at. Python imports this by its name, from PYTHONPATH.

The agent of a node imports nothing for a dashboard, as where Ray is installed without its extra
`default`. The first optimizer of a worker does not import torch's compiler. No search for garbage
visits, again and again, all that a process imports, which would be a sixth of its start. And the
process that sets a worker's environment variables and becomes the worker does not import Ray for
that.
"""

import gc
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any


class _NoCompiler(types.ModuleType):
    """What torch calls of `torch._dynamo` where nothing is compiled, and what it sets of
    `torch._inductor`."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break() -> None:
        pass


def _become_worker(words: list[str]) -> None:
    """Does what Ray's `setup_worker.py` does with these words of its command line, unless it must
    do more than set variables."""
    context: dict[str, Any] = {}
    passed_on = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            passed_on.append(word)
    variables: dict[str, str] = context.pop("env_vars", {})
    others = {name: value for name, value in context.items() if value}
    if others not in ({}, {"py_executable": sys.executable}) or "$" in json.dumps(variables):
        return
    os.environ |= variables
    if os.environ.get("FORKED_WORKERS_PATH") == os.environ.get("PYTHONPATH"):
        _fork_worker(os.environ["FORKED_WORKERS"], passed_on)
    os.execv(sys.executable, [sys.executable, *passed_on])


def _fork_worker(address: str, words: list[str]) -> None:
    """See tests/ray/forked_workers.py. This process ends with the worker."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        network = os.open("/proc/self/ns/net", os.O_RDONLY)  # a host of its own (tests/chaos)
        socket.send_fds(server, [b"-"], [0, 1, 2, network])
        server.sendall(json.dumps([words, dict(os.environ), os.getcwd()]).encode())
        server.shutdown(socket.SHUT_WR)
        server.recv(1)
    os._exit(0)


gc.set_threshold(100_000, 20, 20)
_modules: dict[str, Any] = sys.modules
_modules["ray.dashboard.optional_deps"] = None  # to import it fails
for _name in ("torch._dynamo", "torch._inductor", "torch._inductor.config"):
    _modules[_name] = _NoCompiler(_name)
_modules["torch._inductor"].config = _modules["torch._inductor.config"]
if sys.orig_argv[1:2] and sys.orig_argv[1].endswith("/ray/_private/workers/setup_worker.py"):
    _become_worker(sys.orig_argv[2:])
