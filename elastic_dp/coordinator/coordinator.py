"""The coordinator decides which workers train together, when a generation begins and ends, and why.

It is a state machine without clock, I/O, threads or random numbers. Events and the time go in,
commands come out; a journal of the events replays a run. The driver calls `start`, then `handle`
for every event, and also with `DeadlineReached` when the coordinator's `deadline` comes.
`run_state` lists the phases of a run.

Three things always hold:

* A generation is announced only after its number was claimed, and after the previous generation can
  make no further step: one of its members reported that it has left (no step completes without
  every member), or all other members are confirmed dead, or the lease of its members has expired. A
  worker that was evicted but is not confirmed dead may be alive.
* The source of state is one of the most advanced workers among those with complete state. A worker
  without complete state receives everything, and never counts as a survivor. If no worker has
  state, the newest committed checkpoint is the truth; without a checkpoint the run is lost. Before
  the first generation has formed, and without a checkpoint, the truth is the initial weights of one
  worker, the initial source. Another worker may take its place if it dies.
* A message about an older generation changes nothing, and an identity is used once.

A coordinator that slept, or that heard no worker for a while, confirms with a claim that it still
leads before it acts. A worker whose heartbeats arrive is never evicted for being slow, only for
making no progress (`hang_detector`). No worker is evicted for silence while the group makes steps.
Members of one generation differ by at most one step; a worker that is further behind cannot catch
up and is replaced. While the run is being stopped, `min_workers` does not apply: one worker is
enough to end the run.

Each part owns its state and knows only the parts before it:

    run_state              configuration, sizes, phase, timers, commands to be sent
    leadership             claims; events that are deferred while leadership is in doubt
    state_lineage          which worker's state is the run's, and which workers fit it
    generation             the present generation: its members, their progress, and its end
    failure_counter        what failures cost: budgets and pauses
    worker_registry        every worker, from its request to its confirmed end
    hang_detector          workers that are alive and make no progress
    run_termination        how a run ends
    worker_eligibility     which workers may become members, and whose initial weights count
    drain_checkpointer     checkpoints on request, and the last one before draining workers leave
    generation_end_policy  when the present generation should end for a better one
    membership_planner     the members of the next generation, and when it is safe to form it
    takeover               replacing a controller that is gone
"""

import math
from collections.abc import Iterable

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator import run_termination
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig as CoordinatorConfig
from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.leadership import Leadership
from elastic_dp.coordinator.messages import Command, Event, Membership, WorkerId
from elastic_dp.coordinator.planning.generation_end_policy import GenerationEndPolicy
from elastic_dp.coordinator.planning.membership_planner import MembershipPlanner
from elastic_dp.coordinator.planning.worker_eligibility import WorkerEligibility
from elastic_dp.coordinator.run_state import Phase as Phase
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.takeover import Takeover
from elastic_dp.coordinator.workers.failure_counter import FailureCounter
from elastic_dp.coordinator.workers.hang_detector import HangDetector
from elastic_dp.coordinator.workers.worker_registry import DEPARTED_STAGES, WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Identities, Stage, WorkerState
from elastic_dp.wording import counted

FROM_WORKERS = (
    m.HeartbeatReceived,
    m.WorkerStarted,
    m.WorkerReady,
    m.WorkerStopped,
    m.WorkerFinished,
    m.WorkerReported,
)
# Workers in these stages need not send heartbeats.
UNTIMED_STAGES = frozenset({Stage.STARTING, Stage.LEAVING, Stage.EVICTED})


