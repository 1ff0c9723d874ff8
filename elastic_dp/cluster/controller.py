"""The controller's edge: one inbox, one coordinator, commands executed.

A single thread takes events from the inbox, asks the coordinator what to do, and does it; nothing here decides
anything. Workers, heartbeats, deaths and operators only post. Beside that thread the controller keeps what
outlives a generation: the store at which groups meet, the heartbeat socket, the record of events and metrics.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.cluster.fleet import Fleet
from elastic_dp.cluster.heartbeats import STACKS_S, HeartbeatServer
from elastic_dp.cluster.ledger import Ledger, requests, time_left_s
from elastic_dp.cluster.logs import LastWords
from elastic_dp.cluster.record import Limits, Outcome, Result, write_result
from elastic_dp.cluster.worker import WriteParts
from elastic_dp.coordinator.coordinator import Coordinator, CoordinatorConfig
from elastic_dp.coordinator.messages import (
    BeginTraining,
    Cause,
    CheckpointFound,
    CheckpointRequested,
    CheckpointSealed,
    ClaimGeneration,
    Command,
    DeadlineReached,
    Event,
    EvictWorker,
    Explain,
    FailRun,
    FindCheckpoint,
    FinishRun,
    FormGeneration,
    GenerationClaimed,
    GenerationClaimLost,
    ReleaseWorker,
    RenewLease,
    StandDown,
    StartWorker,
    StopRequested,
    WorkerFinished,
    WorkerHeard,
    WorkerId,
    WorkerLost,
)
from elastic_dp.distributed.process_group import Rendezvous, open_rendezvous_store
from elastic_dp.distributed.rendezvous_store import RendezvousStoreServer
from elastic_dp.errors import ElasticError
from elastic_dp.spec import JobSpec
from elastic_dp.storage import Store, redact_url
from elastic_dp.telemetry.journal import Journal
from elastic_dp.train.checkpointing.sealing import Sealer, SealerActions
from elastic_dp.train.controller_link import WrittenParts
from elastic_dp.train.exactness.machine_kind import why_inexact
from elastic_dp.train.interruption import TIME_IS_UP

LEFT = "left, as it was asked to"


@dataclass
class Controller:
    """Leads one run. `ledger` outlives it; `url` is the run's folder. `check`: under the run's lease, before
    anything is trained: whether the folder is of this job."""

    spec: JobSpec
    run: str
    host: str
    secret: bytes = field(repr=False)  # of the run: who has it may join, and nobody else
    journal: Journal
    ledger: Ledger = field(default_factory=Ledger)
    url: str | None = None
    logged: dict[str, Any] = field(default_factory=dict)  # the newest value of each metric
    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.inbox: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self.coordinator = Coordinator(self._rules())
        self.heartbeats = HeartbeatServer(
            self.secret, self.host, self._hear, self._keep_last_words, self.say
        )
        self.outcome: Outcome = self.ledger.facts.outcome or Outcome()
        self.ended = threading.Event()
        self.superseded = False  # another controller has the workers, the lease and the record
        self.logged_to = (0, 0)  # the last step and call of which metrics are recorded
        self._log_lock = threading.Lock()
        self._inexact: dict[str, None] = {}
        self._step = 0  # the largest that a heartbeat told
        self._begun: set[WorkerId] = set()
        self._gone: dict[WorkerId, Cause] = {}
        self._released: set[WorkerId] = set()
        self._died: set[WorkerId] = set()  # by their pulses, before anybody told them to go
        self._store: RendezvousStoreServer | None = None
        self._sealer: Sealer | None = None
        self._last_words: LastWords | None = None
        for line in self.journal.recorded():  # by a controller before this one
            self._remember(line)

    # ------------------------------------------------------------------ from other threads

    def post(self, event: Event) -> None:
        self.inbox.put(event)

    def fail(self, error: Exception) -> None:
        """A thread of this process cannot go on: the run ends with its error."""
        self.inbox.put(error)

    def broke(self, error: Exception) -> None:
        """`lead` raised, and nobody shall wait for its end."""
        self.outcome.error = self.outcome.error or f"the controller failed: {error}"
        self.ended.set()

    def _hear(self, event: Event) -> None:
        """From a pulse. A death may wait in the inbox until its worker is released; its last words come by then."""
        if isinstance(event, WorkerLost) and event.worker not in self._released:
            self._died.add(event.worker)
        self.post(event)

    def log(self, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        """Every worker sends the same, in order; the first one counts, and is written before the next is."""
        if self._sealer is not None:  # a step that is made once more has a new checkpoint
            self._sealer.log(step, metrics)
        with self._log_lock:
            if (step, call) > self.logged_to:
                self.logged_to = step, call
                self.logged |= metrics
                self.journal.metrics(step, metrics)

    def say(self, text: str) -> None:
        """What a worker wants those to know who follow the run."""
        self.journal.command(Explain(text))

    def wrote(self, worker: WorkerId, written: WrittenParts) -> None:
        """A member's word about a checkpoint."""
        if self._sealer is not None:
            self._sealer.wrote(worker, written)

    def withdrawn(self, worker: WorkerId) -> None:
        """It never had a node, and another will be asked for in its place: its end is no loss."""
        self._released.add(worker)

    def skip(self, row_groups: Sequence[str]) -> None:
        """Each worker that finishes sends all of them."""
        self.outcome.skipped = tuple(row_groups)

    def status(self) -> dict[str, Any]:
        coordinator = self.coordinator
        membership = coordinator.membership
        because = why_inexact(tuple(self._inexact), coordinator.kinds)
        return {
            "phase": "over" if self.ended.is_set() else coordinator.phase,
            "reason": coordinator.reason or self.outcome.reason,
            "generation": coordinator.generation,
            "world_size": 0 if membership is None else len(membership.seats),
            "size": coordinator.size,
            "min_workers": self.ledger.facts.min_workers or self.spec.scaling.min_workers,
            "step": max(self._step, self.outcome.step),
            "exact": self.spec.exact and not because,
            "inexact_because": because,
            "workers": dict(coordinator.workers),
            "metrics": dict(self.logged),
        }

    # --------------------------------------------------------------------------- the loop

    def open(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._store = open_rendezvous_store(self.host, self.secret)
        self._rendezvous = Rendezvous(self.host, self._store.port, self.run, self.secret)
        self.heartbeats.start()
        if self.url is not None:
            self._sealer = self._open_sealer(self.url)
            self._last_words = LastWords(Store(self.url))
            if self.ledger.inherited:  # a claim to seal under, before any member tells of parts
                if self.ledger.facts.at_most is not None:
                    self._sealer.reject(self.ledger.facts.at_most, self.ledger.highest_claimed())
                self._sealer.take_over()
                for line in self.journal.recorded():
                    self._sealer.log(line["step"], _metrics_of(line))

    def lead(self, found: Sequence[WorkerId] = ()) -> Outcome:
        """Until the run has ended, every worker is gone, or was told to go for long enough, and the result is kept.
        `found`: the workers of a controller that led before this one."""
        try:
            if not self.outcome.reason:
                self._lead(found)
        except ElasticError as error:  # of a thread: something is wrong with the run's folder
            kind = next(c for c in type(error).__mro__ if c.__module__ == ElasticError.__module__)
            self._execute(FailRun(f"{kind.__name__}: {error}", "", facts=error.args))
        except Exception as error:  # a bug of ours must end the run, not hang it
            self.outcome.error = f"the controller failed: {type(error).__name__}: {error}"
            self.outcome.traceback = traceback.format_exc()
        if self.superseded:  # its process is to end, and nothing else
            return self.outcome
        self._fleet.close()
        self.heartbeats.close()
        if self._store is not None:
            self._store.close()
        if self._sealer is not None:
            self._sealer.close()
        if self._last_words is not None:
            self._last_words.close()
        self.outcome.wall_s = time.time() - self.ledger.facts.started_at
        self.outcome.workers_lost = self.ledger.facts.lost
        self.outcome.generations = max(self.outcome.generations, self.coordinator.generation)
        self.journal.close()
        if self.outcome.error is None:
            self._keep_result()
        self.ended.set()
        return self.outcome

    def _keep_result(self) -> None:
        """Here and not in a driver: none may be attached."""
        outcome = self.outcome
        outcome.result = Result(
            name=self.spec.name,
            path=self.url or "",
            step=outcome.step,
            reason=outcome.reason,
            weights_sha256=outcome.digest,
            exact=self.spec.exact and not outcome.inexact_because,
            inexact_because=outcome.inexact_because,
            skipped=outcome.skipped,
            metrics=dict(self.logged),
            generations=outcome.generations,
            workers_lost=outcome.workers_lost,
            wall_s=outcome.wall_s,
        )
        if self.url is None:
            return
        try:
            stop = self.ledger.facts.stop
            stopped = stop is not None and stop.reason != TIME_IS_UP
            write_result(self.url, outcome.result, Limits.of(self.spec, stopped))
        except Exception as error:  # whatever a store raises; who is attached still gets the result
            where = redact_url(self.url)
            self.journal.command(Explain(f"the result cannot be written to {where}: {error}"))

    def _lead(self, found: Sequence[WorkerId]) -> None:
        clock = time.monotonic
        left_s = time_left_s(self.ledger.facts, self.spec.max_time_s)
        ends_at = None if self.spec.max_time_s is None else clock() + left_s
        if self.ledger.inherited:
            self._execute_all(self._take_over(found))
        else:
            self._execute_all(self.coordinator.start(clock()))
        while not self._done():
            deadline = self.coordinator.deadline
            waits = [t - clock() for t in (deadline, ends_at) if t is not None]
            try:
                event = self.inbox.get(timeout=max(0.0, min(waits)) if waits else None)
            except queue.Empty:
                event = DeadlineReached()
                if ends_at is not None and clock() >= ends_at:
                    ends_at, event = None, StopRequested(TIME_IS_UP)
            if isinstance(event, Exception):
                raise event
            event = self._as_asked(event)
            self._note(event)
            self._execute_all(self._decide(event))

    def _take_over(self, found: Sequence[WorkerId]) -> list[Command]:
        """Go on where another controller led: with the workers there are, and what was asked of it."""
        facts, now = self.ledger.facts, time.monotonic()
        for worker in [worker for worker in found if worker not in facts.here]:
            self._released.add(worker)
            self._let_go(
                ReleaseWorker(worker, "was told to leave before this controller took over")
            )
        found = [worker for worker in found if worker in facts.here]
        for worker, was_up in [*facts.here.items()]:
            if worker not in found and was_up:
                self.post(WorkerLost(worker, "gone when this controller took over"))
            elif worker not in found:  # it never came to be, and is no loss
                self.ledger.note(ReleaseWorker(worker, "was never started"))
        for event in requests(facts, now):
            self.post(event)
        self._begun.update(found)
        highest = self.ledger.highest_claimed()
        self.coordinator, commands = Coordinator.recover(
            self._rules(), found, highest, now, facts.stepped
        )
        return commands

    def _rules(self) -> CoordinatorConfig:
        rules, facts = rules_of(self.spec, keeps=self.url is not None), self.ledger.facts
        size, least = facts.size or rules.size, facts.min_workers or rules.min_workers
        if not least <= size <= rules.virtual_workers:
            return rules
        return dataclasses.replace(rules, size=size, min_workers=least)

    def _remember(self, line: Mapping[str, Any]) -> None:
        """A line of metrics that is recorded already; each call made one."""
        last, call = self.logged_to
        self.logged_to = line["step"], call + 1 if line["step"] == last else 1
        self.logged |= _metrics_of(line)

    def _decide(self, event: Event) -> list[Command]:
        """Not interrupted by the garbage collector: it walks through all workers, and finds that an event leaves no
        cycle. What is made while a generation of thousands forms is often what starts it; now it comes after."""
        gc.disable()
        try:
            return self.coordinator.handle(event, time.monotonic())
        finally:
            gc.enable()

    def _done(self) -> bool:
        return self.coordinator.phase == "over" and not self.coordinator.workers

    def _as_asked(self, event: Event) -> Event:
        """The end of who was asked to leave is no accident, whatever its pulse, its pipe or Ray call it."""
        match event:
            case WorkerLost(worker=worker, cause=Cause.UNKNOWN) if (
                worker in self._released and worker not in self._died
            ):
                return dataclasses.replace(event, reason=LEFT, cause=Cause.RELEASED)
        return event

    def _note(self, event: Event) -> None:
        match event:
            case WorkerHeard(step=step):
                self._step = max(self._step, step)
                if not self.ledger.facts.stepped:
                    self.ledger.note(event)
                return  # not news
            case WorkerFinished(inexact_because=because):
                self._inexact |= dict.fromkeys(because)
            case WorkerLost(worker=worker, cause=cause):
                known = self._gone.get(worker)
                self._gone[worker] = cause if known in (None, Cause.UNKNOWN) else known
                if known is not None:
                    # Its pulse, its pipe and Ray all say so; one of them knows why.
                    if known is not self._gone[worker]:
                        self.journal.event(event)
                    return
                if self._sealer is not None:
                    self._sealer.lost(worker)
                if not self.outcome.reason and worker not in self._released:
                    self.ledger.lost()
            case DeadlineReached():
                return
        self.ledger.note(event)
        self.journal.event(event)

    def _execute_all(self, commands: list[Command]) -> None:
        for command in commands:
            self.ledger.note(command)
        self.ledger.keep()
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        if isinstance(command, ReleaseWorker):
            self._released.add(command.worker)
        match command:
            case RenewLease(worker=worker, beat=beat):
                self.heartbeats.renew(worker, beat)
                return
            case FormGeneration(membership=membership):
                for seat in membership.seats:
                    self._fleet.send(seat.worker, command, self._rendezvous)
            case StartWorker(worker=worker):
                self._fleet.start(worker)
            case BeginTraining(worker=worker):
                self._begun.add(worker)
                self._fleet.send(worker, command, None)
            case EvictWorker(worker=worker, stuck=stuck):
                self.heartbeats.condemn(worker, stuck)
                if stuck:  # if its pulse does not
                    threading.Timer(STACKS_S, self._fleet.kill, [worker]).start()
                else:
                    self._fleet.kill(worker)
            case ClaimGeneration(generation=generation):
                won = self.ledger.claim(generation)
                self.superseded = self.superseded or not won
                self.post(GenerationClaimed(generation) if won else GenerationClaimLost(generation))
            case FindCheckpoint(at_most=at_most):
                self._find_checkpoint(at_most)
            case FinishRun(place=place, digest=digest, reason=reason, digests_differ=differ):
                if differ:
                    self._inexact["workers finished with different weights"] = None
                self.outcome.step, self.outcome.digest = place.step, digest
                self.outcome.reason = reason
                self.outcome.inexact_because = tuple(self._inexact)
                self._ends()
            case FailRun(error=error, traceback=text, worker=worker, facts=facts):
                self.outcome.error, self.outcome.traceback = error, text
                self.outcome.error_worker, self.outcome.error_facts = worker, facts
                self.outcome.reason = "failed"
                self._ends()
            case StandDown(reason=reason):
                self.outcome.error = self.outcome.reason = reason
                self._ends()
            case Explain():
                pass
            case ReleaseWorker(worker=worker) if self._holds_nothing(worker):
                self._let_go(command)
            case _:
                self._fleet.send(command.worker, command, None)
        self.journal.command(command)

    def _let_go(self, command: ReleaseWorker) -> None:
        """At once. The fleet is told that this is a wish, and no failure of the worker's node."""
        self._fleet.send(command.worker, command, None)
        self._fleet.kill(command.worker)

    def _ends(self) -> None:
        self.outcome.generations = self.coordinator.generation
        self.ledger.ended(self.outcome)

    def _open_sealer(self, url: str) -> Sealer:
        timeout_s = self.spec.failure.storage_timeout_s
        catalog = Catalog(Store(url, timeout_s=timeout_s, on_wait=self.say))
        return Sealer(
            catalog,
            self.spec.checkpoint,
            SealerActions(
                request_parts=lambda worker, step, parts: self._fleet.send(
                    worker, WriteParts(worker, step, tuple(parts)), None
                ),
                request_checkpoint=lambda: self.post(CheckpointRequested()),
                tell=self.say,
                sealed=lambda step: self.post(CheckpointSealed(step)),
                stand_down=self._stand_down,
                fail=self.fail,
                check=self.check,
            ),
            lease_s=self.spec.failure.run_lease_s,
            token=self.ledger.facts.lease_token,
        )

    def _stand_down(self, reason: str) -> None:
        """Another cluster holds the run."""
        self.say(reason)
        self.post(GenerationClaimLost(self.coordinator.generation + 1))

    def _find_checkpoint(self, at_most: int | None) -> None:
        if self._sealer is None:
            self.post(CheckpointFound(None))
        else:
            if at_most is not None:
                self._sealer.reject(at_most, self.coordinator.generation)
            self._sealer.find(lambda step: self.post(CheckpointFound(step)))

    def _keep_last_words(self, worker: WorkerId, words: str) -> None:
        """Of one that nobody told to go before it died."""
        unasked = worker in self._died or worker not in self._released
        if self._last_words is not None and words and unasked:
            self._last_words.keep(worker, words)

    def _holds_nothing(self, worker: WorkerId) -> bool:
        """Still starting, or waiting for a node: no user code to unwind, so nothing to wait for."""
        return worker not in self._begun


def _metrics_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("time", "step")}


def rules_of(spec: JobSpec, keeps: bool = False) -> CoordinatorConfig:
    """The coordinator's rules for a job; `keeps`: it has a storage for checkpoints."""
    scaling, failure = spec.scaling, spec.failure
    return CoordinatorConfig(
        min_workers=scaling.min_workers,
        size=scaling.max_workers,
        standby=scaling.standby,
        virtual_workers=scaling.num_virtual_workers,
        heartbeat_timeout_s=failure.heartbeat_timeout_s,
        heartbeat_interval_s=failure.heartbeat_interval_s,
        lease_s=failure.lease,
        forming_timeout_s=failure.forming_timeout,
        hang_timeout_s=failure.hang_timeout_s,
        release_timeout_s=failure.release_timeout_s,
        max_losses_without_progress=failure.max_losses_without_progress,
        max_losses_of_micro_batch=failure.max_losses_of_micro_batch,
        max_out_of_memory=failure.max_out_of_memory,
        max_user_errors=failure.max_user_errors,
        stabilization_s=scaling.stabilization_s,
        min_on_demand=scaling.min_on_demand,
        exact=spec.exact,
        keeps=keeps,
    )
