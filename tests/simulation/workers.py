"""The simulated worker: what the design says a worker does, without tensors.

A step has several collectives, each of which needs every member; after the last one the step is
committed by a compare-and-swap against abort, then its body runs, which on some steps holds
evaluations (collectives too). The state is a chain of hashes, so that holding the wrong state is
visible at once. Training thread and control thread are one object: an abort makes the pending
callback of the training thread stale (`token`), except in apply and body, which run to their end
first.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Membership, Signature, TrainingPosition
from elastic_dp.distributed.reduction_tree import cover_share

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.world import World

COLLECTIVES = 2  # per step
MEASURED = 2  # steps in a generation, before it tells how fast it is
PARTS = 6  # steps in which a worker that joins gradually takes the state over
GARBAGE = "half written"


def chain(state: str, step: int) -> str:
    return format(zlib.crc32(f"{state} {step}".encode()), "08x")


def evaluations(step: int) -> int:
    return 2 if step % 3 == 0 else 0


class SimWorker:
    def __init__(self, world: World, worker_id: str) -> None:
        self.world, self.id = world, worker_id
        self.alive, self.frozen, self.hung = True, False, False
        self.was_cut = False
        self.where: tuple[int, int, str] = (0, 0, "")
        self.where_since = world.now
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []
        self.up_cut = self.down_cut = False
        self.phase = "start"
        self.begun = self.ready = self.is_source = self.asked_source = False
        self.token = 0
        self.generation, self.inside, self.ended = 0, False, 0
        self.busy = False  # in apply or body: aborts wait
        self.attempting = 0
        self.steps_here = 0  # in its generation
        self.planned: dict[int, int] = {}
        self.said_out, self.thawed_at = 0, -math.inf
        self.asked = 0
        self.form_next: Membership | None = None
        self.group: Group | None = None
        self.step, self.ended_run, self.evaluated, self.known_evaluations = 0, 0, 0, 0
        self.state, self.has_state, self.lineage_id = GARBAGE, False, 0
        self.agreed = 0  # after this step all members had the same weights
        self.flipped = False  # its weights are wrong, and nobody knows
        self.mismatch: m.ReplicaMismatch | None = None
        # Subtrees that it has finished of a step that was cut, and which step that is.
        self.finished_nodes: tuple[tuple[int, int], ...] = ()
        self.finished_of = 0
        # What has arrived of a state that is taken over in parts, in how many steps, and the
        # lineage and step it is of.
        self.parts, self.parts_arrived, self.parts_of = GARBAGE, 0, (0, 0)
        self.all_joined = True  # nobody in its generation lacks state
        self.body_begun = 0  # the step whose body was begun last
        self.at_head = True
        self.finished = self.raised = False
        self.stop_flag = self.keep_wanted = False
        self.released: str | None = None
        self.beat = 0
        self.beats: dict[int, float] = {}
        self.lease_until = world.now + world.config.lease_s
        self.node_deadline = math.inf
        self.location = world.new_location()

    @staticmethod
    def joining(world: World, membership: Membership) -> set[str]:
        """Who takes the state over in parts, while the others train."""
        source = membership.members[membership.rank(membership.source)]
        new = {one.worker for one in membership.members if not one.has_state}
        possible = source.has_state and not source.position.ended and not membership.copies_first
        few = 2 * len(new) <= len(membership.members)
        return new if world.profile.gradual and possible and few else set()

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(self.step, self.ended_run, self.evaluated)

    @property
    def joins_gradually(self) -> bool:
        assert self.group is not None
        return not self.all_joined and self.id in self.group.joining

    def later(self, delay: float, function: Any, *args: Any) -> None:
        self.world.at(delay, self.run_unless_gone, function, args)

    def run_unless_gone(self, function: Any, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen or (self.hung and not self.is_the_sidecars(function, args)):
            self.deferred.append((function, args))
        else:
            function(*args)

    def is_the_sidecars(self, function: Any, args: tuple[Any, ...]) -> bool:
        """What goes on while the worker's own threads do not."""
        return function == self.heartbeat or (bool(args) and isinstance(args[0], m.RenewLease))

    def thaw(self) -> None:
        self.frozen, self.hung, self.thawed_at = False, False, self.world.now
        pending, self.deferred = self.deferred, []
        for function, args in pending:
            self.run_unless_gone(function, args)

    def send(self, event: m.Event) -> None:
        self.world.to_controller(self, event)

    # ------------------------------------------------------------------------- life

    def start(self) -> None:
        self.tell_home()
        self.send(m.WorkerStarted(self.id))
        self.heartbeat()

    def tell_home(self) -> None:
        if self.location != m.UNKNOWN_LOCATION:
            self.send(m.WorkerPlaced(self.id, self.location))

    def heartbeat(self) -> None:
        self.beat += 1
        told = self.step - (self.phase == "apply")  # the step counts when it is applied
        where = (self.generation, told, self.phase)
        if where != self.where:
            self.where, self.where_since = where, self.world.now
        self.beats[self.beat] = self.world.now
        self.beats.pop(self.beat - 60, None)
        self.send(
            m.HeartbeatReceived(
                self.id, self.generation, told, self.phase, self.beat, virtual_s=self.virtual_s
            )
        )
        self.later(self.world.config.heartbeat_interval_s, self.heartbeat)

    @property
    def virtual_s(self) -> float:
        known = self.world.profile.uneven and self.steps_here >= MEASURED
        return self.world.virtual_time(self.id) if known else 0.0

    def receive(self, command: m.Command) -> None:
        match command:
            case m.BeginTraining(is_source=is_source):
                if not self.begun:
                    self.begun, self.is_source = True, is_source
                    self.asked_source = self.world.rng.random() < 0.6
                    self.later(self.world.build_time(), self.built)
            case m.RenewLease(beat=beat):
                sent = self.beats.get(beat, -math.inf)
                self.lease_until = max(self.lease_until, sent + self.world.config.lease_s)
            case m.FormGeneration(membership=membership):
                self.world.check.told_to_form(self, membership)
                self.form(membership)
            case m.AbortGeneration(generation=generation):
                self.abort(generation)
            case m.EndGeneration(generation=generation, after_step=after_step):
                self.world.check.told_to_end(self, generation, after_step)
                self.end(generation, after_step)
            case m.StopTraining():
                self.stop_flag = True
            case m.TakeCheckpoint():
                self.keep_wanted = True
            case m.WriteDrainCheckpoint(generation=generation):
                if not self.inside and generation >= self.generation:
                    self.world.check.kept(self)
                    delay = self.world.rng.choice((0.1, 1.0))
                    self.later(delay, self.world.commit, self.step, self.state, self.lineage_id)
                    self.phase = "keep"
                    self.later(0.1, self.look)
            case m.ReportState(asked=asked):
                self.tell_home()
                self.report(asked)
            case m.ReleaseWorker(reason=reason):
                self.released = reason
                self.abort(self.generation)
                if not self.begun or not self.ready:
                    self.world.kill(self, "left")

    @property
    def runs_user_code(self) -> bool:
        return self.begun and not self.raised and self.phase in ("start", "compute", "body")

    def raises(self) -> None:
        """The user's code. It says so, again and again, and does nothing else until it is
        released."""
        self.raised, self.token = True, self.token + 1
        self.say_failed()

    def say_failed(self) -> None:
        self.send(m.WorkerFailed(self.id, "KeyError: 'x'", "traceback"))
        self.later(5.0, self.say_failed)

    def built(self) -> None:
        if self.raised:
            return
        self.ready = True
        self.send(m.WorkerReady(self.id, self.signature, self.can_source))
        self.wait()

    @property
    def signature(self) -> Signature:
        return self.world.signature(self.id)

    @property
    def can_source(self) -> bool:
        return self.is_source or not self.asked_source

    def report(self, asked: int) -> None:
        signature = self.signature if self.ready else None
        out = self.ready and not self.inside
        self.send(
            m.WorkerReported(
                self.id,
                self.generation,
                self.position,
                self.has_state,
                out,
                signature,
                self.can_source,
                self.lineage_id,
                asked,
            )
        )

    # ---------------------------------------------------------------- control thread

    def form(self, membership: Membership) -> None:
        if self.form_next is not None and membership.generation < self.form_next.generation:
            return
        self.form_next = membership
        if self.inside:
            self.over(membership.generation - 1)
        self.look()

    def abort(self, generation: int) -> None:
        self.asked = max(self.asked, generation)
        self.over(generation)
        self.look()

    def end(self, generation: int, after_step: int) -> None:
        if generation < self.generation or generation <= self.ended or not self.inside:
            self.asked = max(self.asked, generation)
            self.ended = max(self.ended, generation)
            self.look()
            return
        last = min(after_step, self.planned.get(generation, after_step))
        self.planned[generation] = last
        if generation == self.generation and (self.finished or self.attempting > last):
            self.asked = max(self.asked, generation)
            self.over(generation)  # the others did not enter this step

    def over(self, generation: int) -> None:
        self.ended = max(self.ended, generation)
        if self.raised:
            return
        if self.inside and self.generation <= self.ended and not self.busy:
            self.token += 1
            self.later(
                self.world.rng.choice((0.0, 0.05, 0.5)), self.leave, self.token, "aborted", ()
            )

    def look(self) -> None:
        if self.raised:
            if self.released is not None:
                self.world.kill(self, "left")
        elif self.ready and not self.inside:
            self.wait()

    # --------------------------------------------------------------- training thread

    def wait(self) -> None:
        """Out of every generation."""
        self.phase = "done" if self.finished else "wait"
        if self.released is not None:
            self.world.kill(self, "left")
            return
        if self.asked:
            generation, self.asked = self.asked, 0
            self.say_stopped(max(generation, self.generation), "asked", ())
        membership, self.form_next = self.form_next, None
        if membership is not None and membership.generation > self.ended:
            self.generation, self.inside = membership.generation, True
            self.token += 1
            self.attempting = self.steps_here = 0
            self.phase = "form"
            self.group = self.world.group_of(membership)
            self.all_joined = not self.group.joining
            self.later(membership.forming_timeout_s, self.forming_timeout, self.token)
            self.world.check.entered(self, membership)
            self.group.enter(self, "form")

    def leave(self, token: int, reason: str, unreachable: tuple[str, ...]) -> None:
        if token != self.token or not self.inside:
            return
        self.world.check.left(self)
        self.world.check.intact(self)
        self.keep_finished()
        self.inside = False
        self.token += 1
        self.ended = max(self.ended, self.generation)
        assert self.group is not None
        self.group.reset_by(self)
        if not self.asked:
            self.say_stopped(self.generation, reason, unreachable)
        self.wait()

    def keep_finished(self) -> None:
        """All of its virtual workers if it is in a collective, else some of them."""
        if self.attempting != self.step + 1 or self.phase not in ("compute", "collective"):
            return
        assert self.group is not None
        if self.joins_gradually:
            return
        mine = self.group.members[self.id].virtual_workers
        some = zlib.crc32(f"{self.id} {self.generation}".encode()) % len(mine)
        done = mine if self.phase == "collective" else mine[:some]
        found = cover_share([(v, v + 1) for v in done], self.world.config.virtual_workers)
        if self.finished_of == self.attempting:
            found += [node for node in self.finished_nodes if not set(range(*node)) & set(done)]
        self.finished_of, self.finished_nodes = self.attempting, tuple(sorted(found))

    @property
    def finished_of_next_step(self) -> tuple[tuple[int, int], ...]:
        return self.finished_nodes if self.finished_of == self.step + 1 else ()

    def say_stopped(self, generation: int, reason: str, unreachable: tuple[str, ...]) -> None:
        self.said_out = max(self.said_out, generation)
        self.send(
            m.WorkerStopped(
                self.id,
                generation,
                self.position,
                self.has_state,
                reason,
                unreachable,
                self.at_head,
                self.lineage_id,
                self.mismatch,
                self.finished_of_next_step,
            )
        )

    def failed(self, reason: str, unreachable: tuple[str, ...] = ()) -> None:
        self.leave(self.token, reason, unreachable)

    def connection_reset(self, token: int) -> None:
        restores = self.group is not None and self.group.membership.restore
        sharing = restores and self.phase == "receive"
        if token == self.token and (sharing or self.phase in ("collective", "evaluate", "form")):
            self.failed("connection reset")

    # forming and hand-over

    def forming_timeout(self, token: int) -> None:
        if token == self.token and self.phase == "form" and self.group is not None:
            absent = set(self.group.ids) - {w.id for w in self.group.entered["form"]}
            self.failed("forming timed out", tuple(sorted(absent)))

    def all_entered(self, token: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        far = [w for w in self.group.ids if frozenset((w, self.id)) in self.world.bad_pairs]
        if far:
            self.later(0.5, self.could_not_reach, token, tuple(far))
        elif not self.world.any_bad_pair(self.group.ids):
            self.later(self.world.rng.choice((0.02, 0.3)), self.connected, token)

    def could_not_reach(self, token: int, far: tuple[str, ...]) -> None:
        if token == self.token:
            self.failed("connect refused", far)

    def connected(self, token: int) -> None:
        if token != self.token:
            return
        if self.world.now > self.lease_until:
            self.failed("lease ran out")
            return
        group = self.group
        assert group is not None
        group.formed.add(self.id)
        source = self.world.workers[group.membership.source]
        if group.membership.restore and not self.has_state:
            self.phase = "restore"
            group.committed = group.committed or max(self.world.commits)
            self.later(self.world.transfer_time(), self.share, self.token)
        elif source is self:
            if not self.has_state:
                self.has_state, self.state = True, self.world.check.initial_source_formed(self)
                self.lineage_id = group.membership.lineage_id
            self.give()
        elif not self.has_state or self.position < group.members[source.id].position:
            self.phase = "receive"
            self.later(self.world.transfer_time(), self.received, self.token)
        else:
            self.resume()

    def share(self, token: int) -> None:
        """The worker has read its share; the rest comes from the others when they have theirs."""
        if token == self.token:
            assert self.group is not None
            self.phase = "receive"
            self.group.enter(self, "share")

    def restored(self, token: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        if self.world.rng.random() < self.world.profile.torn:
            self.failed("sharing failed")
            return
        self.step = self.body_begun = self.group.committed
        self.evaluated = self.known_evaluations = evaluations(self.step)
        self.agreed = self.step
        self.state = self.world.check.restored(self)
        self.has_state, self.lineage_id = True, self.group.membership.lineage_id
        self.finished_of = 0
        self.resume()

    def give(self) -> None:
        """Not past forming before it has given all, whatever those who receive say by then."""
        assert self.group is not None
        if all(
            member.worker in self.group.joining
            or (member.has_state and member.position == self.position)
            for member in self.group.members.values()
        ):
            self.resume()
        else:
            self.phase = "give"
            self.later(self.world.transfer_time(), self.given, self.token)

    def given(self, token: int) -> None:
        if token == self.token:
            self.resume()

    def received(self, token: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        source = self.world.workers[self.group.membership.source]
        serving = source.alive and source.inside and source.generation == self.generation
        if serving and (
            source.frozen
            or source.hung
            or source.id not in self.group.formed
            or not source.has_state
        ):
            self.later(0.3, self.received, token)
        elif not serving:
            if not self.has_state:
                self.state = GARBAGE
            self.failed("the source is gone", (source.id,))
        elif self.world.rng.random() < self.world.profile.torn:
            self.failed("hand-over failed", (source.id,))  # staged: nothing was written
        elif self.joins_gradually:
            self.take_parts(source)
        else:
            self.world.check.handed_over(self, source)
            if not self.has_state:
                self.body_begun, self.at_head = source.step, True
                self.evaluated = source.evaluated
            elif source.step > self.step:
                self.at_head, self.evaluated = False, 0
            self.step, self.state, self.ended_run = source.step, source.state, source.ended_run
            self.known_evaluations = source.evaluated
            self.agreed, self.flipped = source.agreed, source.flipped
            self.finished_of = 0
            self.has_state, self.lineage_id = True, self.group.membership.lineage_id
            self.world.check.holds(self)
            self.resume()

    def take_parts(self, source: SimWorker) -> None:
        """Makes the steps of the others from here on, and gets a part of the state in each."""
        assert self.group is not None
        if not self.keeps_parts(source):
            self.parts, self.parts_arrived = source.state, 0
        self.step, self.ended_run, self.evaluated = source.position
        self.body_begun, self.at_head = self.step, True
        self.group.parts_left = max(self.group.parts_left, PARTS - self.parts_arrived, 1)
        self.attempt()

    def keeps_parts(self, source: SimWorker) -> bool:
        assert self.group is not None
        return self.parts_of == (self.group.membership.lineage_id, source.step)

    def applied(self) -> None:
        """It has made the step that the others made, with the parts that it has."""
        assert self.group is not None
        self.busy = False
        self.parts, self.parts_arrived = chain(self.parts, self.step), self.parts_arrived + 1
        self.parts_of = self.group.membership.lineage_id, self.step
        self.attempt()

    def complete_join(self) -> None:
        """All stop for what does not travel in parts."""
        assert self.group is not None
        joins, self.all_joined = self.joins_gradually, True
        if joins:
            source = self.world.workers[self.group.membership.source]
            self.world.check.handed_over(self, source)
            self.state, self.evaluated = self.parts, source.evaluated
            self.known_evaluations, self.agreed = source.evaluated, source.agreed
            self.has_state, self.lineage_id = True, self.group.membership.lineage_id
            self.body_begun, self.finished_of = self.step, 0
            self.world.check.joined_gradually(self)
        self.attempt()

    def resume(self) -> None:
        if self.body_begun < self.step:
            self.body()
        elif not self.at_head:
            self.evaluate(self.token)
        else:
            self.attempt()

    # a step

    def attempt(self) -> None:
        """At a boundary."""
        assert self.group is not None
        is_done = self.ended_run or 0 < self.group.parts_left <= self.steps_here
        if self.ended >= self.generation:
            self.failed("aborted")
        elif not self.all_joined and is_done:
            self.phase = "collective"
            self.group.enter(self, ("complete", self.step))
        elif self.ended_run:
            self.finished, self.phase = True, "done"
            where = self.id, self.generation, self.position
            self.send(m.WorkerFinished(*where, self.state, lineage_id=self.lineage_id))
        elif self.step >= self.planned.get(self.generation, math.inf):
            self.failed("planned end")
        elif self.world.now > self.lease_until:
            self.failed("lease ran out")
        else:
            keeps = not self.joins_gradually and self.world.snapshot(self)
            self.phase = "keep" if keeps else "data"
            self.attempting = self.step + 1
            self.later(self.world.rng.choice((0.0, 0.0, 0.3)), self.compute, self.token)

    def compute(self, token: int) -> None:
        if token == self.token:
            self.phase = "compute"
            self.later(self.compute_time(), self.enter, token, 0)

    def compute_time(self) -> float:
        usual = self.world.compute_time()
        if not self.world.profile.uneven:
            return usual
        assert self.group is not None
        member = self.group.members[self.id]
        return usual * self.world.virtual_time(self.id) * member.num_virtual_workers

    def enter(self, token: int, index: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        self.phase = "collective"
        if index == 0 and self.stop_flag:
            self.group.stop[self.attempting] = True
        self.group.enter(self, (self.attempting, index))

    def collective_done(self, token: int, key: Any) -> None:
        if token != self.token:
            return  # aborted: the compare-and-swap of the commit
        assert self.group is not None
        torn = len(self.group.alive()) < len(self.group.ids)
        if torn and self.world.rng.random() < 0.5:
            self.failed("connection reset")
        elif key[0] == "complete":
            self.complete_join()
        elif key[0] == "evaluate":
            self.evaluated += 1
            self.evaluate(token)
        elif key[1] == 0 and self.differs(self.group.weights[key]):
            self.failed("weights differ")
        elif key[1] + 1 < COLLECTIVES:
            self.enter(token, key[1] + 1)
        elif self.world.now > self.lease_until:
            self.failed("lease ran out")
        else:
            self.commit()

    def differs(self, weights: dict[str, str]) -> bool:
        """What the header tells of all members' weights."""
        assert self.group is not None
        counted = Counter(weights.values())
        if len(counted) == 1:
            self.agreed = self.step
            self.world.check.agreed(self, self.group)
            return False
        usual, times = counted.most_common(1)[0]
        odd = [w for w, state in weights.items() if state != usual or times <= len(weights) / 2]
        self.mismatch = m.ReplicaMismatch(self.agreed, tuple(odd))
        return True

    def commit(self) -> None:
        assert self.group is not None
        self.step += 1
        self.steps_here += 1
        self.evaluated = self.known_evaluations = 0
        last = self.step >= self.world.steps or self.group.stop.get(self.step, False)
        self.ended_run = int(last)
        self.attempting = 0
        self.phase, self.busy = "apply", True
        joins = self.joins_gradually
        if joins:
            self.body_begun = self.step  # of the others
        else:
            self.state, self.at_head = chain(self.state, self.step), False
        self.world.check.committed(self, self.group)
        self.later(0.02, self.applied if joins else self.body)

    def body(self) -> None:
        self.phase, self.busy = "body", True
        self.at_head = False
        self.world.check.body_runs(self)
        self.body_begun = self.step
        self.later(self.world.body_time(), self.body_ran)

    def body_ran(self) -> None:
        self.busy = False
        if not self.raised:
            self.evaluate(self.token)

    def evaluate(self, token: int) -> None:
        if token != self.token:
            return
        while self.evaluated < min(self.known_evaluations, evaluations(self.step)):
            self.evaluated += 1  # the source told the result
        if self.evaluated >= evaluations(self.step):
            self.at_head = True
            self.attempt()
        elif self.ended >= self.generation:
            self.failed("aborted")
        else:
            assert self.group is not None
            self.phase = "evaluate"
            self.group.enter(self, ("evaluate", self.step, self.evaluated))
