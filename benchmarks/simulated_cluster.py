"""The real coordinator at any size, with simulated workers and simulated time.

Every decision is the coordinator's: it gets each event that a real one gets (each heartbeat, each
worker that stopped, is lost, started or is ready) and its commands are obeyed. What takes time in
a cluster takes it here by `Costs`: messages one after another through one controller, connecting,
copies, starting processes, micro-batches. The processor time that the coordinator really needs for
an event passes in simulated time, too; for a heartbeat, it is `Costs.heartbeat_s`.

Two things make this cheap. Steps are arithmetic: no event happens while a group trains. And spans
in which nothing happens are left out of the coordinator's time, since heartbeats would only say
that all is well; they count in the run's time. In large groups each worker is heard every
`BEATS_OF_ALL` intervals, and a part of them in each, which is still within the timeout.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.coordinator import Coordinator
from elastic_dp.coordinator.coordinator_config import CoordinatorConfig, FailureLimits

SIGNATURE = m.Signature("layout", "data", "kind")
CALM_S = 6.0  # longer than `stabilization_s`, and than the timeout of a heartbeat of a second
LEAD_BEATS = 3  # before something happens after a span that was left out
# A round of messages to more workers takes longer than two heartbeats of a second, after which the
# coordinator would doubt that it leads; so their interval, and the timeout with it, is longer.
MANY, MANY_BEAT_S = 8000, 6.0
FEW = 1000  # up to so many workers are all heard in each interval
BEATS_OF_ALL = 4
PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take, in seconds."""

    micro_batch_s: float
    per_worker: int  # virtual workers of a member of the full group
    heartbeat_s: float  # at the coordinator
    message_s: float  # a message to or from a worker, at the controller
    notice_s: float  # from a death until the others have heard of it
    claim_s: float
    connect_s: float  # for each member of a group
    copy_s: float  # the state, to a member without it
    restore_s: float  # the state, from a checkpoint
    process_s: float  # from a request until the process is up
    warm_up_s: float  # from then until it is ready
    checkpoint_every_s: float = math.inf
    checkpoint_stall_s: float = 0.0

    @property
    def stretch(self) -> float:
        """How much longer steps are because of checkpoints."""
        return 1.0 + self.checkpoint_stall_s / self.checkpoint_every_s


@dataclass(slots=True)
class Worker:
    generation: int = 0
    group: Group | None = None  # while it has not left
    step: int = 0
    has_state: bool = False
    is_source: bool = False
    phase: str = "start"
    silent: bool = False
    lineage_id: int = 0
    busy_since: float = 0.0  # heartbeats begin


class Group:
    """One generation. Its members make steps together until `broken_at`."""

    def __init__(self, membership: m.Membership, costs: Costs) -> None:
        self.membership, self.costs = membership, costs
        self.members = {member.worker: member for member in membership.members}
        self.rank = {member.worker: rank for rank, member in enumerate(membership.members)}
        self.first = max(m.position.step for m in membership.members)
        self.micro_batch_s = costs.micro_batch_s * costs.stretch
        most = max(member.num_virtual_workers for member in membership.members)
        self.first_s = self.step_s = most * self.micro_batch_s
        self.connected_at = self.formed_at = self.broken_at = math.inf
        self.planned = False

    def steps(self, at: float) -> int:
        """Committed steps."""
        trained = min(at, self.broken_at) - self.formed_at
        if trained < self.first_s:
            return self.first
        return self.first + 1 + math.floor((trained - self.first_s) / self.step_s + 1e-9)

    def began(self, at: float) -> float:
        """When the step that is made then began."""
        made = self.steps(at) - self.first
        return self.formed_at + (made and self.first_s + (made - 1) * self.step_s)

    def commit_at(self, step: int) -> float:
        return self.formed_at + self.first_s + (step - self.first - 1) * self.step_s

    def done(self, at: float) -> int:
        """Micro-batches that each member has done in the step that is made then, at most."""
        return max(0, math.floor((at - self.began(at)) / self.micro_batch_s + 1e-9))

    def left_at(self, at: float) -> float:
        """When members that are told then leave: after the micro-batch in which they are."""
        if at < self.formed_at or at >= self.began(at) + self.step_s:
            return at
        return self.began(at) + math.ceil((at - self.began(at)) / self.micro_batch_s) * (
            self.micro_batch_s
        )

    def finished(self, worker: str, at: float) -> tuple[tuple[int, int], ...]:
        """The subtrees of virtual workers that a member has finished in that step."""
        left, nodes = self.done(at), []
        for first, last in self.members[worker].ranges:
            end = min(last, first + left)
            left -= end - first
            while first < end:
                room = 1 << (end - first).bit_length() - 1
                size = min(first & -first, room) or room
                nodes.append((first, first + size))
                first += size
        return tuple(nodes)


