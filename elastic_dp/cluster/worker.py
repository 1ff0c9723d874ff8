"""One worker process: a control side that takes commands, and a training side that runs the job.

`Worker.run` is what a worker does from its start until it is released.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.cluster.heartbeat.shared_memory_page import ControllerAddress, SharedMemoryPage
from elastic_dp.cluster.worker_logs import WorkerLogUploader
from elastic_dp.config import JobSpec
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.data import Index, open_data
from elastic_dp.device.accelerator import has_own_communicator
from elastic_dp.device.device_checks import admit
from elastic_dp.device.gpu import is_gpu, pick_device
from elastic_dp.distributed.nccl_environment import set_nccl_environment
from elastic_dp.distributed.process_group import use_interface
from elastic_dp.distributed.rendezvous import GroupRecords, Rendezvous
from elastic_dp.errors import ClusterError
from elastic_dp.storage import Store
from elastic_dp.storage.retry import on_retry
from elastic_dp.torch_settings import apply_torch_settings
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.exactness.code_fingerprint import code_fingerprint
from elastic_dp.train.fault_injection import FaultInjector, WorkerFault
from elastic_dp.train.gang import Gang, process_batches
from elastic_dp.train.generations.worker_control import ORPHANED, WorkerControl
from elastic_dp.train.train_function import TrainFunction, fail_worker, train_until_released
from elastic_dp.train.worker_session import WorkerSession


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker runs: the spec and the train function, pickled once by the driver."""

    pickled: bytes  # cloudpickle of (JobSpec, train function)
    index: Index | None
    run: str  # unique; prefix of the names of its actors
    url: str | None  # the run's folder; None: nothing is stored
    controller: ControllerAddress  # where the worker sends its heartbeats
    secret: bytes = field(repr=False)  # of the run
    lease_token: str = ""  # of the controller's lease on the run
    faults: tuple[WorkerFault, ...] = ()
    processes: int = 1  # of each worker
    nodes: int = 1  # over which they are divided
    # The processes of all workers have one GPU, so they exchange through the host: NCCL refuses two
    # ranks on one. For checks.
    shares_gpu: bool = False


@dataclass(frozen=True, slots=True)
class WriteBlobs:
    """Also write the blobs with these names of the checkpoint after `step`, because their writer is
    lost."""

    worker: WorkerId
    step: int
    names: tuple[str, ...]


Request = m.Command | WriteBlobs | GroupRecords  # that a controller sends to workers


GANGS = "elastic_dp.extensions.gangs.followers"  # for workers of several processes
GANG_CONNECTIONS = "elastic_dp.extensions.gangs.gang_connections"  # for those on several nodes


class FollowerProcess(NamedTuple):
    """A process of a worker, as its first one knows it."""

    pid: int
    connection: Connection


def set_up(spec: JobSpec, address: str | None) -> list[str]:
    """Set what torch, NCCL and Gloo need in a process of a worker, before it looks for its device.
    `address`: of its node. Return what of the environment is overridden."""
    torch.set_num_threads(spec.scaling.num_threads)
    apply_torch_settings(spec.torch_settings)
    use_interface(address)
    return set_nccl_environment(os.environ)


def find_device(spec: JobSpec, job: WorkerJob) -> torch.device:
    """Return the device of this process. Where it does not work, the process ends."""
    resources, labels = spec.scaling.resources_per_worker, spec.scaling.label_selector
    device = pick_device(resources)
    admit(device, resources, labels, exact=spec.exact, shared=job.shares_gpu)
    return device


def train_in_process(
    job: WorkerJob,
    spec: JobSpec,
    train: TrainFunction,
    begun: Callable[[WorkerSession], object] = lambda session: None,
    *,
    on_wait: Callable[[str], None],
    worker: WorkerId,
    device: torch.device,
    link: ControllerLink,
    status: HeartbeatStatus,
    control: WorkerControl,
    gang: Gang | None,
    **more: Any,
) -> str:
    """Train in this process until its worker is released. Return why it was. `begun` gets the
    session. `on_wait`: see `open_data`. The others are fields of the session."""
    try:
        data = open_data(
            spec.data,
            virtual_workers=spec.micro_batches_by_step,
            index=job.index,
            left_out=spec.left_out,
            pin=is_gpu(device),
            timeout_s=spec.failure.storage_timeout_s,
            on_wait=on_wait,
        )
    except Exception as error:  # also what a user's dataset raises
        return fail_worker(worker, link, control, status, error)
    gpus = spec.scaling.resources_per_worker.get("GPU", 0)
    session = WorkerSession(
        spec=spec,
        worker=worker,
        data=data if gang is None else process_batches(data, gang),
        device=device,
        connects_devices=has_own_communicator(gpus) and not job.shares_gpu,
        link=link,
        status=status,
        control=control,
        code=code_fingerprint(train, constants=False),
        faults=FaultInjector(job.faults, worker, 0 if gang is None else gang.number),
        gang=gang,
        **more,
    )
    begun(session)
    return train_until_released(train, session)


