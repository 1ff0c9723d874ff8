"""The coordinator: who trains together, since when, until when, and why.

It is a state machine without clock, I/O, threads or random numbers. Events and the time go in,
commands come out; a journal of the events replays a run. Its driver calls `start`, then `handle`
for every event, and again with `DeadlineReached` when its `deadline` comes. The phases it goes
through are in `phases`.

Three things always hold:

* A generation is announced only after it was claimed, and after the one before it can make no
  further step: one of its members said that it is out (no step completes without every member), or
  all the others are confirmed dead, or the lease of its members ran out. A worker that was evicted
  but not confirmed dead may be alive.
* The source of state is a most advanced worker among those that have all of it. A worker that has
  not is given everything, and never counts as a survivor. If no worker has state, the newest
  committed checkpoint is the truth, and without one the run is lost. Before any member was past
  forming, and without a checkpoint, the truth is the initial weights of one worker, the initial
  source; another may take its place if it dies.
* A message about an older generation changes nothing, and an identity is used once.

A coordinator that slept, or heard no worker for a while, confirms by a claim that it still leads
before it acts. No worker that is heard is evicted for being slow, but only for not going on
(`hang_detector`), and none at all for silence while the group makes steps. Members of one
generation differ by at most a step; one that is found further behind cannot be brought up and is
replaced. While the run is being stopped, `min_workers` does not hold it up: one worker is enough to
end it.

Each part owns its state, and knows only those before it; nobody assigns another's fields:

    run_state            configuration, sizes, phase, timers, commands to be sent
    leadership           claims; events that are deferred while it is in doubt who leads
    state_lineage        whose state is the run's, and who fits it
    generation           the present one: its members, how far it is, and its end
    failure_policy       what losses cost: budgets, pauses
    worker_registry      every worker, from its request to its certain end
    hang_detector        workers that live and do not go on
    closing              how a run ends
    replica_mismatch     what follows when members' weights differ
    admission            who may become a member, and whose initial weights count
    drain_checkpointer   checkpoints: asked for, and the last one of workers that must go
    change_policy        when the present generation should end for a better one
    membership_planner   the members of the next generation, and when it is safe to form it
    takeover             replacing a controller that is gone
"""

import math
from collections.abc import Iterable

from elastic_dp.coordinator import closing
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.admission import Admission
from elastic_dp.coordinator.change_policy import ChangePolicy
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig as CoordinatorConfig
from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer
from elastic_dp.coordinator.failure_policy import FailurePolicy
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.hang_detector import HangDetector
from elastic_dp.coordinator.leadership import Leadership
from elastic_dp.coordinator.membership_planner import MembershipPlanner
from elastic_dp.coordinator.messages import Command, Event, Membership, WorkerId
from elastic_dp.coordinator.phases import Phase as Phase
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.takeover import Takeover
from elastic_dp.coordinator.worker_registry import DEPARTED_STAGES, WorkerRegistry
from elastic_dp.coordinator.worker_state import Identities, Stage, WorkerState
from elastic_dp.wording import counted

FROM_WORKERS = (
    m.HeartbeatReceived,
    m.WorkerStarted,
    m.WorkerReady,
    m.WorkerStopped,
    m.WorkerFinished,
    m.WorkerReported,
)
# Workers in these are not judged by heartbeats.
UNTIMED_STAGES = frozenset({Stage.STARTING, Stage.LEAVING, Stage.EVICTED})