class SimulatedCluster:
    """A run of `size` workers; `standby` more are kept warm. `places`: room for so many."""

    def __init__(
        self,
        size: int,
        costs: Costs,
        *,
        standby: int = 0,
        places: int | None = None,
        seed: int = 0,
    ) -> None:
        self.size, self.standby, self.costs = size, standby, costs
        self.places = places or size + standby
        self.rng = random.Random(seed)
        self.beat_s = 1.0 if size <= MANY else MANY_BEAT_S
        self.coordinator = Coordinator(
            CoordinatorConfig(
                min_workers=max(1, size // 3),
                size=size,
                standby=standby,
                virtual_workers=costs.per_worker * size,
                stabilization_s=5.0,
                heartbeat_interval_s=self.beat_s,
                heartbeat_timeout_s=5 * self.beat_s,
                lease_s=10 * self.beat_s,
                forming_timeout_s=120.0,
                hang_timeout_s=3600.0,
                limits=FailureLimits(max_losses_without_progress=1000),
            )
        )
        self.now = self.skipped = self.free_at = 0.0
        self.queue: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self.counter = self.beats = 0
        self.workers: dict[str, Worker] = {}
        self.pending: list[str] = []
        self.finished: dict[str, tuple[tuple[int, int], ...]] = {}  # of the step that was cut
        self.prepared: dict[tuple[int, int], float] = {}  # when its connecting ends
        self.group: Group | None = None
        self.cut_at_step = -1
        self.busy_at = 0.0  # the last command but RenewLease
        self.deadline: float | None = None
        self.generations = self.messages = 0
        self.longest_event_s = 0.0
        self.steps_back = 0
        self.stopping_at = math.inf

    # ------------------------------------------------------------------------------ the life

    def run(self, faults: Sequence[tuple[float, Callable[[], None]]], end: float) -> None:
        """Start, and let time pass until `end` after the first group has formed."""
        self.obey(self.coordinator.start(0.0), 0.0)
        self.at(0.0, self.beat, real=False)
        self.pass_time(lambda: self.trains)
        self.pass_time(lambda: self.calm)
        self.begun = self.now
        self.first = self.progress
        for after, fault in faults:
            self.pass_time(lambda: False, self.begun + after)
            fault()
        self.pass_time(lambda: False, self.begun + end)

    @property
    def steps(self) -> int:
        return 0 if self.group is None else self.group.steps(self.now)

    @property
    def progress(self) -> float:
        """Committed steps, and the part of the step that is made."""
        group = self.group
        if group is None:
            return 0.0
        at = min(self.now, group.broken_at)
        if at < group.formed_at:
            return float(group.first)
        return group.steps(at) + (at - group.began(at)) / group.step_s

    @property
    def trains(self) -> bool:
        return self.coordinator.phase == "running"

    @property
    def calm(self) -> bool:
        """Whether nothing happens before something new does: nobody is to be found silent, and
        nobody waits for the next generation who could be a member.
        """
        group = self.group
        if group is None or self.now < self.busy_at + CALM_S:
            return False
        if group.formed_at + group.first_s + CALM_S > self.now >= group.formed_at:
            return False  # a group is not changed before its first step
        up = self.workers.values()
        waiting = sum(w.group is None and w.phase == "wait" for w in up)
        return waiting <= self.standby and not any(w.silent for w in up)

    def pass_time(self, enough: Callable[[], bool], until: float = math.inf) -> None:
        while not enough() and self.queue:
            if self.queue[0][0] > until:
                self.now = until
                return
            at, _, _, function, args = heapq.heappop(self.queue)
            self.now = max(self.now, at)
            if function == self.beat and self.calm:
                self.leave_out(until)
            function(*args)

    def leave_out(self, until: float) -> None:
        """Leave out the time until shortly before the next thing that happens."""
        following = min((at for at, _, real, *_ in self.queue if real), default=math.inf)
        span = min(following, until) - LEAD_BEATS * self.beat_s - self.now
        if CALM_S < span < math.inf:
            self.now += span
            self.skipped += span
            self.deadline = None

    def at(
        self, delay: float, function: Callable[..., None], *args: Any, real: bool = True
    ) -> None:
        self.counter += 1
        heapq.heappush(self.queue, (self.now + delay, self.counter, real, function, args))

    # ------------------------------------------------------------------------ the controller

    def post(self, event: m.Event, delay: float = 0.0) -> None:
        self.at(delay, self.deliver, event)

    def deliver(self, event: m.Event) -> None:
        """The controller reads one message after another."""
        self.free_at = max(self.now, self.free_at) + self.costs.message_s
        self.messages += 1
        self.handle(event)

    def handle(self, event: m.Event, at_least: float = 0.0) -> None:
        self.free_at = max(self.now, self.free_at)
        at = max(at_least, self.free_at - self.skipped)
        if isinstance(event, m.HeartbeatReceived):  # so many that asking for the time is too long
            commands = self.coordinator.handle(event, at)
            self.free_at += self.costs.heartbeat_s
        else:
            began = time.thread_time()
            commands = self.coordinator.handle(event, at)
            took = time.thread_time() - began
            self.longest_event_s = max(self.longest_event_s, took)
            self.free_at += took
        self.obey(commands, self.free_at)
        deadline = self.coordinator.deadline
        if deadline is not None and deadline != self.deadline:
            self.deadline = deadline
            due = max(deadline + self.skipped, self.free_at)
            self.at(max(0.0, due - self.now), self.ring, deadline, real=False)

    def ring(self, deadline: float) -> None:
        if deadline == self.deadline:
            self.deadline = None
            self.handle(m.DeadlineReached(), deadline)  # sums of floats may be a little less

    def beat(self) -> None:
        self.beats += 1
        parts = BEATS_OF_ALL if FEW < self.size <= MANY else 1
        heard = list(self.workers.items())[self.beats % parts :: parts]
        step = self.steps
        for name, worker in heard:
            if worker.silent or worker.busy_since > self.now or name not in self.workers:
                continue
            if worker.group is not None:
                worker.step, worker.phase = step, self.phase_of(worker.group)
            self.handle(m.HeartbeatReceived(name, worker.generation, worker.step, worker.phase))
        self.at(self.beat_s, self.beat, real=False)

    def phase_of(self, group: Group) -> str:
        if self.now < group.connected_at:
            return "form"
        if self.now < group.formed_at:
            return "receive"
        return "compute" if self.now < group.broken_at else "collective"

    def obey(self, commands: Iterable[m.Command], at: float) -> None:
        for command in commands:
            kind = type(command)
            if kind is m.RenewLease or kind is m.Explain:
                continue
            self.busy_at = self.free_at
            match command:
                case m.StartWorker(worker=worker):
                    self.pending.append(worker)
                    self.send(worker, self.place)
                case m.BeginTraining(worker=worker, is_source=is_source):
                    self.send(worker, self.begin, worker, is_source)
                case m.ClaimGeneration(generation=generation):
                    self.post(m.GenerationClaimed(generation), self.costs.claim_s)
                case m.FindCheckpoint():
                    self.post(m.CheckpointFound(self.checkpoint()), self.costs.claim_s)
                case m.PrepareGroup(generation=generation, number=number, workers=workers):
                    for worker in workers:
                        self.send(worker)
                    took = self.costs.connect_s * len(workers)
                    self.prepared[generation, number] = self.free_at + took
                case m.FormGeneration(membership=membership):
                    for member in membership.members:
                        self.send(member.worker)
                    self.at(self.free_at - self.now, self.form, membership)
                case m.AbortGeneration(worker=worker, generation=generation):
                    self.send(worker, self.leave, worker, generation)
                case m.EndGeneration(worker=worker, generation=generation, after_step=step):
                    self.send(worker, self.plan_end, generation, step)
                case m.ReleaseWorker(worker=worker):
                    self.send(worker, self.lose, worker, "left", m.Cause.RELEASED)
                case m.EvictWorker(worker=worker):
                    self.send(worker, self.lose, worker, "killed")
                case m.FailRun(error=error):
                    raise RuntimeError(f"the run failed: {error}")
                case _:
                    raise AssertionError(command)

    def send(self, worker: str, act: Callable[..., None] | None = None, *args: Any) -> None:
        """The controller sends one message after another."""
        self.free_at = max(self.now, self.free_at) + self.costs.message_s
        self.messages += 1
        if act is not None:
            self.at(self.free_at - self.now, act, *args)

    # --------------------------------------------------------------------------- the workers

    def place(self) -> None:
        while self.pending and len(self.workers) < self.places:
            name = self.pending.pop(0)
            self.workers[name] = Worker(busy_since=self.now + self.costs.process_s)
            self.at(self.costs.process_s, self.started, name)

    def started(self, name: str) -> None:
        if name in self.workers:
            self.post(m.WorkerStarted(name))

    def begin(self, name: str, is_source: bool) -> None:
        if name in self.workers and not self.workers[name].is_source:
            self.workers[name].is_source = is_source
            self.at(self.costs.warm_up_s, self.ready, name)

    def ready(self, name: str) -> None:
        if (worker := self.workers.get(name)) is not None:
            worker.phase = "wait"
            self.post(m.WorkerReady(name, SIGNATURE, worker.is_source))

    def form(self, membership: m.Membership) -> None:
        """The last member was told."""
        self.generations += 1
        self.stopping_at = math.inf
        self.group = group = Group(membership, self.costs)
        for name in group.members:
            if (worker := self.workers.get(name)) is not None:
                worker.generation, worker.group = membership.generation, group
        if any(w not in self.workers or self.workers[w].silent for w in group.members):
            group.broken_at = self.now
            return
        prepared = self.prepared.get((membership.generation, membership.prepared), 0.0)
        took = self.costs.connect_s * len(group.members)
        group.connected_at = max(self.now, prepared) if prepared else self.now + took
        group.formed_at = group.connected_at
        if membership.restore:
            group.formed_at += self.costs.restore_s
            group.first = self.restored_step
        elif not all(member.has_state for member in membership.members) and group.first:
            group.formed_at += self.costs.copy_s
        if group.first == self.cut_at_step:
            group.first_s = group.micro_batch_s * max(
                member.num_virtual_workers - self.reused(member) for member in membership.members
            )
        self.at(group.formed_at - self.now, self.formed, group)

    def reused(self, member: m.Member) -> int:
        """How many of its micro-batches a member has finished before."""
        return sum(
            last - first
            for first, last in self.finished.get(member.worker, ())
            if any(low <= first and last <= high for low, high in member.ranges)
        )

    def formed(self, group: Group) -> None:
        if self.group is group and group.broken_at == math.inf:
            for name in group.members:
                worker = self.workers[name]
                worker.has_state, worker.lineage_id = True, group.membership.lineage_id

    def leave(self, name: str, generation: int) -> None:
        """A worker is told to leave a generation."""
        worker = self.workers.get(name)
        if worker is None or worker.silent or worker.group is None:
            return
        if worker.generation <= generation and self.stopping_at == math.inf:
            group = worker.group
            worker.group = None
            if group.broken_at == math.inf:
                group.broken_at = self.now
            self.at(group.left_at(self.now) - self.now, self.stopped, name, group, "told")

    def stopped(self, name: str, group: Group, why: str, mismatch: Any = None) -> None:
        if (worker := self.workers.get(name)) is None or worker.silent:
            return
        worker.group, worker.phase, worker.step = None, "wait", group.steps(self.now)
        finished = ()
        if not group.planned and self.now >= group.formed_at:
            finished = group.finished(name, self.now)
        elif worker.step == self.cut_at_step:
            finished = self.finished.get(name, ())
        if worker.step != self.cut_at_step:
            self.cut_at_step, self.finished = worker.step, {}
        self.finished[name] = finished
        self.post(
            m.WorkerStopped(
                name,
                group.membership.generation,
                m.TrainingPosition(worker.step),
                worker.has_state,
                why,
                lineage_id=worker.lineage_id,
                finished=finished,
                mismatch=mismatch,
            )
        )

    def plan_end(self, generation: int, after_step: int) -> None:
        group = self.group
        if group is None or group.membership.generation != generation or group.planned:
            return
        group.planned = True
        at = max(self.now, group.commit_at(max(after_step, group.steps(self.now))))
        self.at(at - self.now, self.end_planned, group)

    def end_planned(self, group: Group) -> None:
        if self.group is group and group.broken_at == math.inf:
            group.broken_at = self.now
            self.stop_all(group, "planned end")

    def stop_all(self, group: Group, why: str, mismatch: Any = None) -> None:
        for name in group.members:
            if name in self.workers and self.workers[name].group is group:
                self.stopped(name, group, why, mismatch)

    def lose(self, name: str, reason: str, cause: m.Cause = m.Cause.UNKNOWN) -> None:
        """The process has ended, and the controller is told."""
        worker = self.workers.pop(name, None)
        if name in self.pending:
            self.pending.remove(name)
        elif worker is None:
            return
        self.post(m.WorkerLost(name, reason, cause), self.costs.notice_s)
        self.place()

    # ---------------------------------------------------------------------------- the faults

    def members(self) -> list[str]:
        return [] if self.group is None else [w for w in self.group.members if w in self.workers]

    def kill(self, names: Iterable[str], silent: bool = False) -> None:
        """Processes end. `silent`: and nobody hears of it, since the host is gone."""
        group, names = self.group, list(names)
        hit = group is not None and [n for n in names if self.workers[n].group is group]
        if group is not None and hit and group.broken_at == math.inf:
            group.broken_at = self.now
            group.planned = False
            if not silent and self.now >= group.formed_at:
                leaves = max(self.now + self.costs.notice_s, group.left_at(self.now))
                self.stopping_at = leaves
                self.at(leaves - self.now, self.cut, group)
        for name in names:
            if silent:
                self.workers[name].silent = True
            else:
                self.lose(name, "killed")

    def cut(self, group: Group) -> None:
        if self.group is group:
            self.stopping_at = math.inf
            self.stop_all(group, "connection reset")

    def kill_worker(self) -> None:
        if names := self.members():
            self.kill([self.rng.choice(names)])

    def kill_node(self, silent: bool = False) -> None:
        if names := self.members():
            first = self.rng.randrange(len(names)) // PER_NODE * PER_NODE
            self.kill(names[first : first + PER_NODE], silent)

    def lose_node(self) -> None:
        self.kill_node(silent=True)

    def flip(self) -> None:
        """The weights of one member differ, and all find it in the header of the next step."""
        group, names = self.group, self.members()
        if group is None or group.broken_at < math.inf or self.now < group.formed_at:
            return
        group.broken_at = self.now
        wrong = m.ReplicaMismatch(group.steps(self.now), (self.rng.choice(names),))
        self.stop_all(group, "weights differ", wrong)

    def allow(self, places: int) -> None:
        """So many places there are from now on; whoever has none is killed."""
        self.places = places
        up = [*self.workers]
        self.kill(self.rng.sample(up, max(0, len(up) - places)))
        self.place()

    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint; None before the first step."""
        if self.group is None or self.group.steps(self.now) == 0:
            return None
        every_s, step = self.costs.checkpoint_every_s, self.group.steps(self.now)
        old_s = self.rng.uniform(0.0, min(every_s, self.now))
        self.restored_step = max(0, step - math.floor(old_s / self.group.step_s))
        self.steps_back += step - self.restored_step
        return self.restored_step
