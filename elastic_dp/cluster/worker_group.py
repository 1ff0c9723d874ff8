"""The interface between the controller and the worker processes.

A controller starts a worker, sends it commands and kills it. No method waits, or raises for a
worker that is gone: what happens to workers is reported as events.
"""

from collections.abc import Sequence
from typing import Protocol

from elastic_dp.cluster.worker import Request
from elastic_dp.coordinator.messages import WorkerId


class WorkerGroup(Protocol):
    """Implemented on Ray actors and on plain processes."""

    def start(self, worker: WorkerId) -> None:
        """Request one more process with this identity; it may never start."""
        ...

    def send(self, workers: Sequence[WorkerId], command: Request) -> None:
        """Send a command to these workers. It is serialized once: one that forms a generation names
        all members."""
        ...

    def kill(self, worker: WorkerId) -> None: ...

    def avoid_node_of(self, worker: WorkerId) -> None:
        """Start no worker on this one's node for a while, if another node could hold it."""
        ...

    def close(self) -> None:
        """Kill all remaining processes."""
        ...
