"""The simulated worker: what the design says a worker does, without tensors.

A step has several collectives, each of which needs every member; after the last one the step is committed by a
compare-and-swap against abort, then its body runs, which on some steps holds evaluations (collectives too). The
state is a chain of hashes, so that holding the wrong state is visible at once. Training thread and control
thread are one object: an abort makes the pending callback of the training thread stale (`token`), except in
apply and body, which run to their end first.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.messages import Membership, Place, Signature

if TYPE_CHECKING:
    from tests.simulation.world import World

COLLECTIVES = 2  # per step
GARBAGE = "half written"


def chain(state: str, step: int) -> str:
    return format(zlib.crc32(f"{state} {step}".encode()), "08x")


def evaluations(step: int) -> int:
    return 2 if step % 3 == 0 else 0


class Group:
    """One generation's process group: who entered which collective."""

    def __init__(self, world: World, membership: Membership) -> None:
        self.world, self.membership = world, membership
        self.members = [seat.worker for seat in membership.seats]
        self.seats = {seat.worker: seat for seat in membership.seats}
        self.entered: dict[Any, dict[SimWorker, int]] = {}  # with the token it had then
        self.completed_at: dict[Any, float] = {}
        self.stop: dict[int, bool] = {}
        self.formed: set[str] = set()

    def enter(self, worker: SimWorker, key: Any) -> None:
        inside = self.entered.setdefault(key, {})
        inside[worker] = worker.token
        if len(inside) == len(self.members):
            self.completed_at[key] = self.world.now
            for member, token in inside.items():
                if key == "form":
                    member.later(0.0, member.all_entered, token)
                else:
                    delay = self.world.rng.choice((0.01, 0.05, 0.4))
                    member.later(delay, member.collective_done, token, key)

    def alive(self) -> list[SimWorker]:
        workers = (self.world.workers[member] for member in self.members)
        here = self.membership.generation
        return [w for w in workers if w.alive and w.inside and w.generation == here]

    def reset_by(self, gone: SimWorker) -> None:
        """A member left or died: those blocked with it may see their connection reset, or stay blocked."""
        for member in self.alive():
            if member is not gone and self.world.rng.random() < 0.8:
                delay = self.world.rng.uniform(0.0, 0.3)
                member.later(delay, member.connection_reset, member.token)