class Coordinator:
    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._run = run = RunState(config)
        self._leadership = leadership = Leadership(run)
        self._lineage = lineage = StateLineage()
        self._generation = generation = Generation(run, lineage)
        identities = Identities()
        self._failures = failures = FailurePolicy(run, generation, identities)
        self._registry = WorkerRegistry(run, generation, lineage, failures, identities)
        registry = self._registry
        self._hang_detector = HangDetector(run, registry, generation)
        self._admission = admission = Admission(run, registry, generation, lineage)
        self._checkpointer = DrainCheckpointer(run, registry, generation)
        self._changes = ChangePolicy(run, registry, generation, self._checkpointer)
        parts = (run, leadership, registry, generation, lineage, admission)
        self._planner = MembershipPlanner(*parts, self._checkpointer, self._changes)
        self._takeover = Takeover(*parts)

    # -------------------------------------------------------------------------------- status

    @property
    def phase(self) -> Phase:
        return self._run.phase

    @property
    def reason(self) -> str:
        return self._run.reason

    @property
    def size(self) -> int:
        return self._run.size

    @property
    def generation(self) -> int:
        return self._generation.number

    @property
    def membership(self) -> Membership | None:
        """Of the newest generation that was announced."""
        return self._generation.membership

    @property
    def workers(self) -> dict[WorkerId, str]:
        """Of a copy, which is made in one go: any thread may ask while workers come and go."""
        return {worker.id: worker.stage.value for worker in list(self._registry.workers.values())}

    @property
    def kinds(self) -> list[str]:
        """Of machines: those that the members are on, as far as they have said."""
        members = list(self._generation.members.values())
        return sorted({worker.signature.kind for worker in members if worker.signature})

    @property
    def deadline(self) -> float | None:
        """When to come back with DeadlineReached; None: not before the next fact."""
        if self._leadership.deferred is not None:
            return self._leadership.releasing_at
        due = self._run.timers.due
        if self._run.phase is not Phase.OVER:
            due = min(due, self._registry.failure_detector.due)
        return due if due < math.inf else None

    # ----------------------------------------------------------------------------- lineage

    def start(self, now: float) -> list[Command]:
        """The first requests of a run that nobody has begun."""
        self._run.say(f"starting {counted(self._registry.wanted, 'worker')}")
        self._proceed(now)
        return self._run.flush()

    @classmethod
    def recover(
        cls,
        config: CoordinatorConfig,
        workers: Iterable[WorkerId],
        highest_claimed: int,
        now: float,
        established: bool = False,
    ) -> tuple["Coordinator", list[Command]]:
        """Take over a run whose controller is gone: claim the next generation, ask all workers for
        their status.

        Every generation up to `highest_claimed` is treated as one that may still run: each worker
        is told to leave it, and the next is formed when all have said so or fallen silent.
        `established`: a step is known to have been made; then a run of which no worker has the
        state is lost, unless there is a checkpoint.
        """
        self = cls(config)
        self._takeover.begin(workers, highest_claimed, established, now)
        return self, self._run.flush()

    # -------------------------------------------------------------------------------- driving

    def handle(self, event: Event, now: float) -> list[Command]:
        deadline, leadership = self.deadline, self._leadership
        if isinstance(event, m.DeadlineReached) and (deadline is None or now < deadline):
            return []
        if self._run.phase is Phase.OVER:
            self._take_when_over(event, now)
        elif leadership.is_unconfirmed:
            self._defer(event, now)
        elif leadership.in_doubt(event, now, self._registry.failure_detector.waiting):
            self._confirm(event, now, deadline)
        elif leadership.deferred is not None:
            leadership.enqueue(event)
            self._release(now)
        else:
            self._take(event, now)
            self._settle(event, now)
        return self._run.flush()

    def _confirm(self, event: Event, now: float, deadline: float | None) -> None:
        on_time = deadline is None or now <= deadline + self.config.heartbeat_interval_s
        slept = not (isinstance(event, m.DeadlineReached) and on_time)
        self._leadership.confirm(self.generation, now, slept)
        self._defer(event, now)

    def _defer(self, event: Event, now: float) -> None:
        if isinstance(event, m.GenerationClaimLost):
            self._leadership.abandon()
            self._stand_down(event)
        elif self._leadership.defer(event, now):
            if self._leadership.was_away(now):
                self._registry.failure_detector.was_away(now)
            self._release(now)

    def _release(self, now: float) -> None:
        """Take what was deferred, or a part of it, and come back for the rest."""
        leadership = self._leadership
        self._hang_detector.catch_up(now)
        while leadership.deferred is not None:
            for each in leadership.release(now):
                over = self._run.phase is Phase.OVER
                (self._take_when_over if over else self._take)(each, now)
            if self._run.phase is not Phase.OVER:
                break
        if leadership.deferred is None:
            self._settle(m.GenerationClaimed(leadership.claimed), now)

    def _take(self, event: Event, now: float) -> None:
        registry, worker = self._registry, None
        if isinstance(event, FROM_WORKERS):
            self._leadership.heard(now)
            worker = registry.workers.get(event.worker)
            if worker is not None and worker.stage not in UNTIMED_STAGES:
                registry.failure_detector.heard(worker.id, now)
        match event:
            case m.HeartbeatReceived():
                self._heard(worker, event, now)
            case m.WorkerStarted():
                if worker is not None and worker.stage is Stage.STARTING:
                    self._admission.begin(worker, now)
            case m.WorkerPlaced(worker=worker_id, location=location):
                if worker_id in registry.workers:
                    registry.workers[worker_id].locate(location)
            case m.WorkerReady(signature=signature, can_source=can_source):
                self._admission.became_ready(worker, signature, can_source, now)
            case m.WorkerStopped():
                if self._generation.stopped(worker, event, now) and worker is not None:
                    self._failures.count(worker, now, blamed="")
            case m.WorkerFinished():
                self._generation.worker_finished(event)
            case m.WorkerFailed():
                self._failed(registry.workers.get(event.worker), event, now)
            case m.WorkerLost():
                registry.lost(event, now)
            case m.WorkerReported():
                self._takeover.reported(event, now)
            case m.DrainNoticed(worker=worker_id, deadline=deadline):
                if worker_id in registry.workers:
                    registry.drain(registry.workers[worker_id], deadline, now)
            case m.SizeRequested():
                self._resized(event, now)
            case m.StopRequested():
                self._asked_to_stop(event)
            case m.CheckpointRequested():
                self._checkpointer.ask()
            case m.CheckpointCommitted(step=step):
                self._checkpointer.committed(step)
            case m.CheckpointFound(step=found):
                self._lineage.found(found)
            case m.GenerationClaimed():
                self._was_claimed(event)
            case m.GenerationClaimLost():
                self._stand_down(event)
            case m.DeadlineReached() | m.StackTracesCaptured():
                pass

    def _settle(self, event: Event, now: float) -> None:
        """Act on the time, and on whatever the events now allow."""
        self._fire_timers(now)
        self._judge_silence(event, now)
        self._proceed(now)

    def _proceed(self, now: float) -> None:
        """O(1) unless it ends or forms a generation."""
        run = self._run
        if run.phase is Phase.OVER:
            return
        if error := self._failures.exhausted():
            closing.fail(self._registry, error, "", now)
            return
        if run.phase is Phase.TAKING_OVER:
            self._takeover.end(now)
        if run.phase is Phase.FORMING and not self._generation.not_formed:
            self._planner.all_formed()
        if self._generation.is_over:
            self._planner.take_back(now)
        if run.phase is Phase.RUNNING:
            self._changes.consider_change(now)
        if run.phase is Phase.GATHERING:
            self._planner.advance(now)
        self._replenish(now)

    def _replenish(self, now: float) -> None:
        if self._run.stop is not None or self._run.phase is Phase.OVER:
            return
        taking_over = self._run.phase is Phase.TAKING_OVER
        if taking_over and self._leadership.claimed <= self.generation:
            return  # identities are counted under the claim
        self._registry.replenish(now)

    # ---------------------------------------------------------------------------- events

    def _heard(self, worker: WorkerState | None, event: m.HeartbeatReceived, now: float) -> None:
        run = self._run
        if worker is None or worker.stage is Stage.EVICTED:
            stuck = worker is not None and worker.stuck  # its stacks may be on their way
            run.emit(m.EvictWorker(event.worker, "not a worker of this run any more", stuck))
            return
        if worker.stage is Stage.STARTING:
            self._admission.begin(worker, now)
        if not self._generation.is_past(event):
            worker.renew(now)
            run.emit(m.RenewLease(worker.id, event.beat))
            if worker.stage is Stage.UNREPORTED:
                self._generation.renewed(now)
        if worker.stage is Stage.MEMBER:
            if event.generation == self._generation.number:
                self._note_step(event.step, now)
            self._generation.heard(worker, event, now)
        elif worker.stage is Stage.UNREPORTED or (
            worker.stage is Stage.BUILDING and event.phase == "wait"
        ):
            self._note_step(event.step, now)
            run.emit(m.ReportState(worker.id, self._registry.inquiry))  # its report was lost
        elif worker.stage is Stage.BUILDING and event.phase == "start":
            self._tell_again_to_begin(worker, now)
        if worker.stage in (Stage.MEMBER, Stage.UNREPORTED):
            self._hang_detector.heard(worker, event, now)

    def _note_step(self, step: int, now: float) -> None:
        before, since = self._generation.steps.step, self._generation.steps.at
        if self._generation.note_step(step, now):
            self._hang_detector.stepped(step - before, now - since)
            self._registry.progressed(step, now)

    def _tell_again_to_begin(self, worker: WorkerState, now: float) -> None:
        """It should have begun by now; perhaps the message was lost."""
        if now > worker.since + self.config.heartbeat_timeout_s:
            worker.touch(now)
            self._admission.tell_to_begin(worker)

    def _failed(self, worker: WorkerState | None, event: m.WorkerFailed, now: float) -> None:
        if worker is None or worker.stage in DEPARTED_STAGES:
            return
        if event.facts is None and self._failures.allows_user_error(worker):
            self._registry.failed(worker, event, now)
        else:
            closing.fail_by(self._registry, event, now)

    def _resized(self, event: m.SizeRequested, now: float) -> None:
        most = self.config.virtual_workers
        if not 1 <= event.size <= most:
            self._run.explain(f"size {event.size} refused: not within 1..{most}")
            return
        least = self._run.min_workers if event.min_workers is None else event.min_workers
        if event.min_workers is not None and not 1 <= least <= event.size:
            self._run.explain(f"min_workers {least} refused: not within 1..{event.size}")
            return
        self._run.resize(event.size, least)
        self._admission.resized()
        self._registry.resized(now)

    def _asked_to_stop(self, event: m.StopRequested) -> None:
        if self._run.stop is not None:
            return
        self._run.request_stop(event)
        self._run.explain(f"stopping: {event.reason}")
        if self._run.in_flight:
            self._generation.tell_to_stop()

    def _was_claimed(self, event: m.GenerationClaimed) -> None:
        if not self._leadership.granted(event.generation):
            return
        if self._run.phase is Phase.TAKING_OVER:
            self._registry.identities.adopt(event.generation)
        else:
            self._planner.claimed()

    def _stand_down(self, event: m.GenerationClaimLost) -> None:
        self._run.emit(m.StandDown(f"generation {event.generation} belongs to another controller"))
        self._run.end("another controller leads")
        self._registry.clear()

    def _take_when_over(self, event: Event, now: float) -> None:
        """Only a worker that does not leave is still of interest."""
        if isinstance(event, m.WorkerLost):
            self._registry.forget(event.worker)
        closing.evict_remaining(self._registry, now)

    # ------------------------------------------------------------------------------- time

    def _fire_timers(self, now: float) -> None:
        """Act on what is due, each timer only if it still means something."""
        timers, workers = self._run.timers, self._registry.workers
        while now >= timers.due and self._run.phase is not Phase.OVER:
            for kind, worker_id in timers.pop():
                if worker_id in workers:
                    self._registry.timer_fired(kind, workers[worker_id], now)
        if self._generation.check_time(now):
            self._failures.count(next(iter(self._generation.members.values())), now)

    def _judge_silence(self, event: Event, now: float) -> None:
        """Once nothing more waits to be read, as DeadlineReached says; or some time after, if it
        never comes."""
        registry, detector = self._registry, self._registry.failure_detector
        patience_s = 0.0 if isinstance(event, m.DeadlineReached) else self._leadership.quiet_s
        for worker_id in detector.silent(now, patience_s, registry.excused_until):
            reason = f"silent for {self.config.heartbeat_timeout_s:g} s"
            registry.evict(registry.workers[worker_id], reason, now)
        for until in detector.excused.values():
            self._run.timers.wake(max(now, until))
