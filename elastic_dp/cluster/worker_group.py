"""The port between the controller and the processes it directs.

Three methods, because that is all a controller does to a worker: have it started, tell it something, kill it. None
of them waits or raises for a worker that is gone: what happens to workers comes back as events.
"""

from typing import Protocol

from elastic_dp.cluster.worker import Request
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.distributed.process_group import Rendezvous


class WorkerGroup(Protocol):
    def start(self, worker: WorkerId) -> None:
        """Ask for one more process under this identity; it may never come."""
        ...

    def send(self, worker: WorkerId, command: Request, rendezvous: Rendezvous | None) -> None: ...

    def kill(self, worker: WorkerId) -> None: ...

    def close(self) -> None:
        """Every process that is left is killed."""
        ...