class SimWorker:
    def __init__(self, world: World, worker_id: str) -> None:
        self.world, self.id = world, worker_id
        self.alive, self.frozen = True, False
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []
        self.up_cut = self.down_cut = False
        self.phase = "start"
        self.begun = self.ready = self.is_source = self.asked_source = False
        self.token = 0
        self.generation, self.inside, self.ended = 0, False, 0
        self.busy = False  # in apply or body: aborts wait
        self.attempting = 0
        self.planned: dict[int, int] = {}
        self.said_out, self.thawed_at = 0, -math.inf
        self.asked = 0
        self.form_next: Membership | None = None
        self.group: Group | None = None
        self.step, self.ended_run, self.evaluated, self.known_evaluations = 0, 0, 0, 0
        self.state, self.whole, self.founded = GARBAGE, False, 0
        self.body_begun = 0  # the step whose body was begun last
        self.at_head = True
        self.finished = False
        self.stop_flag = False
        self.released: str | None = None
        self.beat = 0
        self.beats: dict[int, float] = {}
        self.lease_until = world.now + world.rules.lease_s
        self.node_deadline = math.inf

    @property
    def place(self) -> Place:
        return Place(self.step, self.ended_run, self.evaluated)

    def later(self, delay: float, function: Any, *args: Any) -> None:
        self.world.at(delay, self.run_unless_gone, function, args)

    def run_unless_gone(self, function: Any, args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.deferred.append((function, args))
        else:
            function(*args)

    def thaw(self) -> None:
        self.frozen, self.thawed_at = False, self.world.now
        pending, self.deferred = self.deferred, []
        for function, args in pending:
            self.run_unless_gone(function, args)

    def send(self, event: m.Event) -> None:
        self.world.to_controller(self, event)

    # ------------------------------------------------------------------------- life

    def start(self) -> None:
        self.send(m.WorkerStarted(self.id))
        self.heartbeat()

    def heartbeat(self) -> None:
        self.beat += 1
        self.beats[self.beat] = self.world.now
        self.beats.pop(self.beat - 60, None)
        self.send(m.WorkerHeard(self.id, self.generation, self.step, self.phase, self.beat))
        self.later(self.world.rules.heartbeat_interval_s, self.heartbeat)

    def receive(self, command: m.Command) -> None:
        match command:
            case m.BeginTraining(is_source=is_source):
                if not self.begun:
                    self.begun, self.is_source = True, is_source
                    self.asked_source = self.world.rng.random() < 0.6
                    self.later(self.world.build_time(), self.built)
            case m.RenewLease(beat=beat):
                sent = self.beats.get(beat, -math.inf)
                self.lease_until = max(self.lease_until, sent + self.world.rules.lease_s)
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
            case m.ReportYourself():
                self.report()
            case m.ReleaseWorker(reason=reason):
                self.released = reason
                self.abort(self.generation)
                if not self.begun or not self.ready:
                    self.world.kill(self, "left")

    def built(self) -> None:
        self.ready = True
        self.send(m.WorkerReady(self.id, self.signature, self.can_source))
        self.wait()

    @property
    def signature(self) -> Signature:
        return self.world.signature(self.id)

    @property
    def can_source(self) -> bool:
        return self.is_source or not self.asked_source

    def report(self) -> None:
        signature = self.signature if self.ready else None
        out = self.ready and not self.inside
        self.send(
            m.WorkerReported(
                self.id,
                self.generation,
                self.place,
                self.whole,
                out,
                signature,
                self.can_source,
                self.founded,
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
        if self.inside and self.generation <= self.ended and not self.busy:
            self.token += 1
            self.later(
                self.world.rng.choice((0.0, 0.05, 0.5)), self.leave, self.token, "aborted", ()
            )

    def look(self) -> None:
        if self.ready and not self.inside:
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
            self.attempting = 0
            self.phase = "form"
            self.group = self.world.group_of(membership)
            self.later(membership.forming_timeout_s, self.forming_timeout, self.token)
            self.world.check.entered(self, membership)
            self.group.enter(self, "form")

    def leave(self, token: int, reason: str, unreachable: tuple[str, ...]) -> None:
        if token != self.token or not self.inside:
            return
        self.world.check.left(self)
        self.world.check.intact(self)
        self.inside = False
        self.token += 1
        self.ended = max(self.ended, self.generation)
        assert self.group is not None
        self.group.reset_by(self)
        if not self.asked:
            self.say_stopped(self.generation, reason, unreachable)
        self.wait()

    def say_stopped(self, generation: int, reason: str, unreachable: tuple[str, ...]) -> None:
        self.said_out = max(self.said_out, generation)
        self.send(
            m.WorkerStopped(
                self.id,
                generation,
                self.place,
                self.whole,
                reason,
                unreachable,
                self.at_head,
                self.founded,
            )
        )

    def failed(self, reason: str, unreachable: tuple[str, ...] = ()) -> None:
        self.leave(self.token, reason, unreachable)

    def connection_reset(self, token: int) -> None:
        if token == self.token and self.phase in ("collective", "evaluate", "form"):
            self.failed("connection reset")

    # forming and hand-over

    def forming_timeout(self, token: int) -> None:
        if token == self.token and self.phase == "form" and self.group is not None:
            absent = set(self.group.members) - {w.id for w in self.group.entered["form"]}
            self.failed("forming timed out", tuple(sorted(absent)))

    def all_entered(self, token: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        far = [w for w in self.group.members if frozenset((w, self.id)) in self.world.bad_pairs]
        if far:
            self.later(0.5, self.could_not_reach, token, tuple(far))
        elif not self.world.any_bad_pair(self.group.members):
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
        if source is self:
            if not self.whole:
                self.whole, self.state = True, self.world.check.founded(self)
                self.founded = group.membership.founded
            self.resume()
        elif not self.whole or self.place < group.seats[source.id].place:
            self.phase = "receive"
            self.later(self.world.transfer_time(), self.received, self.token)
        else:
            self.resume()

    def received(self, token: int) -> None:
        if token != self.token:
            return
        assert self.group is not None
        source = self.world.workers[self.group.membership.source]
        serving = source.alive and source.inside and source.generation == self.generation
        if serving and (source.frozen or source.id not in self.group.formed):
            self.later(0.3, self.received, token)
        elif not serving:
            if not self.whole:
                self.state = GARBAGE
            self.failed("the source is gone", (source.id,))
        elif self.world.rng.random() < self.world.weather.torn:
            self.failed("hand-over failed", (source.id,))  # staged: nothing was written
        else:
            self.world.check.handed_over(self, source)
            if not self.whole:
                self.body_begun, self.at_head = source.step, True
                self.evaluated = source.evaluated
            elif source.step > self.step:
                self.at_head, self.evaluated = False, 0
            self.step, self.state, self.ended_run = source.step, source.state, source.ended_run
            self.known_evaluations = source.evaluated
            self.whole, self.founded = True, self.group.membership.founded
            self.world.check.holds(self)
            self.resume()

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
        if self.ended >= self.generation:
            self.failed("aborted")
        elif self.ended_run:
            self.finished, self.phase = True, "done"
            self.send(m.WorkerFinished(self.id, self.generation, self.place, self.state))
        elif self.step >= self.planned.get(self.generation, math.inf):
            self.failed("planned end")
        elif self.world.now > self.lease_until:
            self.failed("lease ran out")
        else:
            self.attempting = self.step + 1
            self.phase = "compute"
            self.later(self.world.compute_time(), self.enter, self.token, 0)

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
        torn = len(self.group.alive()) < len(self.group.members)
        if torn and self.world.rng.random() < 0.5:
            self.failed("connection reset")
        elif key[0] == "evaluate":
            self.evaluated += 1
            self.evaluate(token)
        elif key[1] + 1 < COLLECTIVES:
            self.enter(token, key[1] + 1)
        elif self.world.now > self.lease_until:
            self.failed("lease ran out")
        else:
            self.commit()

    def commit(self) -> None:
        assert self.group is not None
        self.step += 1
        self.state = chain(self.state, self.step)
        self.evaluated = self.known_evaluations = 0
        last = self.step >= self.world.steps or self.group.stop.get(self.step, False)
        self.ended_run = int(last)
        self.attempting = 0
        self.at_head = False
        self.phase, self.busy = "apply", True
        self.world.check.committed(self, self.group)
        self.later(0.02, self.body)

    def body(self) -> None:
        self.phase, self.busy = "body", True
        self.at_head = False
        self.world.check.body_runs(self)
        self.body_begun = self.step
        self.later(self.world.body_time(), self.body_ran)

    def body_ran(self) -> None:
        self.busy = False
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
