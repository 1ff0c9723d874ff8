"""Invariants of a whole run, checked from outside: they know the true state of every worker.

`Invariants` watches what the workers commit, receive and run, and every command.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Command, Membership
from tests.simulation.workers import COLLECTIVES, MEASURED

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.workers import SimWorker
    from tests.simulation.world import SimController, World


class Violation(AssertionError):
    """An invariant does not hold."""


def must(condition: object, text: str) -> None:
    if not condition:
        raise Violation(text)


def fitting(nodes: Sequence[tuple[int, int]], size: int, taken: set[int]) -> int:
    """The virtual workers of those subtrees that fit, in order, into a share of this size, without
    those that are taken."""
    used: set[int] = set()
    for first, last in nodes:
        node = {*range(first, last)}
        used |= node if len(used | node) <= size and not node & taken else set()
    taken |= used
    return len(used)


def most_to_run(
    shares: Sequence[Sequence[tuple[int, int]]], finished: Sequence[Sequence[tuple[int, int]]]
) -> int:
    """The most virtual workers of one rank that are in no finished subtree within its share."""
    return max(
        sum(
            not any(low <= a <= v < b <= high for a, b in nodes)
            for low, high in share
            for v in range(low, high)
        )
        for share, nodes in zip(shares, finished, strict=True)
    )


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.lineages: dict[int, dict[int, str]] = {}  # lineage -> step -> the state after it
        self.lineage = 0  # the one that counts
        self.memberships: dict[int, Membership] = {}
        self.prepared: dict[int, tuple[int, tuple[str, ...]]] = {}  # by number
        self.asked: set[tuple[int, int]] = set()  # which generation whom
        self.first_commit: dict[int, float] = {}  # generation -> when
        self.newest_committing = 0
        self.left_at: dict[int, dict[str, float]] = {}  # generation -> worker -> when
        self.late: set[str] = set()  # made a step of a generation that others had left
        self.claims: dict[int, Any] = {}
        self.started: set[str] = set()
        self.finish: m.FinishRun | None = None
        self.finished_by: SimController | None = None
        self.failure: m.FailRun | None = None
        self.newest_told: dict[str, int] = {}
        self.last_steps: dict[tuple[str, int], tuple[int, float]] = {}
        self.first_told: dict[tuple[str, int, int], float] = {}
        self.marks: Counter[str] = Counter()

    @property
    def removed(self) -> set[str]:
        """Evicted or released by whoever leads now."""
        return self.world.controllers[-1].removed

    @property
    def states(self) -> dict[int, str]:
        return self.lineages.setdefault(self.lineage, {})

    # ------------------------------------------------------------------- the workers

    def entered(self, worker: SimWorker, membership: Membership) -> None:
        known = self.memberships.get(membership.generation)
        must(
            known == membership, f"{worker.id} knows another membership of {membership.generation}"
        )
        newest = self.newest_told[worker.id]
        must(newest == membership.generation, f"{worker.id} was told of {newest}, not of this one")
        told = worker.said_out
        must(membership.generation > told, f"{worker.id} said that it is out of {told}")
        member = next(s for s in membership.members if s.worker == worker.id)
        if member.has_state or worker.has_state:
            must(
                member.has_state == worker.has_state,
                f"{member} but {worker.id} has state: {worker.has_state}",
            )
            must(
                member.position == worker.position,
                f"{member} but {worker.id} is at {worker.position}",
            )

    def intact(self, worker: SimWorker) -> None:
        """A worker that has state holds all of it, also when a hand-over to the worker failed."""
        if worker.has_state and not worker.flipped:
            truth = self.lineages.get(worker.lineage_id, {}).get(worker.step, worker.state)
            must(worker.state == truth, f"{worker.id} holds {worker.state}, not {truth}")

    def removed_for(self, worker: SimWorker) -> set[str]:
        """Who was evicted or released by the controller that announced `worker`'s generation, or
        by the newest controller."""
        assert worker.group is not None
        announcer = self.claims[worker.group.membership.generation]
        return self.removed | announcer.removed

    def told_to_form(self, worker: SimWorker, membership: Membership) -> None:
        self.newest_told[worker.id] = max(membership.generation, self.newest_told.get(worker.id, 0))

    def told_to_end(self, worker: SimWorker, generation: int, after_step: int) -> None:
        """From now on the worker may finish the step it is in, and none beyond `after_step`."""
        if worker.inside and generation == worker.generation:
            last = max(after_step, worker.step, worker.attempting)
            known, _ = self.last_steps.get((worker.id, generation), (last, 0.0))
            self.last_steps[worker.id, generation] = (min(last, known), self.world.now)
            self.first_told.setdefault((worker.id, generation, after_step), self.world.now)

    def left(self, worker: SimWorker) -> None:
        self.left_at.setdefault(worker.generation, {})[worker.id] = self.world.now
        for (name, generation, after), at in self.first_told.items():
            if (
                name == worker.id
                and generation == worker.generation
                and worker.phase == "collective"
            ):
                late = worker.attempting > after and self.world.now - at > 1.5
                thawed = self.world.now - worker.thawed_at < 1.5
                must(not late or thawed, f"{name} waits in a step that the others did not enter")

    def initial_source_formed(self, worker: SimWorker) -> str:
        """The initial source formed its first generation: its initial weights are the state from
        now on."""
        must(
            worker.can_source,
            f"{worker.id} was told its weights do not count, and is the initial source",
        )
        holders = [
            other.id
            for other in self.world.workers.values()
            if other.alive and other.has_state and other.id not in self.removed_for(worker)
        ]
        must(
            not holders or worker.id in self.removed_for(worker),
            f"{worker.id} starts from initial weights while {holders} hold the run's state",
        )
        if worker.id in self.removed_for(worker):
            return f"init {worker.id}"  # evicted; its lease keeps it from any step
        if self.lineage:
            self.marks["initial weights again"] += 1
        assert worker.group is not None
        self.lineage = worker.group.membership.lineage_id
        self.lineages[self.lineage] = {0: f"init {worker.id}"}
        return f"init {worker.id}"

    def agreed(self, worker: SimWorker, group: Group) -> None:
        """All members hold the same; if all of it comes from one that is wrong, nobody can know: it
        is the run's from now on, and what anybody else holds is not."""
        if worker.flipped:
            self.marks["flip unseen"] += 1
            self.lineages[self.lineage] = {worker.step: worker.state}
            members = group.alive()
            for other in self.world.workers.values():
                other.flipped = other.has_state and other not in members

    def restored(self, worker: SimWorker) -> str:
        """Nobody holds the run's state, and it goes on from the newest checkpoint."""
        assert worker.group is not None
        removed = self.removed_for(worker)
        holders = [
            w.id
            for w in self.world.workers.values()
            if w.alive and w.has_state and w.id not in removed and w.group is not worker.group
        ]
        state = self.world.commits[worker.step]
        if worker.id in removed:
            return state  # evicted; its lease keeps it from any step
        must(not holders, f"{worker.id} goes back to {worker.step} while {holders} hold the state")
        self.marks["restored"] += 1
        self.lineage = worker.group.membership.lineage_id
        self.lineages[self.lineage] = {worker.step: state}
        return state

    def committed(self, worker: SimWorker, group: Group) -> None:
        generation = group.membership.generation
        if worker.has_state:
            self.holds(worker)
        self.marks["commit"] += 1
        last, _ = self.last_steps.get((worker.id, generation), (worker.step, 0.0))
        must(
            worker.step <= last,
            f"{worker.id} makes step {worker.step} of {generation} after {last}",
        )
        for controller in self.world.controllers:
            controller.failed_sets.clear()
        if generation < self.newest_committing:
            self.late_commit(worker, group)
        if generation not in self.first_commit:
            self.first_commit[generation] = self.world.now
        self.newest_committing = max(self.newest_committing, generation)

    def late_commit(self, worker: SimWorker, group: Group) -> None:
        """A later generation makes steps already. Allowed is the one step that this one had in
        flight when its others left it, to a worker that was evicted, from what those others had
        sent before; nobody else ever has it from there."""
        self.marks["late commit"] += 1
        generation, step = group.membership.generation, worker.step
        what = f"{worker.id} makes step {step} of {generation} beside a later generation"
        gone = self.ever_removed(generation)
        must(worker.id in gone, f"{what}, and was not evicted")
        must(worker.id not in self.late, f"{what}, and did so before")
        self.late.add(worker.id)
        later, begun_at = min((g, at) for g, at in self.first_commit.items() if g > generation)
        top = max(member.position.step for member in self.members(later) if member.has_state)
        must(step <= top + 1, f"{what}, which goes on from {top}")
        left_at = self.left_at.get(generation, {})
        must(min(left_at.values(), default=begun_at) < begun_at, f"{what}, and nobody had left it")
        for index in range(COLLECTIVES):
            for other, at in group.entered_at[step, index].items():
                must(at <= left_at.get(other, at), f"{what}, with {other}, which had left")
                must(at <= begun_at or other in gone, f"{what}, with {other}, not evicted")

    def ever_removed(self, generation: int) -> set[str]:
        """Who was evicted or released by the controller that announced this generation, or by a
        later one."""
        announcer = self.claims[generation]
        leaders = [c for c in self.world.controllers if c.number >= announcer.number]
        return set().union(*(controller.removed for controller in leaders))

    def joined_gradually(self, worker: SimWorker) -> None:
        self.marks["gradual join"] += 1
        self.holds(worker)

    def holds(self, worker: SimWorker) -> None:
        if worker.flipped:
            return
        if (
            worker.lineage_id != self.lineage
        ):  # all who held the later one are gone: an older one counts
            holders = [
                w.id
                for w in self.world.workers.values()
                if w.alive
                and w.has_state
                and w.lineage_id == self.lineage
                and w.id not in self.removed_for(worker)
            ]
            must(not holders, f"{worker.id} goes on from an older lineage than {holders}")
            self.lineage = worker.lineage_id
        truth = self.states.setdefault(worker.step, worker.state)
        must(
            worker.state == truth,
            f"{worker.id} holds {worker.state} after step {worker.step}, not {truth}",
        )

    def body_runs(self, worker: SimWorker) -> None:
        must(
            worker.step == worker.body_begun + 1,
            f"{worker.id} runs the body of {worker.step} after that of {worker.body_begun}",
        )

    def handed_over(self, worker: SimWorker, source: SimWorker) -> None:
        self.marks["hand-over"] += 1
        must(source.has_state, f"{source.id} without state is the source of {worker.id}")
        must(source.id not in self.late, f"{worker.id} takes what {source.id} made alone")
        must(
            source.position >= worker.position or not worker.has_state, f"{worker.id} would go back"
        )
        if worker.has_state:
            must(
                source.step - worker.step <= 1,
                f"{worker.id} at {worker.step} is too far behind {source.step}",
            )
        else:
            must(source.at_head, f"{source.id} is inside a body and gives {worker.id} its state")

    # ------------------------------------------------------------------ the commands

    def command(self, command: Command, by: SimController) -> None:
        match command:
            case m.StartWorker(worker=worker):
                must(worker not in self.started, f"identity {worker} is used again")
                self.started.add(worker)
            case m.ClaimGeneration(generation=generation):
                must(self.claims.get(generation) is not by, f"{generation} claimed twice by one")
                self.asked.add((generation, id(by)))
            case m.PrepareGroup():
                self.preparation(command, by)
            case m.FindCheckpoint(at_most=at_most):
                must(at_most == by.at_most, f"looks up to {at_most}, and was told {by.at_most}")
            case m.FormGeneration(membership=membership):
                wrong = by.at_most is not None and any(
                    member.has_state for member in membership.members
                )
                must(not wrong, f"{membership} goes on from weights that differ")
                by.at_most = None
                self.formation(membership, by)
            case m.EvictWorker(worker=worker, reason=reason):
                self.eviction(worker, reason, by)
            case m.ReleaseWorker(worker=worker, reason=reason):
                if "weights differed" not in reason:  # what it would take along is wrong
                    self.released(worker, by)
                by.removed.add(worker)
            case m.Explain(text=text) if "a split by speed" in text:
                self.reassigned_by_speed(by)
            case m.FinishRun():
                self.finished(command, by)
            case m.FailRun():
                self.run_failed(command, by)

    def formation(self, membership: Membership, by: SimController) -> None:
        generation, members = membership.generation, membership.members
        must(self.claims.get(generation) is by, f"{generation} announced without its claim")
        ids = frozenset(member.worker for member in members)
        lost, removed = ids & by.lost, ids & by.removed
        must(not lost, f"{lost} are known to be lost, and get a place in {generation}")
        must(not removed, f"{removed} were removed, and get a place in {generation}")
        must(generation not in self.memberships, f"{generation} is announced twice")
        self.memberships[generation] = membership
        assigned = sorted(v for member in members for v in member.virtual_workers)
        must(assigned == list(range(self.world.config.virtual_workers)), f"assigned {assigned}")
        self.assigned_by_speed(members, by)
        self.finished_stays(members, by)
        if membership.prepared:
            self.marks["prepared"] += 1
            told = self.prepared.get(membership.prepared)
            here = generation, tuple(member.worker for member in members)
            must(told == here, f"{told} connect, not {members}")
        has_state = [member for member in members if member.has_state]
        if has_state:
            top = max(member.position for member in has_state)
            source = members[membership.rank(membership.source)]
            must(
                source.has_state and source.position == top, f"{source} is the source, {top} exists"
            )
            must(self.world.workers[source.worker].has_state, f"{source} holds no state")
            must(
                top.step - min(s.position.step for s in has_state) <= 1,
                f"positions too far apart: {has_state}",
            )
            known = (
                {member.worker for member in self.members(by.generations[-1])}
                if by.generations
                else set()
            )
            stopped = [
                w
                for w in self.world.workers.values()
                if w.id in known
                and w.alive
                and w.has_state
                and w.phase in ("wait", "keep")
                and w.id in by.left_previous | by.reported_stopped
                and w.id not in by.removed
            ]
            ahead = [w.id for w in stopped if w.position > top]
            must(not ahead, f"{ahead} are ahead of {top} and have no place")
            self.marks["stopped with the newest state"] += any(w.position == top for w in stopped)
        at_head = self.world.workers[membership.source].at_head
        if not by.stopping and at_head:
            least = min(by.least, by.size)
            must(len(members) >= least, f"{len(members)} members, at least {least} wanted")
        must(len(members) <= max(by.size + 1, 1), f"{len(members)} members, size {by.size}")
        ranks = [member.worker for member in members]
        if by.generations:
            old = [
                s.worker
                for s in self.members(by.generations[-1])
                if s.worker in ranks and s.has_state
            ]
            must([w for w in ranks if w in old] == old, f"ranks changed order: {old} -> {ranks}")
        by.generations.append(generation)
        if by.failed_sets[-2:] == [ids, ids] and len(ids) > 1:
            must(False, f"{sorted(ids)} failed to form twice and is tried again")

    def assigned_by_speed(self, members: tuple[m.Member, ...], by: SimController) -> None:
        """A slower worker runs at most one virtual worker more than a faster one. Without measured
        speeds all run as many."""
        sizes = [member.num_virtual_workers for member in members]
        must(min(sizes) >= 1, f"nothing to do: {sizes}")
        known = [by.coordinator._registry.workers[member.worker].virtual_s for member in members]
        if not any(known):
            must(max(sizes) - min(sizes) <= 1, f"unbalanced: {sizes}")
            return
        fast_first = sorted((s, n) for s, n in zip(known, sizes, strict=True) if s)
        for (fast, more), (slow, fewer) in itertools.pairwise(fast_first):
            must(fewer <= more + 1 or fast == slow, f"{slow} s runs {fewer}, {fast} s runs {more}")

    def preparation(self, command: m.PrepareGroup, by: SimController) -> None:
        """Members connect for a number that is being claimed or is, and that this controller has
        not announced; none of them is gone. Another may have announced it: the members ignore what
        comes later. No two controllers prepare under one number."""
        generation, workers = command.generation, command.workers
        must((generation, id(by)) in self.asked, f"{command} without a claim")
        must(generation not in by.generations, f"{command} of a generation that it announced")
        gone = {*workers} & (by.lost | by.removed)
        must(not gone, f"{gone} are gone, and are told to connect")
        must(command.number not in self.prepared, f"{command} for the second time")
        self.prepared[command.number] = generation, workers

    def finished_stays(self, members: tuple[m.Member, ...], by: SimController) -> None:
        """Nobody must run more than where each keeps what it has finished, nor more than with
        contiguous ranges. Whoever is behind receives the step, and has finished nothing."""
        top = max((member.position for member in members if member.has_state), default=None)
        finished: list[tuple[tuple[int, int], ...]] = []
        for member in members:
            has = member.has_state and member.position == top
            told = by.coordinator._registry.workers[member.worker].finished_nodes if has else ()
            really = self.world.workers[member.worker].finished_of_next_step
            must(set(told) <= {*really}, f"{member.worker} has finished {really}, not {told}")
            finished.append(told)
        if not any(finished):
            must(all(len(member.ranges) == 1 for member in members), f"in pieces: {members}")
            return
        self.marks["finished work kept"] += 1
        sizes = [member.num_virtual_workers for member in members]
        contiguous = [[one] for one in itertools.pairwise(itertools.accumulate(sizes, initial=0))]
        taken: set[int] = set()  # two may have finished the same one after the other
        stays = [n - fitting(nodes, n, taken) for n, nodes in zip(sizes, finished, strict=True)]
        most = most_to_run([member.ranges for member in members], finished)
        must(
            most <= min(max(stays), most_to_run(contiguous, finished)),
            f"one runs {most}: {members}, finished {finished}",
        )

    def reassigned_by_speed(self, by: SimController) -> None:
        """A running generation ends for another split: not soon after the last time, and on what
        was measured in it."""
        if by is not self.world.controllers[-1]:
            return  # its members may be in a later generation by now
        self.marks["reassigned by speed"] += 1
        must(
            self.world.now >= by.reassigned_at + 60.0,
            "virtual workers are reassigned again and again",
        )
        by.reassigned_at = self.world.now
        generation = by.coordinator.generation
        for member in self.members(generation):
            worker = self.world.workers[member.worker]
            told = worker.generation == generation and worker.steps_here >= MEASURED
            must(told, f"{worker.id} is not measured in {generation}")

    def released(self, name: str, by: SimController) -> None:
        """The state of a drained worker that is released is held by others, or by the storage."""
        worker = self.world.workers.get(name)
        over = self.finish is not None or self.failure is not None
        if worker is None or not worker.has_state or over or by is not self.world.controllers[-1]:
            return
        if name not in by.drained or not self.world.config.checkpointing:
            return
        self.marks["drained"] += 1
        believed = by.coordinator.workers  # of a silent death nobody can know yet
        others = [w for w in self.world.workers.values() if w.has_state and w is not worker]
        others = [w for w in others if w.id in believed and w.id not in by.removed]
        held = any(w.position >= worker.position for w in others)
        must(
            held or worker.step <= max(self.world.commits, default=0),
            f"{name} is released, and step {worker.step} is lost with it",
        )

    def kept(self, worker: SimWorker) -> None:
        must(worker.has_state and worker.at_head, f"{worker.id} has no state to checkpoint")
        self.marks["checkpointed for a drain"] += 1

    def eviction(self, worker: str, reason: str, by: SimController) -> None:
        by.removed.add(worker)
        if reason.startswith("stuck"):
            self.stuck(self.world.workers[worker])
        if not reason.startswith("silent"):
            return
        now, timeout = self.world.now, self.world.config.heartbeat_timeout_s
        must(
            now - by.heard.get(worker, by.born) >= timeout - 1e-6,
            f"{worker} was heard, and evicted",
        )
        waiting = [e for e in by.inbox if isinstance(e, m.HeartbeatReceived) and e.worker == worker]
        must(not waiting, f"{worker} evicted while its heartbeats wait to be read")
        generation = by.coordinator.generation
        if worker in {s.worker for s in self.members(generation)}:
            reported_stopped = (
                worker in by.reported_stopped
            )  # it is out already, and who makes steps does so without it
            stepped = (
                reported_stopped or now - by.stepped_at.get(generation, -1e9) >= timeout - 1e-6
            )
            must(stepped, f"{worker} evicted though its generation makes steps")

    def stuck(self, worker: SimWorker) -> None:
        """A worker is evicted as stuck only if it hangs or is cut off, and not before the limit."""
        self.marks["stuck"] += 1
        stood_s = self.world.now - worker.where_since
        limit_s = self.world.config.hang_timeout_s
        must(stood_s >= (limit_s or 0.0) - 1e-6, f"{worker.id} evicted, went on {stood_s} s ago")
        thawed = self.world.now - worker.thawed_at < 1.5  # its word may be on its way
        must(
            worker.hung or worker.was_cut or thawed or not worker.alive,
            f"{worker.id} evicted as stuck in {worker.phase}, and waited for others",
        )

    def goes_back(self, generation: int) -> bool:
        membership = self.memberships.get(generation)
        return membership is not None and membership.restore

    def members(self, generation: int) -> tuple[m.Member, ...]:
        membership = self.memberships.get(generation)
        return membership.members if membership else ()

    def finished(self, command: m.FinishRun, by: SimController) -> None:
        if self.finish is not None:  # the record is create-only, the first counts
            must(by is not self.finished_by, "finished twice")
            return
        self.finish, self.finished_by = command, by
        if command.digest == "":
            must(
                command.position.step in (0, *self.world.commits),
                f"{command.position} has no checkpoint",
            )
            holders = [w.id for w in self.world.workers.values() if w.alive and w.has_state]
            holders = [w for w in holders if w not in self.removed | by.removed]
            must(not holders, f"finished at step 0, but {holders} hold a state")
            return
        must(command.position.ended == 1, f"finished at {command.position}")
        must(
            command.digest == self.states.get(command.position.step), "finished with other weights"
        )
        must(not command.digests_differ, "weights differ")
        further = [  # a step that no living worker holds does not count
            w.id
            for w in self.world.workers.values()
            if w.alive
            and w.has_state
            and w.lineage_id == self.lineage
            and w.position > command.position
        ]
        further = [w for w in further if w not in self.removed | by.removed]
        must(not further, f"finished at {command.position}, but {further} are further")

    def run_failed(self, command: m.FailRun, by: SimController) -> None:
        if self.failure is not None or self.finish is not None:  # the first record counts
            return
        self.failure = command
        if "weights" in command.error:
            self.marks["weights differ, failed"] += 1
            must(by.at_most is not None, f"{command} though none differ")
            must(not by.restorable or "is time" in command.error, f"there is {by.restorable}")
        if "is lost" in command.error or command.worker:  # its error took everyone
            must(not by.restorable, f"failed, with a checkpoint of {by.restorable}")
            holders = [
                w.id
                for w in self.world.workers.values()
                if w.alive
                and w.has_state
                and w.id not in by.removed
                and w.id not in by.lost
                and w.id not in by.drained
            ]
            must(not holders, f"failed, but {holders} hold the state")

    def end(self) -> None:
        """The run is over: nobody who finished ended elsewhere."""
        if self.finish is not None:
            for worker in self.world.workers.values():
                if worker.alive and worker.finished and worker.id not in self.removed:
                    must(
                        worker.position == self.finish.position,
                        f"{worker.id} ended at {worker.position}",
                    )