class Coordinator:
    """Turns events into commands; see the module's docstring."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._run = run = RunState(config)
        self._leadership = leadership = Leadership(run)
        self._lineage = lineage = StateLineage()
        self._generation = generation = Generation(run, lineage)
        identities = Identities()
        self._failures = failures = FailureCounter(run, generation, identities)
        self._registry = WorkerRegistry(run, generation, lineage, failures, identities)
        registry = self._registry
        self._hang_detector = HangDetector(run, registry, generation)
        self._eligibility = eligibility = WorkerEligibility(run, registry, generation, lineage)
        self._checkpointer = DrainCheckpointer(run, registry, generation)
        self._end_policy = GenerationEndPolicy(run, registry, generation, self._checkpointer)
        parts = (run, leadership, registry, generation, lineage, eligibility)
        self._planner = MembershipPlanner(*parts, self._checkpointer)
        self._takeover = Takeover(*parts)

    # -------------------------------------------------------------------------------- status

    @property
    def phase(self) -> Phase:
        """The phase of the run."""
        return self._run.phase

    @property
    def reason(self) -> str:
        """Why the run is in its present state, in words."""
        return self._run.reason

    @property
    def size(self) -> int:
        """The number of members to aim for."""
        return self._run.size

    @property
    def requested_size(self) -> int:
        """The number of members to aim for if no other run of the cluster limits it."""
        return self._run.requested_size

    @property
    def size_limit(self) -> int | None:
        """How many members other runs of the cluster leave room for; None: no limit."""
        return None if self._run.size == self._run.requested_size else self._run.size

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 before the first."""
        return self._generation.number

    @property
    def step(self) -> int:
        """The last committed step, as far as is known. A run that goes back to a checkpoint is at
        that step again.
        """
        return self._generation.steps.step

    @property
    def membership(self) -> Membership | None:
        """The membership of the newest announced generation."""
        return self._generation.membership

    @property
    def workers(self) -> dict[WorkerId, str]:
        """The stage of each worker.

        It is read from a copy that is made in one operation, so any thread may ask for it.
        """
        return {worker.id: worker.stage.value for worker in list(self._registry.workers.values())}

    @property
    def failures(self) -> int:
        """The number of failures since the last committed step."""
        return self._failures.losses.incidents

    @property
    def kinds(self) -> list[str]:
        """The kinds of machines that the members have reported."""
        members = list(self._generation.members.values())
        return sorted({worker.signature.kind for worker in members if worker.signature})

    @property
    def deadline(self) -> float | None:
        """When to call `handle` with DeadlineReached, in seconds; None: not before the next
        event.
        """
        if self._leadership.deferred is not None:
            return self._leadership.releasing_at
        due = self._run.timers.due
        if self._run.phase is not Phase.OVER:
            due = min(due, self._registry.failure_detector.due)
        return due if due < math.inf else None

    # ------------------------------------------------------------------------------- start

    def start(self, now: float) -> list[Command]:
        """Return the first commands of a new run."""
        self._run.set_reason(f"starting {counted(self._registry.target_size, 'worker')}")
        self._advance_phase(now)
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
        """Take over a run whose controller is gone: claim the next generation and ask all workers
        for their state.

        Every generation up to `highest_claimed` is treated as one that may still run: each worker
        is told to leave it, and the next generation is formed when all workers have reported or
        fallen silent. `established` says that a step is known to have been made. In that case a run
        without any worker with state is lost, unless there is a checkpoint. Returns the coordinator
        and its first commands.
        """
        self = cls(config)
        self._takeover.begin(workers, highest_claimed, established, now)
        return self, self._run.flush()

    # -------------------------------------------------------------------------------- driving

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time `now` (in seconds, monotonic) and return the commands that
        follow.
        """
        deadline, leadership = self.deadline, self._leadership
        if isinstance(event, m.DeadlineReached) and (deadline is None or now < deadline):
            return []
        if self._run.phase is Phase.OVER:
            self._dispatch_when_over(event, now)
        elif leadership.is_unconfirmed:
            self._defer_event(event, now)
        elif leadership.in_doubt(event, now, self._registry.failure_detector.watches_any):
            self._confirm_leadership(event, now, deadline)
        elif leadership.deferred is not None:
            leadership.deferred.append(event)
            self._release_deferred(now)
        else:
            self._dispatch(event, now)
            self._react(event, now)
        return self._run.flush()

    def _confirm_leadership(self, event: Event, now: float, deadline: float | None) -> None:
        on_time = deadline is None or now <= deadline + self.config.heartbeat_interval_s
        slept = not (isinstance(event, m.DeadlineReached) and on_time)
        self._leadership.confirm(self.generation, now, slept)
        self._defer_event(event, now)

    def _defer_event(self, event: Event, now: float) -> None:
        if isinstance(event, m.GenerationClaimLost):
            self._leadership.deferred = None
            self._stand_down(event)
        elif self._leadership.defer(event, now):
            if self._leadership.was_away(now):
                self._registry.failure_detector.was_away(now)
            self._release_deferred(now)

    def _release_deferred(self, now: float) -> None:
        """Handle the deferred events, or a part of them; a deadline brings the coordinator back for
        the rest.
        """
        leadership = self._leadership
        self._hang_detector.caught_up_at = now
        while leadership.deferred is not None:
            for each in leadership.release(now):
                over = self._run.phase is Phase.OVER
                (self._dispatch_when_over if over else self._dispatch)(each, now)
            if self._run.phase is not Phase.OVER:
                break
        if leadership.deferred is None:
            self._react(m.GenerationClaimed(leadership.claimed), now)

    def _dispatch(self, event: Event, now: float) -> None:
        registry, worker = self._registry, None
        if isinstance(event, FROM_WORKERS):
            self._leadership.heard_at = now
            worker = registry.workers.get(event.worker)
            if worker is not None and worker.stage not in UNTIMED_STAGES:
                registry.failure_detector.heard_from(worker.id, now)
        match event:
            case m.HeartbeatReceived():
                self._heartbeat_received(worker, event, now)
            case m.WorkerStarted():
                if worker is not None and worker.stage is Stage.STARTING:
                    self._eligibility.begin(worker, now)
            case m.WorkerPlaced(worker=worker_id, location=location):
                if worker_id in registry.workers:
                    registry.workers[worker_id].location = location
            case m.WorkerReady(signature=signature, can_source=can_source):
                self._eligibility.became_ready(worker, signature, can_source, now)
            case m.WorkerStopped():
                if self._generation.stopped(worker, event, now) and worker is not None:
                    self._failures.count(worker, now)
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
            case m.WorkerSlow(worker=worker_id, reason=reason):
                if worker_id in registry.workers:
                    self._eligibility.replace_slow(registry.workers[worker_id], reason, now)
            case m.HeadDrainNoticed(deadline=deadline):
                self._checkpointer.head_drains(deadline, now)
            case m.SizeRequested():
                self._size_requested(event, now)
            case m.SizeLimited():
                self._size_limited(event, now)
            case m.StopRequested():
                self._stop_requested(event)
            case m.CheckpointRequested():
                self._checkpointer.request()
            case m.CheckpointCommitted(step=step, duration_s=duration_s):
                self._checkpointer.committed(step, duration_s)
            case m.CheckpointFound(step=found):
                self._lineage.found(found)
            case m.GenerationClaimed():
                self._claim_granted(event)
            case m.GenerationClaimLost():
                self._stand_down(event)
            case m.DeadlineReached() | m.StackTracesCaptured():
                pass

    def _react(self, event: Event, now: float) -> None:
        """Act on the time, and on whatever the event now allows."""
        self._fire_timers(now)
        self._evict_silent(event, now)
        self._advance_phase(now)

    def _advance_phase(self, now: float) -> None:
        """Go through the phases as far as possible. O(1) unless a generation ends or forms."""
        run = self._run
        if run.phase is Phase.OVER:
            return
        if error := self._failures.exhausted():
            run_termination.fail(self._registry, error, "", now)
            return
        if run.phase is Phase.TAKING_OVER:
            self._takeover.end(now)
        if run.phase is Phase.FORMING and not self._generation.not_formed:
            self._generation.all_formed()
            self._planner.failed = frozenset()
        if self._generation.is_over:
            self._planner.generation_over(now)
        if run.phase is Phase.RUNNING:
            self._end_policy.plan_end_if_needed(now)
        if run.phase is Phase.ENDING:
            self._planner.claim_ahead(now)
            self._planner.prepare_ahead()
        if run.phase is Phase.GATHERING:
            self._planner.plan_next_generation(now)
        self._replenish(now)

    def _replenish(self, now: float) -> None:
        if self._run.stop is not None or self._run.phase is Phase.OVER:
            return
        taking_over = self._run.phase is Phase.TAKING_OVER
        if taking_over and self._leadership.claimed <= self.generation:
            return  # identities carry the number of the claim
        self._registry.replenish(now)

    # ---------------------------------------------------------------------------- events

    def _heartbeat_received(
        self, worker: WorkerState | None, event: m.HeartbeatReceived, now: float
    ) -> None:
        run = self._run
        if worker is None or worker.stage is Stage.EVICTED:
            stuck = worker is not None and worker.stuck  # its stack traces may be on their way
            run.emit(m.EvictWorker(event.worker, "not a worker of this run any more", stuck))
            return
        if worker.stage is Stage.STARTING:
            self._eligibility.begin(worker, now)
        if not self._generation.is_in_earlier_generation(event):
            worker.renewed_at = now  # its lease runs from here
            run.emit(m.RenewLease(worker.id, event.beat))
            if worker.stage is Stage.UNREPORTED:
                self._generation.renewed(now)
        if worker.stage is Stage.MEMBER:
            if event.generation == self._generation.number:
                self._note_step(event.step, now)
                if differ := self._generation.evaluations.note(worker.id, *event.evaluations):
                    failed = m.WorkerFailed(worker.id, f"LoopError: {differ}", "", (differ,))
                    return run_termination.fail_by_worker(self._registry, failed, now)
            self._generation.heartbeat_received(worker, event, now)
        elif worker.stage is Stage.UNREPORTED or (
            worker.stage is Stage.BUILDING and event.phase == "wait"
        ):
            self._note_step(event.step, now)
            # the worker's report was lost
            run.emit(m.ReportState(worker.id, self._registry.inquiry))
        elif worker.stage is Stage.BUILDING and event.phase == "start":
            self._repeat_begin(worker, now)
        if worker.stage in (Stage.MEMBER, Stage.UNREPORTED):
            self._hang_detector.heartbeat_received(worker, event, now)

    def _note_step(self, step: int, now: float) -> None:
        steps = self._generation.steps
        before, since = steps.step, steps.at
        if steps.note(step, now, self.config.heartbeat_interval_s):
            self._hang_detector.stepped(step - before, now - since)
            self._registry.progressed(step, now)

    def _repeat_begin(self, worker: WorkerState, now: float) -> None:
        """Repeat BeginTraining to a worker that should have begun by now: the message may be
        lost.
        """
        if now > worker.since + self.config.heartbeat_timeout_s:
            worker.since = now
            self._eligibility.tell_to_begin(worker)

    def _failed(self, worker: WorkerState | None, event: m.WorkerFailed, now: float) -> None:
        if worker is None or worker.stage in DEPARTED_STAGES:
            return
        before_joining = worker.stage in (Stage.STARTING, Stage.BUILDING)
        if before_joining and self._lineage.established and self._generation.members:
            self._eligibility.replace_failed(worker, event, now)
        elif event.facts is None and self._failures.allows_user_error(worker):
            self._registry.failed(worker, event, now)
        else:
            run_termination.fail_by_worker(self._registry, event, now)

    def _size_requested(self, event: m.SizeRequested, now: float) -> None:
        most = self.config.virtual_workers
        if not 1 <= event.size <= most:
            self._run.explain(f"size {event.size} refused: not within 1..{most}")
            return
        least = self._run.min_workers if event.min_workers is None else event.min_workers
        if event.min_workers is not None and not 1 <= least <= event.size:
            self._run.explain(f"min_workers {least} refused: not within 1..{event.size}")
            return
        self._run.requested_size, self._run.min_workers = event.size, least
        self._eligibility.rejections = 0  # an operator asks for workers
        self._registry.resized(now)

    def _size_limited(self, event: m.SizeLimited, now: float) -> None:
        before = self._run.size
        self._run.limit = event.most
        if self._run.size != before:
            self._run.explain(
                f"the size is {self._run.size} now, {self._run.requested_size} wanted: "
                f"{event.reason}"
            )
            self._registry.resized(now)

    def _stop_requested(self, event: m.StopRequested) -> None:
        if self._run.stop is not None:
            return
        self._run.stop = event
        self._run.explain(f"stopping: {event.reason}")
        if self._run.in_flight:
            self._generation.tell_to_stop()

    def _claim_granted(self, event: m.GenerationClaimed) -> None:
        if not self._leadership.granted(event.generation):
            return
        if self._run.phase is Phase.TAKING_OVER:
            self._registry.identities.prefix = f"w{event.generation}."
        elif self._run.phase is Phase.CLAIMING:
            self._run.enter(Phase.GATHERING)

    def _stand_down(self, event: m.GenerationClaimLost) -> None:
        self._run.emit(m.StandDown(f"generation {event.generation} belongs to another controller"))
        self._run.end("another controller leads")
        self._registry.workers.clear()  # they belong to the other controller

    def _dispatch_when_over(self, event: Event, now: float) -> None:
        """Handle an event after the end of the run: only workers that do not leave matter."""
        if isinstance(event, m.WorkerLost):
            self._registry.workers.pop(event.worker, None)
        run_termination.evict_remaining(self._registry, now)

    # ------------------------------------------------------------------------------- time

    def _fire_timers(self, now: float) -> None:
        """Act on the timers that are due, each only if it still has a meaning."""
        timers, workers = self._run.timers, self._registry.workers
        while now >= timers.due and self._run.phase is not Phase.OVER:
            for kind, worker_id in timers.take_due():
                if worker_id in workers:
                    self._registry.timer_fired(kind, workers[worker_id], now)
        if self._generation.check_time(now):
            self._failures.count(next(iter(self._generation.members.values())), now)

    def _evict_silent(self, event: Event, now: float) -> None:
        """Evict silent workers once no more events wait, which DeadlineReached shows.

        If DeadlineReached never comes, they are evicted some time later.
        """
        registry, detector = self._registry, self._registry.failure_detector
        patience_s = 0.0 if isinstance(event, m.DeadlineReached) else self._leadership.quiet_s
        for worker_id in detector.silent_workers(now, patience_s, registry.excused_until):
            reason = f"silent for {self.config.heartbeat_timeout_s:g} s"
            registry.evict(registry.workers[worker_id], reason, now)
        for until in detector.excused.values():
            self._run.timers.wake(max(now, until))
