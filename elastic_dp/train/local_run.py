"""Runs a user's train function in this process, alone and without Ray (`fit(local=True)`)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import (
    Event,
    Member,
    Membership,
    TrainingPosition,
    WorkerFinished,
    WorkerReady,
    WorkerStopped,
)
from elastic_dp.distributed.rendezvous import MemberRecord
from elastic_dp.errors import Interrupted, LeaseLost
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing.checkpoint_committer import (
    CheckpointCommitter,
    CommitterActions,
)
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.exactness.machine_kind import deterministic_kernels
from elastic_dp.train.generations.worker_control import Released, WorkerControl
from elastic_dp.train.generations.worker_progress import LogCall
from elastic_dp.train.interruption import INTERRUPTED, TIME_IS_UP, is_ours_to_handle
from elastic_dp.train.step.batch_source import BatchSource
from elastic_dp.train.train_function import TrainFunction, call_train_function
from elastic_dp.train.worker_session import WorkerSession


@dataclass
class LocalRun(ControllerLink, HeartbeatStatus):
    """A group of one worker in this process: the same session with a minimal controller."""

    spec: JobSpec
    data: BatchSource
    device: torch.device
    logged: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    on_log: Callable[[dict[str, Any]], None] | None = None
    on_say: Callable[[str], None] | None = None
    url: str | None = None  # the run's folder; None: no checkpoints
    # Raises unless the run is of this job; called under its lease.
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.control = WorkerControl()
        self._generation = 0
        self._failure: Exception | None = None
        self._session: WorkerSession | None = None
        self._checkpoints: WorkerCheckpointer | None = None
        self._committer: CheckpointCommitter | None = None
        if self.url is not None:
            timeout_s = self.spec.failure.storage_timeout_s
            self._store = Store(self.url, timeout_s=timeout_s, on_wait=self.say)
            catalog = Catalog(self._store)
            kept = WorkerCheckpointer(catalog, self.spec.checkpoint, "w1", self)
            self._checkpoints = kept
            self._committer = CheckpointCommitter(
                catalog,
                self.spec.checkpoint,
                CommitterActions(
                    request_blobs=lambda worker, step, names: kept.write(step, names),
                    request_checkpoint=self.control.request_checkpoint,
                    tell=self.say,
                    committed=lambda step, duration_s: None,
                    stand_down=lambda reason: self._fail(LeaseLost(reason)),
                    fail=self._fail,
                    check=lambda: self.check(),
                ),
                lease_s=self.spec.failure.run_lease_s,
            )

    @property
    def step(self) -> int:
        """The last committed step."""
        return 0 if self._session is None else self._session.position.step

    def run(self, train: TrainFunction) -> WorkerSession:
        """Runs the train function. User errors are raised as they are, for pdb and pytest. Ctrl-C
        and SIGTERM take a checkpoint at the head of the loop and raise Interrupted there. A second
        signal ends the run at once."""
        session = WorkerSession(
            spec=self.spec,
            worker="w1",
            data=self.data,
            device=self.device,
            connects_devices=False,
            link=self,
            status=self,
            control=self.control,
            is_source=True,
            checkpoints=self._checkpoints,
        )
        self._session = session
        threads = torch.get_num_threads()
        torch.set_num_threads(self.spec.scaling.num_threads)
        limit = threading.Timer(self.spec.max_time_s or 0.0, self.control.stop, [TIME_IS_UP])
        if self.spec.max_time_s is not None:
            limit.start()
        try:
            kernels = deterministic_kernels(self.spec.exact, session.inexact_because, self.device)
            with kernels as session.listen_to_warnings, self._interruptible(session):
                call_train_function(train, session)
                with contextlib.suppress(Released):
                    session.serve_until_released()
                if self._failure is not None and not self.digest:  # while it was being made
                    raise self._failure
        except Released:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            limit.cancel()
            if self._checkpoints is not None and self._committer is not None:
                self._checkpoints.close()
                self._committer.close()
            torch.set_num_threads(threads)
        return session

    @contextlib.contextmanager
    def _interruptible(self, session: WorkerSession) -> Iterator[None]:
        """Handles signals. Outside of the loop they end the run at once. Their handlers do not
        change if this is not the main thread."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.control.interrupted or not session.loop.opened or session.loop.exhausted:
                raise Interrupted(128 + number)
            self.control.interrupted = number
            self._store.raise_when_late()  # a full disk must not hold up the end
            self.say(INTERRUPTED)

        both = (signal.SIGINT, signal.SIGTERM) if self._checkpoints is not None else ()
        before = {
            number: signal.signal(number, interrupt) for number in both if is_ours_to_handle(number)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def post(self, event: Event) -> None:
        match event:
            case WorkerReady() if self._committer is not None:
                self._committer.training_began()
                self._committer.find(
                    lambda step: self._form(TrainingPosition(0), False, step is not None)
                )
            case WorkerReady():
                self._form(TrainingPosition(0), has_state=False)
            case WorkerStopped(position=position, has_state=has_state):
                if self.control.release_reason is None:
                    self._form(position, has_state)
            case WorkerFinished(digest=digest):
                self.digest = digest
                self.control.release("finished")

    def log(self, call: LogCall, previous: LogCall | None, metrics: Any) -> None:
        step, _ = call
        record = {"step": step, **metrics}
        self.logged.append(record)
        if self._committer is not None:
            self._committer.log(step, metrics)
        if self.on_log is not None:
            self.on_log(record)

    def say(self, text: str) -> None:
        if self.on_say is not None:
            self.on_say(text)

    def register(self, record: MemberRecord) -> None:
        raise AssertionError("one worker has nobody to meet")

    def wrote(self, worker: str, written: WrittenBlobs) -> None:
        assert self._committer is not None
        self._committer.wrote(worker, written)

    def _fail(self, error: Exception) -> None:
        """Ends the run: another process holds its folder, or it cannot be written any more."""
        self._failure = error
        self.control.release(str(error))

    def _form(self, position: TrainingPosition, has_state: bool, restore: bool = False) -> None:
        self._generation += 1
        member = Member("w1", ((0, self.spec.scaling.num_virtual_workers),), position, has_state)
        membership = Membership(self._generation, (member,), "w1", 60.0, restore=restore)
        self.control.form(membership)
