"""Keeps processes ready on the nodes of a run's workers, for replacements.

A new worker's process takes seconds to start Ray and to import torch, more where the machine is
full. A prestarted one has done both: Ray gives it to the next worker that it places there. It holds
no CPU, GPU or rank, only memory. Ray has no public call for this. The request is that of its own
service `PrestartWorkers`, which needs grpcio. Without it, workers start as they do otherwise.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import ray

from elastic_dp.cluster.ray.prestart import prestarted_process
from elastic_dp.cluster.runs import ray_kv_state
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.threads import background

_LOOK_EVERY_S = 1.0
_CALM_S = 2.0  # after the last worker has started: what starts now delays no replacement
# A worker that starts for longer waits for room, and takes no processor time meanwhile.
_STARTING_S = 60.0
_REQUEST_S = 5.0
_AGAIN_S = 60.0  # after a request that failed
_KEPT_S = 10 * 365 * 24 * 3600  # a process ends by itself when the run no longer needs it


class ProcessPrestarter:
    """A thread that keeps `count` processes on each node in `nodes()`, those of the workers that
    have one. `stages()` returns the stage of each worker: while one is starting, no process is.
    """

    def __init__(
        self,
        run: str,
        count: int,
        nodes: Callable[[], Mapping[WorkerId, str]],
        stages: Callable[[], Mapping[WorkerId, str]],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._count = run, count
        self._nodes, self._stages, self._say = nodes, stages, say
        self.environment: dict[str, str] = {}  # variables of a worker's process
        self._idle: dict[str, int] = {}  # by node, processes that wait for a worker
        self._seen: set[WorkerId] = set()  # workers that have a process
        self._starting: dict[WorkerId, float] = {}  # workers that start, and since when
        self._not_before = 0.0
        self._runtime_env: str | None = None

    def open(self) -> None:
        """Store what processes do at their start. Call it before the first worker starts."""
        if self._count == 0 or prestarted_process.has_hook():
            return
        token = secrets.token_hex(8)
        try:
            self.environment = prestarted_process.export_hook(self._run, token)
            ray_kv_state.set_prestarted_token(self._run, token)
        except Exception as error:  # whatever Ray raises where this is not as it expects
            self.environment = {}
            self._say(f"no process is started ahead of time: {error}")

    def start(self, ended: threading.Event, runtime_env: Callable[[], str | None]) -> None:
        """Begin. `runtime_env()` is that of a worker which this controller has started, as Ray has
        it: only a process with the same one fits. None: there is no such worker yet.
        """
        if self.environment:
            background("prestarter", lambda: self._keep(ended, runtime_env)).start()

    def close(self) -> None:
        """The processes that wait end."""
        if self.environment:
            with contextlib.suppress(Exception):  # the GCS may be away
                ray_kv_state.set_prestarted_token(self._run, None)

    def _keep(self, ended: threading.Event, runtime_env: Callable[[], str | None]) -> None:
        while not ended.wait(_LOOK_EVERY_S):
            with contextlib.suppress(Exception):  # any error of Ray while the head is unavailable
                for node, number in self.missing(time.monotonic()).items():
                    self._runtime_env = self._runtime_env or runtime_env()
                    if self._runtime_env is not None:
                        self._request(node, number)

    def missing(self, now: float) -> dict[str, int]:
        """Return how many processes to start now on each node."""
        placed = dict(self._nodes())
        for worker in placed.keys() - self._seen:  # it has taken one that waited
            node = placed[worker]
            self._idle[node] = max(0, self._idle.get(node, 0) - 1)
        self._seen = {*placed}
        starting = [w for w, stage in self._stages().items() if stage in ("starting", "building")]
        self._starting = {worker: self._starting.get(worker, now) for worker in starting}
        if any(now - since < _STARTING_S for since in self._starting.values()):
            self._not_before = max(self._not_before, now + _CALM_S)
        if now < self._not_before:
            return {}
        missing = {node: self._count - self._idle.get(node, 0) for node in {*placed.values()}}
        return {node: number for node, number in missing.items() if number > 0}

    def _request(self, node: str, number: int) -> None:
        try:
            request(node, number, self._runtime_env or "")
        except Exception as error:
            self._not_before = time.monotonic() + _AGAIN_S
            self._say(f"no process is started ahead of time on node {node}: {error}")
        else:
            self._idle[node] = self._idle.get(node, 0) + number


def request(node: str, number: int, runtime_env: str) -> None:
    """Ask a node's raylet to start processes of this runtime environment. Raises what gRPC does."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import (
        common_pb2,
        node_manager_pb2,
        node_manager_pb2_grpc,
        runtime_environment_pb2,
    )

    (found,) = (one for one in ray.nodes() if one["NodeID"] == node)
    info = runtime_environment_pb2.RuntimeEnvInfo  # type: ignore[attr-defined]
    message = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
        language=common_pb2.PYTHON,  # type: ignore[attr-defined]
        runtime_env_info=info(serialized_runtime_env=runtime_env),
        keep_alive_duration_secs=_KEPT_S,
        num_workers=number,
    )
    channel = init_grpc_channel(f"{found['NodeManagerAddress']}:{found['NodeManagerPort']}")
    try:
        service = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        service.PrestartWorkers(message, timeout=_REQUEST_S)
    finally:
        channel.close()
