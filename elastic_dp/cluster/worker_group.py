"""The port between the controller and the processes it directs.

A controller starts a worker, sends it commands and kills it. No method waits or raises for a worker
that is gone: what happens to workers comes back as events.
"""

from typing import Protocol

from elastic_dp.cluster.worker import Request
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.distributed.process_group import Rendezvous


class WorkerGroup(Protocol):
    def start(self, worker: WorkerId) -> None:
        """Request one more process with this identity; it may never start."""
        ...

    def send(self, worker: WorkerId, command: Request, rendezvous: Rendezvous | None) -> None: ...

    def kill(self, worker: WorkerId) -> None: ...

    def close(self) -> None:
        """Kill every process that is left."""
        ...