class Worker:
    """A worker process. `deliver` may be called from any thread; `run` trains until the worker is
    released.
    """

    def __init__(
        self,
        identity: WorkerId,
        job: WorkerJob,
        link: ControllerLink,
        address: str | None = None,
        followers: Sequence[FollowerProcess] = (),
        listener: socket.socket | None = None,
    ) -> None:
        """`followers` are the worker's other processes on this node, if it has several. Those on
        other nodes connect to the `listener`. Raises ClusterError if they do not."""
        self.identity, self._job, self._link = identity, job, link
        self._address = address
        self._begin = threading.Event()
        self._is_source = False
        self._session: WorkerSession | None = None
        self._page = SharedMemoryPage()
        on_retry(self._page.count_retry)
        spec, self._train = cloudpickle.loads(job.pickled)
        self._spec: JobSpec = spec
        self._gangs: Any = None
        control: Callable[..., Any] = WorkerControl
        if job.processes > 1:
            self._gangs = importlib.import_module(GANGS)
            control = self._gangs.LeaderControl
        self._control = control(
            lease_s=spec.failure.lease,
            orphan_timeout_s=spec.failure.orphan_timeout,
            renewed_at=self._page.renewed_at,
        )
        if self._gangs is not None:
            connections = [follower.connection for follower in followers]
            if listener is not None:
                numbers = range(job.processes // job.nodes, job.processes)
                accept = importlib.import_module(GANG_CONNECTIONS).accept
                connections += accept(listener, job.secret, identity, numbers)
            write_fault = self._page.write_fault
            self._control.lead(connections, link.post, link.register, write_fault, link.say)
        self._rendezvous = Rendezvous(identity, job.secret, link.register)
        # Not with the variables that a process is started with: here the user's own are seen.
        for text in set_up(spec, address):
            link.say(f"{identity}: {text}")
        self._log = None if job.url is None else WorkerLogUploader(Store(job.url), identity).start()
        self.hear_from(job.controller)
        others = [follower.pid for follower in followers]
        self._page.start_sidecar(identity, job.secret, spec.failure.heartbeat_interval, others)

    def hear_from(self, controller: ControllerAddress) -> None:
        """Send heartbeats to this controller: the first one, or one that took over."""
        self._page.point_at(controller)

    def deliver(self, command: Request) -> None:
        control = self._control
        match command:
            case m.BeginTraining(is_source=is_source):
                self._is_source = is_source
                self._begin.set()
            case m.FormGeneration(membership=membership):
                control.form(membership)
            case m.PrepareGroup():
                if self._session is not None:
                    self._session.prepare(command)
            case GroupRecords(group=group):
                if group.process == 0:
                    self._rendezvous.deliver(command)
                else:
                    control.deliver(command)
            case m.EndGeneration(generation=generation, after_step=after_step):
                control.end(generation, after_step)
            case m.AbortGeneration(generation=generation):
                control.abort(generation)
            case m.StopTraining(reason=reason):
                control.stop(reason)
            case m.ReleaseWorker(reason=reason):
                control.release(reason)
                self._begin.set()
            case WriteBlobs(step=step, names=names):
                if self._session is not None and self._session.checkpoints is not None:
                    self._session.checkpoints.write(step, names)
            case m.TakeCheckpoint():
                control.request_checkpoint()
            case m.WriteDrainCheckpoint(generation=generation, writers=writers):
                control.checkpoint_state(generation, writers)
            case m.ReportState(asked=asked):
                self._link.post(self._reported(asked))
            case _:
                raise AssertionError(f"not for a worker: {command}")

    def _reported(self, asked: int) -> m.WorkerReported:
        """Return the state of this worker. Before it has a session it has none, and can begin."""
        if self._session is not None:
            return self._session.reported(asked)
        return m.WorkerReported(self.identity, 0, m.START, False, True, None, True, 0, asked)

    def run(self) -> str:
        """Announce this worker, wait for the command to begin, and train. Return why it was
        released.
        """
        try:
            return self._run()
        finally:
            if self._log is not None:
                self._log.close()

    def _run(self) -> str:
        # First of all: a worker without a GPU that works ends, and another is started.
        device = find_device(self._spec, self._job)
        self._link.post(m.WorkerStarted(self.identity))
        while not self._begin.wait(self._control.orphaned_in_s()):
            if self._control.orphaned_in_s() <= 0:
                return ORPHANED
        if self._control.release_reason is not None:
            return self._control.release_reason
        return train_in_process(
            self._job,
            self._spec,
            self._train,
            self._begun,
            on_wait=lambda text: self._link.say(f"{self.identity}: {text}"),
            worker=self.identity,
            device=device,
            link=self._link,
            status=self._page,
            control=self._control,
            gang=self._gang(device),
            is_source=self._is_source,
            checkpoints=self._checkpoints(),
            rendezvous=self._rendezvous,
        )

    def _begun(self, session: WorkerSession) -> None:
        self._session = session

    def _gang(self, device: torch.device) -> Gang | None:
        if self._gangs is None:
            return None
        try:
            gang: Gang = self._gangs.lead(
                self._control,
                self.identity,
                self._job,
                self._spec.scaling,
                device,
                self._address,
                is_source=self._is_source,
            )
            return gang
        except ClusterError as error:  # this worker ends, and is replaced
            self._link.say(f"{self.identity}: {error}")
            raise

    def _checkpoints(self) -> WorkerCheckpointer | None:
        if self._job.url is None:
            return None
        store = Store(
            self._job.url,
            timeout_s=self._spec.failure.storage_timeout_s,
            on_wait=lambda text: self._link.say(f"{self.identity}: {text}"),
        )
        return WorkerCheckpointer(
            Catalog(store),
            self._spec.checkpoint,
            self.identity,
            self._link,
            self._job.lease_token,
            self._spec.failure.run_lease_s,
        )


def prepare_environment(environment: MutableMapping[str, str], num_threads: int) -> None:
    """Set variables that torch reads when it starts threads or CUDA, or first allocates memory."""
    environment.setdefault("OMP_NUM_THREADS", str(num_threads))
    # Pages of 2 MB where the system lends them: ten times less for the first touch of new memory.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
