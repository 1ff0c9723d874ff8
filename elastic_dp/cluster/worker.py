"""One worker process, whatever started it: a control side that takes commands, a training side that runs the job."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle
import torch

from elastic_dp.cluster.heartbeats import Page
from elastic_dp.data import Manifest, open_data
from elastic_dp.distributed.process_group import Rendezvous, use_interface
from elastic_dp.protocol.messages import (
    AbortGeneration,
    BeginTraining,
    Command,
    EndGeneration,
    FormGeneration,
    ReleaseWorker,
    ReportYourself,
    StopTraining,
    WorkerId,
    WorkerStarted,
)
from elastic_dp.spec import JobSpec
from elastic_dp.train.control import Control
from elastic_dp.train.faults import Fault, Faults
from elastic_dp.train.run import run_worker
from elastic_dp.train.session import Link, Session


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is given to run: the spec and the train function, pickled once by the driver."""

    pickled: bytes  # cloudpickle of (JobSpec, train function)
    manifest: Manifest | None
    run: str  # unique: prefixes the rendezvous
    heartbeat_host: str
    heartbeat_port: int
    token: str
    faults: tuple[Fault, ...] = ()


class Worker:
    """`deliver` may be called from any thread; `run` is the training thread until the worker is released."""

    def __init__(
        self, identity: WorkerId, job: Job, link: Link, address: str | None = None
    ) -> None:
        self.identity, self._job, self._link = identity, job, link
        self._begin = threading.Event()
        self._is_source = False
        self._session: Session | None = None
        self._page = Page()
        spec, self._train = cloudpickle.loads(job.pickled)
        self._spec: JobSpec = spec
        self._control = Control(lease_s=spec.failure.lease, renewed_at=self._page.renewed_at)
        torch.set_num_threads(spec.scaling.num_threads)
        use_interface(address)
        self._page.start_pulse(
            job.heartbeat_host,
            job.heartbeat_port,
            identity,
            job.token,
            spec.failure.heartbeat_interval_s,
        )

    def deliver(self, command: Command, rendezvous: Rendezvous | None) -> None:
        control = self._control
        match command:
            case BeginTraining(is_source=is_source):
                self._is_source = is_source
                self._begin.set()
            case FormGeneration(membership=membership):
                assert rendezvous is not None
                control.form(membership, rendezvous)
            case EndGeneration(generation=generation, after_step=after_step):
                control.end(generation, after_step)
            case AbortGeneration(generation=generation):
                control.abort(generation)
            case StopTraining(reason=reason):
                control.stop(reason)
            case ReleaseWorker(reason=reason):
                control.release(reason)
                self._begin.set()
            case ReportYourself():
                if self._session is not None:
                    self._link.post(self._session.reported())
                elif not self._begin.is_set():
                    self._link.post(WorkerStarted(self.identity))
            case _:
                raise AssertionError(f"not for a worker: {command}")

    def run(self) -> str:
        """Announce this worker, wait to begin, train. Returns why it was released."""
        self._link.post(WorkerStarted(self.identity))
        self._begin.wait()
        if self._control.release_reason is not None:
            return self._control.release_reason
        device = pick_device(self._spec.scaling.resources_per_worker)
        nccl = self._spec.scaling.resources_per_worker.get("GPU", 0) >= 1
        data = open_data(
            self._spec.data,
            virtual_workers=self._spec.scaling.num_virtual_workers,
            manifest=self._job.manifest,
        )
        self._session = Session(
            spec=self._spec,
            worker=self.identity,
            data=data,
            device=device,
            backend="nccl" if nccl else "gloo",
            link=self._link,
            status=self._page,
            control=self._control,
            is_source=self._is_source,
            faults=Faults(self._job.faults, self.identity),
        )
        return run_worker(self._train, self._session)


def pick_device(resources: Mapping[str, float]) -> torch.device:
    if resources.get("GPU", 0) > 0 and torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("cpu")


def prepare_environment(environment: dict[str, str], num_threads: int) -> None:
    """Variables that must be set before torch starts its threads or CUDA, or takes its first memory."""
    from elastic_dp.train.kind import EXACT_ENVIRONMENT

    environment.setdefault("OMP_NUM_THREADS", str(num_threads))
    # Pages of 2 MB where the system lends them: ten times less for the first touch of new memory.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for key, value in EXACT_ENVIRONMENT.items():
        environment.setdefault(key, value)
