"""A process on each node of a run's workers that waits for a replacement: it has connected to Ray
and imported torch, which are most of a new worker's time to start.

Ray has no call for this. But a process whose task is cancelled while it starts stays, and Ray gives
it to the next actor with the same environment on that node. It holds no CPU and no GPU, and some
0.35 GB of memory. Ray ends idle processes of a node that are more than its free CPUs, so a node
whose CPUs are all taken gets none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_dp.cluster.ray import private
from elastic_dp.coordinator.messages import WorkerId

_CALM = 2  # looks in which no worker starts, before a process is started that would delay it
_STARTS_S = 0.2  # so long after a task is submitted Ray starts a process for it
_LEAST_BYTES = 4 << 30  # of a node's memory, as Ray has it: a smaller one gets no process


class WarmProcesses:
    """Keeps them. Not thread-safe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` has the variables of a worker's process."""
        self.environment = dict(environment)
        if private.SETUP_HOOK not in os.environ:  # the user has one
            # Imports torch's compiler, as the first optimizer does, and asks CUDA for nothing.
            self.environment[private.SETUP_HOOK] = "torch.compiler.disable"
        self._nodes: set[str] = set()  # that have one, or have no room for one
        self._seen: set[WorkerId] = set()
        self._calm = 0

    def refill(self, nodes: Mapping[WorkerId, str], stages: Mapping[WorkerId, str]) -> None:
        """Starts processes where they lack. Call it every few seconds. `nodes` has the node of each
        worker that has a process, and `stages` what workers are doing. Raises what Ray raises."""
        for worker in nodes.keys() - self._seen:
            self._nodes.discard(nodes[worker])  # it has taken the one that was there
        self._seen = {*nodes}
        starts = any(stages.get(worker) in ("starting", "building") for worker in nodes)
        self._calm = 0 if starts else self._calm + 1
        wanted = {*nodes.values()} - self._nodes
        if self._calm >= _CALM and wanted:
            free = private.free_resources()
            large = (n for n in ray.nodes() if n["Resources"].get("memory", 0) >= _LEAST_BYTES)
            ids = (node["NodeID"] for node in large)
            self._start([n for n in ids if n in wanted and free.get(n, {}).get("CPU", 0) >= 1])
            self._nodes |= wanted

    def _start(self, nodes: Sequence[str]) -> None:
        environment, tasks = {"env_vars": self.environment}, []
        for node in nodes:
            there: Any = NodeAffinitySchedulingStrategy(node, soft=False)
            options = _nothing.options(scheduling_strategy=there, runtime_env=environment)
            tasks.append(options.remote())
        if tasks:
            time.sleep(_STARTS_S)
        for task in tasks:
            ray.cancel(task)


@ray.remote(num_cpus=0, max_retries=0)
def _nothing() -> None:
    """Is cancelled before it runs."""
