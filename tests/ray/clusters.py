"""Rays of a test's own, whose workers find the tests' modules; and one for all modules that need no
other and follow one another.

Each has the processes that a test needs, and no others: no workers started in advance (ours have an
environment of their own, which those lack), no autoscaler, nobody who reads logs, and no agents of
a dashboard; and workers without torch's compiler, which are forked from a server that has imported
what they need. See minimal/sitecustomize.py. And none stands behind the other processes of the
machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import ray

import tests
from elastic_dp.cluster.worker import prepare_environment
from tests.patience import eventually

SHARED_PLACES = 3
ROOT = os.path.dirname(os.path.dirname(tests.__file__))
MINIMAL = os.path.join(ROOT, "tests", "ray", "minimal")
MINIMAL_PATH = f"{MINIMAL}{os.pathsep}{ROOT}"
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}


def connect(address: str, *, minimal: bool = True) -> None:
    environment = {"env_vars": {"PYTHONPATH": MINIMAL_PATH if minimal else ROOT}}
    ray.init(address=address, log_to_driver=False, runtime_env=environment)


_open = contextlib.ExitStack()  # holds what is shared, while it is up
_shared: list[Any] = []


@contextlib.contextmanager
def shared() -> Iterator[Any]:
    """The Ray that is shared, with three places. Nobody who was left keeps a place of the next
    module's."""
    if not _shared:
        _shared.append(_open.enter_context(nodes(SHARED_PLACES)))
    yield _shared[0]
    kill_all_that_are_left()
    eventually(
        lambda: ray.available_resources().get("CPU") == SHARED_PLACES, ray.available_resources
    )


def close_shared() -> None:
    _shared.clear()
    _open.close()


_server = contextlib.ExitStack()  # holds the server of workers, while it is up


@functools.cache
def forked_workers(path: str = MINIMAL_PATH) -> dict[str, str]:
    """The environment variables of a Ray whose workers are forked from a server, if `path` is what
    they have as PYTHONPATH. The server is started when the first asks."""
    folder = _server.enter_context(tempfile.TemporaryDirectory())
    address = os.path.join(folder, "socket")
    environment = os.environ | {"PYTHONPATH": path}
    prepare_environment(environment, 1)
    command = [sys.executable, "-m", "tests.ray.forked_workers", address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = _server.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    assert process.stdin is not None and process.stdout is not None
    _server.callback(process.stdin.close)
    assert process.stdout.readline() == b"listens\n"
    return {"FORKED_WORKERS": address, "FORKED_WORKERS_PATH": path}


def close_server() -> None:
    _server.close()
    forked_workers.cache_clear()


def kill_all_that_are_left() -> None:
    for left in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):  # it has ended since
            ray.kill(ray.get_actor(left["name"], left["namespace"]))


@contextlib.contextmanager
def nodes(places: int, *, minimal: bool = True, forked: bool = True) -> Iterator[Any]:
    """A head with so many places, to which nodes may be added. `minimal`: its workers have no
    compiler of torch, which torch.distributed needs. `forked`: they are forked, if minimal, and do
    not import torch themselves."""
    from ray.cluster_utils import Cluster

    without = dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    head = {"num_cpus": places, "no_monitor": True, **without}
    with _as_without_extras(forked_workers() if minimal and forked else {}):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            connect(cluster.address, minimal=minimal)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def _as_without_extras(variables: Mapping[str, str]) -> Iterator[None]:
    """Nodes that this process starts have no agents of a dashboard, and these environment
    variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
        patch.setenv("PYTHONPATH", MINIMAL, prepend=os.pathsep)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
