"""The controller's edge: one inbox, one coordinator, commands executed.

A single thread takes events from the inbox, asks the coordinator what to do, and does it; nothing here decides
anything. Workers, heartbeats, deaths and operators only post. Beside that thread the controller keeps what
outlives a generation: the store at which groups meet, the heartbeat socket, the record of events and metrics.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.cluster.fleet import Fleet
from elastic_dp.cluster.heartbeats import HeartbeatServer
from elastic_dp.distributed.process_group import Rendezvous, open_store
from elastic_dp.protocol.coordinator import Coordinator, Rules
from elastic_dp.protocol.messages import (
    BeginTraining,
    ClaimGeneration,
    Command,
    DeadlineReached,
    Event,
    EvictWorker,
    Explain,
    FailRun,
    FinishRun,
    FormGeneration,
    GenerationClaimed,
    GenerationClaimLost,
    ReleaseWorker,
    RenewLease,
    StandDown,
    StartWorker,
    StopRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerHeard,
    WorkerId,
    WorkerLost,
)
from elastic_dp.spec import JobSpec
from elastic_dp.telemetry.journal import Journal


@dataclass
class Outcome:
    """How a run ended. `error` is None when it finished."""

    step: int = 0
    reason: str = ""
    digest: str = ""
    inexact_because: tuple[str, ...] = ()
    error: str | None = None
    error_worker: str = ""
    traceback: str = ""
    generations: int = 0
    workers_lost: int = 0
    wall_s: float = 0.0


@dataclass
class Controller:
    """Leads one run. `claim` creates a generation's key and says whether it was new."""

    spec: JobSpec
    run: str
    host: str
    token: str
    journal: Journal
    claim: Callable[[int], bool] = lambda generation: True
    logged: dict[str, Any] = field(default_factory=dict)  # the newest value of each metric

    def __post_init__(self) -> None:
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.coordinator = Coordinator(rules_of(self.spec))
        self.heartbeats = HeartbeatServer(self.token, self.post)
        self.outcome = Outcome()
        self.ended = threading.Event()
        self._log_seen: set[tuple[int, int]] = set()
        self._log_lock = threading.Lock()
        self._inexact: dict[str, None] = {}
        self._steps: dict[WorkerId, int] = {}
        self._begun: set[WorkerId] = set()
        self._gone: set[WorkerId] = set()
        self._lost = 0
        self._started_at = 0.0

    # ------------------------------------------------------------------ from other threads

    def post(self, event: Event) -> None:
        self.inbox.put(event)

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        """Every worker sends the same; the first one counts."""
        with self._log_lock:
            if (step, call) in self._log_seen:
                return
            self._log_seen.add((step, call))
            self.logged |= metrics
        self.journal.metrics(step, metrics)

    def status(self) -> dict[str, Any]:
        coordinator = self.coordinator
        membership = coordinator.membership
        return {
            "phase": coordinator.phase,
            "reason": coordinator.reason,
            "generation": coordinator.generation,
            "world_size": 0 if membership is None else len(membership.seats),
            "size": coordinator.size,
            "step": max(self._steps.values(), default=0),
            "workers": dict(coordinator.workers),
            "metrics": dict(self.logged),
        }

    # --------------------------------------------------------------------------- the loop

    def open(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._store = open_store()
        self._rendezvous = Rendezvous(self.host, self._store.port, self.run)
        self.heartbeats.start()

    def lead(self) -> Outcome:
        """Until the run has ended and every worker is gone, or was told to go for long enough."""
        self._started_at = time.time()
        try:
            self._lead()
        except Exception as error:  # a bug of ours must end the run, not hang it
            self.outcome.error = f"the controller failed: {type(error).__name__}: {error}"
            self.outcome.traceback = traceback.format_exc()
        self._fleet.close()
        self.heartbeats.close()
        self.outcome.wall_s = time.time() - self._started_at
        self.outcome.workers_lost = self._lost
        self.outcome.generations = self.coordinator.generation
        self.ended.set()
        return self.outcome

    def _lead(self) -> None:
        clock = time.monotonic
        ends_at = None if self.spec.max_time_s is None else clock() + self.spec.max_time_s
        self._execute_all(self.coordinator.start(clock()))
        while not self._done():
            deadline = self.coordinator.deadline
            waits = [t - clock() for t in (deadline, ends_at) if t is not None]
            try:
                event: Event = self.inbox.get(timeout=max(0.0, min(waits)) if waits else None)
            except queue.Empty:
                event = DeadlineReached()
                if ends_at is not None and clock() >= ends_at:
                    ends_at, event = None, StopRequested("max_time_s reached")
            self._note(event)
            self._execute_all(self.coordinator.handle(event, clock()))

    def _done(self) -> bool:
        return self.coordinator.phase == "over" and not self.coordinator.workers

    def _note(self, event: Event) -> None:
        match event:
            case WorkerHeard(worker=worker, step=step):
                self._steps[worker] = step
                return  # not news
            case WorkerFinished(inexact_because=because):
                self._inexact |= dict.fromkeys(because)
            case WorkerFailed(worker=worker):
                self.outcome.error_worker = worker
            case WorkerLost(worker=worker):
                if worker in self._gone:
                    return  # its pulse, its pipe and Ray all say so
                self._gone.add(worker)
                self._lost += not self.outcome.reason
            case DeadlineReached():
                return
        self.journal.event(event)

    def _execute_all(self, commands: list[Command]) -> None:
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case RenewLease(worker=worker, beat=beat):
                self.heartbeats.renew(worker, beat)
                return
            case FormGeneration(worker=worker):
                self._fleet.send(worker, command, self._rendezvous)
            case StartWorker(worker=worker):
                self._fleet.start(worker)
            case BeginTraining(worker=worker):
                self._begun.add(worker)
                self._fleet.send(worker, command, None)
            case EvictWorker(worker=worker):
                self.heartbeats.condemn(worker)
                self._fleet.kill(worker)
            case ClaimGeneration(generation=generation):
                won = self.claim(generation)
                self.post(GenerationClaimed(generation) if won else GenerationClaimLost(generation))
            case FinishRun(place=place, digest=digest, reason=reason, digests_differ=differ):
                if differ:
                    self._inexact["workers finished with different weights"] = None
                self.outcome.step, self.outcome.digest = place.step, digest
                self.outcome.reason = reason
                self.outcome.inexact_because = tuple(self._inexact)
            case FailRun(error=error, traceback=text):
                self.outcome.error, self.outcome.traceback = error, text
                self.outcome.reason = "failed"
            case StandDown(reason=reason):
                self.outcome.error = self.outcome.reason = reason
            case Explain():
                pass
            case ReleaseWorker(worker=worker) if self._holds_nothing(worker):
                self._fleet.kill(worker)
            case _:
                self._fleet.send(command.worker, command, None)
        self.journal.command(command)

    def _holds_nothing(self, worker: WorkerId) -> bool:
        """Still starting, at the end of the run: no user code to unwind, so nothing to wait for."""
        return bool(self.outcome.reason) and worker not in self._begun


def rules_of(spec: JobSpec) -> Rules:
    """The coordinator's rules for a job."""
    scaling, failure = spec.scaling, spec.failure
    return Rules(
        min_workers=scaling.min_workers,
        size=scaling.max_workers,
        standby=scaling.standby,
        virtual_workers=scaling.num_virtual_workers,
        heartbeat_timeout_s=failure.heartbeat_timeout_s,
        heartbeat_interval_s=failure.heartbeat_interval_s,
        lease_s=failure.lease,
        forming_timeout_s=failure.forming_timeout,
        release_timeout_s=failure.release_timeout_s,
        max_losses_without_progress=failure.max_losses_without_progress,
        exact=spec.exact,
    )
