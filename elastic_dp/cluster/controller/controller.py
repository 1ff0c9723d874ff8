"""The controller's loop: it takes events from an inbox, asks the coordinator, and executes its
commands.

One thread decides and renews leases. It waits for nothing outside this process. Another one
executes the commands in their order: it claims generations, stores the state for a successor and
talks to the cluster, which may take long or fail while the cluster's head is unavailable. Then it
tries again, and leases are renewed meanwhile.

Workers, heartbeats, process exits and operators only post events. The state beside the coordinator
is in parts with one owner each: metrics, exits of workers, checkpoints, the report of the run, and
the state for a successor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs
from elastic_dp.cluster.controller.metric_log import MetricLog
from elastic_dp.cluster.controller.run_report import RunReport
from elastic_dp.cluster.controller.run_times import RunTimes
from elastic_dp.cluster.controller.slow_worker_watch import SlowWorkerWatch
from elastic_dp.cluster.controller.worker_exits import WorkerExits
from elastic_dp.cluster.heartbeat.heartbeat_server import STACKS_S, HeartbeatServer
from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.runs.controller_state import (
    ControllerStateStore,
    LossCounted,
    pending_requests,
    time_left_s,
)
from elastic_dp.cluster.worker import WriteBlobs
from elastic_dp.cluster.worker_group import WorkerGroup
from elastic_dp.cluster.worker_logs import CrashLogWriter
from elastic_dp.config import JobSpec
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator, CoordinatorConfig
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.distributed.rendezvous import GroupName, MemberRecord, RendezvousTables
from elastic_dp.errors import ElasticError, StateDiffers
from elastic_dp.run_record import RunOutcome
from elastic_dp.storage import Store, redact_url
from elastic_dp.telemetry.journal import Journal
from elastic_dp.threads import background
from elastic_dp.train.checkpointing.checkpoint_committer import (
    CheckpointCommitter,
    CommitterActions,
)
from elastic_dp.train.interruption import INTERRUPTED_REASON, TIME_IS_UP
from elastic_dp.train.log_sender import LoggedCall

_Tasks = list[Callable[[], None]]


class Controller:
    """Leads one run."""

    def __init__(
        self,
        spec: JobSpec,
        journal: Journal,
        *,
        host: str,
        secret: bytes,
        state_store: ControllerStateStore | None = None,
        url: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`host` is the address at which workers reach this process. `secret` is the run's: only a
        process that has it may join.

        `state_store` outlives the controller. `url` is the run's folder. `check` raises if the
        folder belongs to another job; it is called under the run's lease before training starts.
        """
        self.spec, self.journal, self.url = spec, journal, url
        self.state_store = ControllerStateStore() if state_store is None else state_store
        self.inbox: queue.SimpleQueue[m.Event | Exception] = queue.SimpleQueue()
        self.coordinator = Coordinator(self._coordinator_config())
        self.heartbeats = HeartbeatServer(secret, host, self._hear, self._write_crash_log, self.say)
        self.metrics = MetricLog(journal)
        self.times = RunTimes(journal)
        self.slow_workers = SlowWorkerWatch(journal, spec.failure.replace_slow, self.post)
        self.exits = WorkerExits()
        self.report = RunReport(spec, url, self.state_store.state.outcome)
        self.committer: CheckpointCommitter | None = None  # of a run with a folder, once open
        self._store: Store | None = None  # of the checkpoints
        self._check = check
        self.ended = threading.Event()
        # what runs before the state is stored, and what runs afterwards; None: no more will come
        self._tasks: queue.SimpleQueue[tuple[_Tasks, _Tasks] | None] = queue.SimpleQueue()
        self._commands = background("commands", self._run_tasks, self.fail)
        self._stores = OutageNotice("storing the state of the run in the cluster", self.say)
        self._claims = OutageNotice("claiming a generation in the cluster", self.say)
        # another controller has the workers, the lease and the run's record
        self.superseded = False
        self._rendezvous = RendezvousTables()
        self._crash_logs: CrashLogWriter | None = None

    @property
    def outcome(self) -> RunOutcome:
        return self.report.outcome

    # ------------------------------------------------------------------ from other threads

    def post(self, event: m.Event) -> None:
        self.inbox.put(event)

    def fail(self, error: Exception) -> None:
        """End the run with the error of a thread of this process."""
        self.inbox.put(error)

    def broke(self, error: Exception) -> None:
        """Handle an exception of `lead`: wake all who wait for the end."""
        if not self.outcome.error:
            self.outcome.error = f"the controller failed: {error}"
        self.ended.set()

    def register(self, record: MemberRecord) -> None:
        """Register a process for a group that forms. The last one completes it."""
        complete = self._rendezvous.add(record)
        if complete is not None:
            self._worker_group.send(*complete)

    def log_all(self, calls: Sequence[LoggedCall], sent_at: float) -> bool:
        """Record calls of `ctx.log` that a worker sent at `sent_at` (of its `time.monotonic`).

        Returns False if an earlier one is not recorded yet.
        """
        ahead = time.time() - sent_at  # of the worker's clock
        all_recorded = True
        for each in calls:
            step, _ = each.call
            if self.committer is not None:  # a repeated step makes a new checkpoint
                self.committer.log(step, each.metrics)
            at = each.logged_at + ahead
            all_recorded &= self.metrics.log(each.call, each.previous, each.metrics, at)
        return all_recorded

    def say(self, text: str) -> None:
        """Write a text to the journal, for clients that follow the run."""
        self.journal.command(m.Explain(text))

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        """Take a member's report about its part of a checkpoint."""
        if self.committer is not None:
            self.committer.wrote(worker, written)

    def withdrawn(self, worker: WorkerId) -> None:
        """Note that a worker that never had a node is replaced: its end is no loss."""
        self.exits.released.add(worker)

    def skipped(self, row_groups: Sequence[str]) -> None:
        """Record skipped row groups. Each worker that finishes sends all of them."""
        self.outcome.skipped = tuple(row_groups)

    def status(self) -> dict[str, Any]:
        coordinator = self.coordinator
        membership, workers = coordinator.membership, coordinator.workers
        members = () if membership is None else membership.members
        because = self.report.inexact_because(coordinator.kinds)
        now = time.time()
        age_s = max(0.0, now - self.state_store.state.started_at)
        return {
            "phase": "over" if self.ended.is_set() else coordinator.phase,
            "reason": coordinator.reason or self.outcome.reason,
            "generation": coordinator.generation,
            "world_size": sum(member.worker in workers for member in members),
            "size": coordinator.requested_size,
            "size_limit": coordinator.size_limit,
            "min_workers": self.requested_sizes()[0],
            "step": self.outcome.step or coordinator.step,
            "exact": self.spec.exact and not because,
            "inexact_because": because,
            "sharding": self.spec.sharding,
            "workers": workers,
            "metrics": dict(self.metrics.newest),
            "failed": self.outcome.error is not None,
            "max_steps": self.spec.max_steps,
            "led_s": age_s,
            "started_age_s": age_s,
            "rows_per_s": self.times.rows_per_s(),
            "slow": [dataclasses.asdict(one) for one in self.slow_workers.found],
            "failures": coordinator.failures,
            **_newest(self.journal, now),
        }

    def requested_sizes(self) -> tuple[int, int]:
        """Return the minimum and the number of workers that the job, or its operator, asks for."""
        least = self.state_store.state.min_workers or self.spec.scaling.min_workers
        return least, self.coordinator.requested_size

    @property
    def store_retries(self) -> dict[str, int]:
        """How many requests to stores were retried: to the run's folder by this process, and to
        any store by workers.
        """
        checkpoints = 0 if self._store is None else self._store.counts.retries
        own = self.journal.store_retries + checkpoints
        return {"controller": own, "workers": self.times.store_retries}

    def _hear(self, event: m.Event) -> None:
        """From a heartbeat sidecar."""
        if isinstance(event, m.WorkerLost) and event.worker not in self.exits.released:
            self.exits.died.add(event.worker)
        self.post(event)

    def _write_crash_log(self, worker: WorkerId, words: str) -> None:
        if self._crash_logs is not None and words and self.exits.was_unasked(worker):
            self._crash_logs.keep(worker, words)

    def _stand_down(self, reason: str) -> None:
        """Stop leading, because another cluster holds the run."""
        self.say(reason)
        self.post(m.GenerationClaimLost(self.coordinator.generation + 1))

    # --------------------------------------------------------------------------- the loop

    def open(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self.heartbeats.start()
        if self.url is not None:
            self.committer = self._open_committer(self.url)
            self._crash_logs = CrashLogWriter(Store(self.url))

    def _open_committer(self, url: str) -> CheckpointCommitter:
        failure, state = self.spec.failure, self.state_store.state
        self._store = Store(url, timeout_s=failure.storage_timeout_s, on_wait=self.say)
        committer = CheckpointCommitter(
            Catalog(self._store),
            self.spec.checkpoint,
            CommitterActions(
                request_blobs=lambda worker, step, names: self._worker_group.send(
                    [worker], WriteBlobs(worker, step, tuple(names))
                ),
                request_checkpoint=partial(self.post, m.CheckpointRequested()),
                tell=self.say,
                committed=lambda step, duration_s: self.post(
                    m.CheckpointCommitted(step, round(duration_s, 3))
                ),
                stand_down=self._stand_down,
                fail=self.fail,
                check=self._check or (lambda: None),
            ),
            lease_s=failure.run_lease_s,
            token=state.lease_token,
        )
        if self.state_store.inherited:  # claim the right to commit before members report parts
            if state.at_most is not None:
                committer.reject(state.at_most, self.state_store.highest_claimed())
            committer.take_over()
            if state.stepped:
                committer.training_began()
            for step, logged in self.metrics.recorded():
                committer.log(step, logged)
        return committer

    def _find_checkpoint(self, at_most: int | None, generation: int) -> None:
        """Post the newest checkpoint of step `at_most` or earlier; later ones are rejected from now
        on.
        """
        if self.committer is None:
            self.post(m.CheckpointFound(None))
            return
        if at_most is not None:
            self.committer.reject(at_most, generation)
        self.committer.find(lambda step: self.post(m.CheckpointFound(step)))

    def lead(self, found: Sequence[WorkerId] = ()) -> RunOutcome:
        """Lead the run and return its outcome.

        It returns when the run has ended, every worker is gone or has had enough time to leave, and
        the result is stored. `found` are the workers of a previous controller.
        """
        self._commands.start()
        try:
            if not self.report.has_ended:
                self._lead(found)
        except ElasticError as error:  # of a thread: something is wrong with the run's folder
            self._fail(error)
        except Exception as error:  # a bug of this package must end the run, not block it
            self.outcome.error = f"the controller failed: {type(error).__name__}: {error}"
            self.outcome.traceback = traceback.format_exc()
        if self.superseded:  # its process is to end, and nothing else
            return self.outcome
        self._tasks.put(None)
        self._commands.join()
        self._close()
        self.ended.set()
        return self.outcome

    def _fail(self, error: ElasticError) -> None:
        kind = next(c for c in type(error).__mro__ if c.__module__ == ElasticError.__module__)
        self._execute(m.FailRun(f"{kind.__name__}: {error}", "", facts=error.args))

    def _close(self) -> None:
        self._worker_group.close()
        self.heartbeats.close()
        if self.committer is not None:
            self.committer.close()
        self._note_last_commits()
        if self._crash_logs is not None:
            self._crash_logs.close()
        self.metrics.close()
        state = self.state_store.state
        self.report.close(state, self.coordinator.generation, self.metrics.newest)
        self.journal.close()
        try:
            self.report.write_result(state)
        except Exception as error:  # any error of a store; attached drivers still get the result
            where = redact_url(self.url or "")
            self.say(f"the result cannot be written to {where}: {error}")

    def _note_last_commits(self) -> None:
        """Record the checkpoints that were committed after the last worker had left, and what was
        wrong with the first of them."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self.inbox.get_nowait()
                if isinstance(event, m.CheckpointCommitted):
                    self._note(event)
                elif isinstance(event, StateDiffers) and self.outcome.error is None:
                    self._fail(event)

    def _lead(self, found: Sequence[WorkerId]) -> None:
        clock = time.monotonic
        left_s = time_left_s(self.state_store.state, self.spec.max_time_s)
        ends_at = None if self.spec.max_time_s is None else clock() + left_s
        self.times.begin(
            self.coordinator.requested_size,
            takes_over=self.state_store.inherited,
            rows_by_step={
                step: number * self.spec.data.micro_batch_size
                for step, number in self.spec.micro_batches_by_step.items()
            },
        )
        if self.state_store.inherited:
            self._execute_all(self._take_over(found))
        else:
            self._execute_all(self.coordinator.start(clock()))
        while not self._done():
            deadline = self.coordinator.deadline
            waits = [t - clock() for t in (deadline, ends_at) if t is not None]
            try:
                event = self.inbox.get(timeout=max(0.0, min(waits)) if waits else None)
            except queue.Empty:
                event = m.DeadlineReached()
                if ends_at is not None and clock() >= ends_at:
                    ends_at, event = None, m.StopRequested(TIME_IS_UP)
            if isinstance(event, Exception):
                raise event
            event = self._with_absent(self.exits.relabel(event))
            self._note(event)
            self._execute_all(self._decide(event))

    def _with_absent(self, event: m.Event) -> m.Event:
        """Add the members that have not registered to a failed member's report."""
        if not isinstance(event, m.WorkerStopped) or not event.members_missing:
            return event
        membership = self.coordinator.membership
        if membership is None or membership.generation != event.generation:
            return event
        here = self._rendezvous.registered(_main_group(membership))
        if here is None:
            return event
        absent = [member.worker for member in membership.members if member.worker not in here]
        return dataclasses.replace(event, unreachable=tuple(absent))

    def _take_over(self, found: Sequence[WorkerId]) -> list[m.Command]:
        """Continue the run of a previous controller, with its workers and the requests that it had
        accepted.
        """
        state, now = self.state_store.state, time.monotonic()
        for worker in [worker for worker in found if worker not in state.here]:
            self.exits.released.add(worker)
            told = m.ReleaseWorker(worker, "was told to leave before this controller took over")
            self._tasks.put(([], [partial(self._release_now, told)]))
        found = [worker for worker in found if worker in state.here]
        for worker, was_up in [*state.here.items()]:
            if worker not in found and was_up:
                self.post(m.WorkerLost(worker, "gone when this controller took over"))
            elif worker not in found:  # it never came to be, and is no loss
                self.state_store.record(m.ReleaseWorker(worker, "was never started"))
        for event in pending_requests(state, now):
            self.post(event)
        self.exits.begun.update(found)
        highest = self.state_store.highest_claimed()
        self.coordinator, commands = Coordinator.recover(
            self._coordinator_config(), found, highest, now, state.stepped
        )
        return commands

    def _coordinator_config(self) -> CoordinatorConfig:
        config = coordinator_config_of(self.spec, checkpointing=self.url is not None)
        state = self.state_store.state
        size, least = state.size or config.size, state.min_workers or config.min_workers
        if not least <= size <= config.virtual_workers:
            return config
        return dataclasses.replace(config, size=size, min_workers=least)

    def _decide(self, event: m.Event) -> list[m.Command]:
        """Handle an event without the garbage collector, which would visit all workers.

        Events leave no cycles. The many objects that a forming generation of thousands allocates
        often trigger a collection; now it runs afterwards.
        """
        gc.disable()
        try:
            return self.coordinator.handle(event, time.monotonic())
        finally:
            gc.enable()

    def _done(self) -> bool:
        return self.coordinator.phase == "over" and not self.coordinator.workers

    def _note(self, event: m.Event) -> None:
        """Record an event before it is handled."""
        match event:
            case m.HeartbeatReceived(step=step):
                self.times.heard(event)
                self.slow_workers.heard(event, self.coordinator.membership)
                if step and not self.state_store.state.stepped:  # the run's first
                    self.state_store.record(event)
                    if self.committer is not None:
                        self.committer.training_began()
                return  # not news
            case m.DeadlineReached():
                return
            case m.WorkerPlaced():
                self.slow_workers.placed(event)
            case m.WorkerFinished(inexact_because=because):
                self.report.add_inexact(because)
            case m.WorkerLost(worker=worker, cause=cause):
                had_ended = worker in self.exits.causes
                if not self.exits.learn(worker, cause):
                    return
                if had_ended:  # only the cause is new
                    self.journal.event(event)
                    return
                if self.committer is not None:
                    self.committer.lost(worker)
                self.times.lost(worker)
                self.slow_workers.lost(worker)
                expected = self.report.has_ended or worker in self.exits.released
                if worker in self.exits.evicted or not expected:
                    lost = self.state_store.state.lost + 1
                    self.state_store.change(lost=lost)
                    self.journal.event(LossCounted(lost))
        interrupted = isinstance(event, m.StopRequested) and event.reason == INTERRUPTED_REASON
        if interrupted and self._store is not None:  # nobody waits for a store that stays away
            self._store.raise_when_late()
        self.state_store.record(event)
        self.journal.event(event)

    def _execute_all(self, commands: list[m.Command]) -> None:
        """Execute commands. The state that follows from them is stored before. Only the end of a
        generation does not wait for that, because a successor of this controller ends it, too, nor
        does a preparation, from which nothing follows."""
        urgent: _Tasks = []
        tasks: _Tasks = []
        for command in commands:
            self.state_store.record(command)
        for command in commands:
            if (task := self._begin(command)) is not None:
                is_urgent = isinstance(command, m.AbortGeneration | m.PrepareGroup)
                (urgent if is_urgent else tasks).append(task)
        if urgent or tasks or self.state_store.has_changed:
            self._tasks.put((urgent, tasks))

    def _execute(self, command: m.Command) -> None:
        """Execute a command in this thread."""
        task = self._begin(command)
        self._stores.insist(self.state_store.save)
        if task is not None:
            task()

    def _begin(self, command: m.Command) -> Callable[[], None] | None:
        """Do what only this process sees, and return the rest of a command, for the thread of
        commands."""
        if isinstance(command, m.RenewLease):
            self.heartbeats.renew(command.worker, command.beat)
            return None
        self.journal.command(command)
        send = self._worker_group.send
        match command:
            case m.FormGeneration(membership=membership):
                members = [member.worker for member in membership.members]
                self._rendezvous.begin(_main_group(membership))
                return partial(send, members, command)
            case m.PrepareGroup(workers=workers):
                return partial(send, workers, command)
            case m.StartWorker(worker=worker):
                return partial(self._worker_group.start, worker)
            case m.AvoidNode(worker=worker):
                return partial(self._worker_group.avoid_node_of, worker)
            case m.EvictWorker(worker=worker, stuck=stuck):
                self.exits.evicted.add(worker)
                self.heartbeats.evict(worker, stuck)
                if not stuck:
                    return partial(self._worker_group.kill, worker)
                # if its sidecar does not
                threading.Timer(STACKS_S, self._worker_group.kill, [worker]).start()
            case m.ClaimGeneration(generation=generation):
                # The next generation waits for it, and it follows from nothing that is stored.
                background("claim", partial(self._claim, generation), self.fail).start()
            case m.FindCheckpoint(at_most=at_most):
                return partial(self._find_checkpoint, at_most, self.coordinator.generation)
            case m.FinishRun() | m.FailRun() | m.StandDown():
                self.times.flush()
                outcome = self.report.end(command, self.coordinator.generation)
                self.state_store.change(outcome=outcome)
            case m.ReleaseWorker(worker=worker):
                self.exits.released.add(worker)
                if worker not in self.exits.begun:
                    return partial(self._release_now, command)
                return partial(send, [worker], command)
            case m.BeginTraining(worker=worker):
                self.exits.begun.add(worker)
                return partial(send, [worker], command)
            case m.WorkerCommand(worker=worker):
                return partial(send, [worker], command)
        return None

    # ------------------------------------------------------------------ the thread of commands

    def _run_tasks(self) -> None:
        while (waiting := self._tasks.get()) is not None:
            urgent, tasks = waiting
            for task in urgent:
                task()
            self._stores.insist(self.state_store.save)
            for task in tasks:
                task()

    def _claim(self, generation: int) -> None:
        won = self._claims.insist(partial(self.state_store.claim, generation), self.ended)
        if won is None:
            return
        self.superseded = self.superseded or not won
        self.post(m.GenerationClaimed(generation) if won else m.GenerationClaimLost(generation))

    def _release_now(self, command: m.ReleaseWorker) -> None:
        """Release and kill a worker at once.

        The worker group is told first, so that this does not count as a failure of the worker's
        node.
        """
        self._worker_group.send([command.worker], command)
        self._worker_group.kill(command.worker)


def _newest(journal: Journal, now: float) -> dict[str, Any]:
    """Return the newest decision and the newest checkpoint, with their ages by the clock that wrote
    the journal. The age of a checkpoint from which the run went on is not known.
    """
    kinds = ("Explain", "CheckpointCommitted", "CheckpointFound")
    said, committed, found = (journal.newest.get(kind) for kind in kinds)
    event = said and {"text": said["text"], "age_s": max(0.0, now - said["time"])}
    checkpoint = committed and {
        "step": committed["step"],
        "age_s": max(0.0, now - committed["time"]),
        "duration_s": committed.get("duration_s"),
    }
    in_order = [kind for kind in list(journal.newest) if kind in kinds[1:]]
    if found and in_order[-1] == kinds[2] and found["step"] != (checkpoint or {}).get("step"):
        checkpoint = found["step"] and {"step": found["step"], "age_s": None, "duration_s": None}
    return {"newest_event": event, "newest_checkpoint": checkpoint or None}


def _main_group(membership: m.Membership) -> GroupName:
    return GroupName.main(membership.generation, membership.prepared)


def coordinator_config_of(spec: JobSpec, checkpointing: bool = False) -> CoordinatorConfig:
    """The coordinator's configuration for a job. `checkpointing`: there is storage for it."""
    scaling, failure = spec.scaling, spec.failure
    return CoordinatorConfig(
        min_workers=scaling.min_workers,
        size=scaling.max_workers,
        standby=scaling.standby,
        virtual_workers=scaling.num_virtual_workers,
        heartbeat_timeout_s=failure.heartbeat_timeout_s,
        heartbeat_interval_s=failure.heartbeat_interval,
        lease_s=failure.lease,
        forming_timeout_s=failure.forming_timeout,
        hang_timeout_s=failure.hang_timeout_s,
        release_timeout_s=failure.lease,
        max_losses_without_progress=failure.max_losses_without_progress,
        max_user_errors=failure.max_user_errors,
        stabilization_s=scaling.stabilization_s,
        balances=scaling.balance == "measured",
        exact=spec.exact,
        checkpointing=checkpointing,
    )
