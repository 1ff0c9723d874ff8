"""Each guard, taken out: in which function it stands, which code it is, and what stands there
instead.

A mutant replaces one expression, or one or several statements, in the syntax tree of a function (or
of a module's constant). The code must be there exactly once, so a guard cannot be lost unnoticed;
its layout and its file do not matter. It is caught by the scripted scenarios of tests/coordinator
(for guards that only matter in a rare coincidence), or by a seed of the simulator.

The table is one file, longer than others: each entry is read alone and found by the function it
names, a guard often belongs to several parts of the coordinator, and a guard that moves to another
part needs no change here.

`noticed_by.json` says which scenario notices which mutant, so that this is tried first. What is out
of date there costs time and nothing else; `python -m tests.simulation.mutants` writes it anew.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import elastic_dp.coordinator
from elastic_dp.coordinator import message_values, messages

WORKERS = "tests.simulation.workers"
# What takes longest comes last: most mutants are noticed before.
SCENARIOS = (
    "test_startup",
    "test_generations",
    "test_leases",
    "test_leadership",
    "test_scaling",
    "test_size_limits",
    "test_failures",
    "test_finishing",
    "test_takeover",
    "test_restore",
    "test_replica_mismatch",
    "test_drain_checkpointer",
    "test_bursts",
    "test_failure_budgets",
    "test_load_balancer",
    "test_old_messages",
    "test_hang_detector",
    "test_retained_ranges",
)
NOTICED_BY: dict[str, str] = json.loads(Path(__file__).with_name("noticed_by.json").read_text())
RELOADED = (elastic_dp.coordinator.__name__ + ".", "tests.simulation.", "tests.coordinator.")


@dataclass(frozen=True)
class Mutant:
    name: str
    where: str  # "Class.method", "function", or "CONSTANT" of a module
    code: str  # an expression, or statements
    instead: str
    faults: dict[str, float] = field(default_factory=dict)  # faults under which the guard matters
    first: int = 0  # seed from which on it is soon noticed


LEASES = {
    "cut_initial_source": 3.0,
    "slots": 7,
    "steps": 120,
    "compute_s": 0.5,
    "slow_messages": 0.3,
    "pause_s": 1.5,
    "kill": 0.0,
    "silent_kill": 0.0,
    "chaos_s": 60.0,
    "body_s": 0.0,
}
HAND_OVERS = {
    "torn": 0.5,
    "kill_ahead": 3.0,
    "false_failure": 3.0,
    "kill_source": 3.0,
    "slots": 7,
    "steps": 24,
    "pause_s": 1.5,
}

FLIPS = {"flip": 6.0, "pause_s": 3.0, "steps": 40, "commit_steps": 1, "slots": 7}
SPEEDS = {"uneven": 1.0, "pause_s": 40.0, "steps": 300, "compute_s": 0.5, "body_s": 0.0}
HANGS = {"hang": 6.0, "pause_s": 5.0, "steps": 40, "slots": 7}

MUTANTS = [
    Mutant(
        "stop of an older generation counts",
        "Generation.stopped",
        "worker is None or event.generation < self.number or worker.id not in self.inside",
        "worker is None or worker.id not in self.inside",
    ),
    Mutant(
        "finish of an older generation counts",
        "Generation.worker_finished",
        "worker is None or event.generation != self.number or (not self.run.in_flight)",
        "worker is None or not self.run.in_flight",
    ),
    Mutant(
        "any claim counts",
        "Leadership.granted",
        """if generation != self.claiming:
    return False""",
        "pass",
    ),
    Mutant(
        "heartbeat of an older generation counts",
        "Generation.heartbeat_received",
        "event.generation == self.number and in_flight",
        "in_flight",
    ),
    Mutant(
        "announced without a claim",
        "MembershipPlanner.plan_next_generation",
        """self.run.apply(Transition.CLAIM_SENT)
if not self._leadership.claiming:
    self._leadership.claim(self._generation.number, now)""",
        """self._leadership.granted(self._leadership.claiming)
self._leadership.claimed = self._generation.number + 1
self._form(self._select_members(source, now), now)""",
    ),
    Mutant(
        "claimed only when all have left",
        "Coordinator._advance_phase",
        "self._planner.claim_ahead(now)",
        "pass",
    ),
    Mutant(
        "one number is claimed at each event",
        "MembershipPlanner.claim_ahead",
        "not self._has_number and (not self._leadership.claiming)",
        "True",
    ),
    Mutant(
        "claimed twice when all have left",
        "MembershipPlanner.plan_next_generation",
        "not self._leadership.claiming",
        "True",
    ),
    Mutant(
        "members connect before their number is claimed",
        "MembershipPlanner.prepare_ahead",
        "seen == self._looked_at or not self._has_number or (not generation.must_stop)",
        "seen == self._looked_at or not generation.must_stop",
    ),
    Mutant(
        "members connect before anybody has left",
        "MembershipPlanner.prepare_ahead",
        "seen == self._looked_at or not self._has_number or (not generation.must_stop)",
        "seen == self._looked_at or not self._has_number",
    ),
    Mutant(
        "members connect once, whoever comes or goes",
        "MembershipPlanner.prepare_ahead",
        "seen == self._looked_at or not self._has_number or (not generation.must_stop)",
        "seen[0] == self._looked_at[0] or not self._has_number or (not generation.must_stop)",
    ),
    Mutant(
        "others connect than were prepared",
        "MembershipPlanner._prepared",
        "made.number if same else 0",
        "made.number",
    ),
    Mutant(
        "a preparation of an earlier number counts",
        "MembershipPlanner._prepared",
        "made is None or made.generation != self._leadership.claimed",
        "made is None",
    ),
    Mutant(
        "who must leave is told to connect",
        "likely_members",
        "len(members) > size or any((worker.draining for worker in members))",
        "False",
    ),
    Mutant("a lost claim is ignored", "Coordinator._dispatch", "self._stand_down(event)", "pass"),
    Mutant(
        "an early deadline counts",
        "Coordinator.handle",
        """if isinstance(event, m.DeadlineReached) and (deadline is None or now < deadline):
    return []""",
        """if isinstance(event, m.DeadlineReached):
    self._registry.retry_at = now""",
    ),
    Mutant(
        "no wait for the lease",
        "Fence.is_closed",
        "self.exit_confirmed or not self.unconfirmed_dead or now >= self.lease_until",
        "True",
    ),
    Mutant(
        "the evicted count as dead",
        "WorkerRegistry.evict",
        "self._generation.fence.evicted(worker.id)",
        "pass",
    ),
    Mutant(
        "take-over does not wait for the lease",
        "Generation.end_takeover",
        "self.fence.evicted('')",
        "self.fence.confirm_exit()",
    ),
    Mutant(
        "renewed members are forgotten",
        "Generation.assign",
        "max([worker.renewed_at for worker in members]) + config.lease_s",
        "now",
    ),
    Mutant(
        "members that run keep no lease",
        "Fence.renew",
        "self.lease_until = max(self.lease_until, until)",
        "pass",
    ),
    Mutant(
        "a lease that a new controller renews is not waited for",
        "Coordinator._heartbeat_received",
        "self._generation.renewed(now)",
        "pass",
    ),
    Mutant(
        "leases of the stopped are waited for",
        "Generation.heartbeat_received",
        """if inside:
    self.renewed(now)""",
        """if True:
    self.renewed(now)""",
    ),
    Mutant(
        "the next forms while members are open",
        "Generation.is_over",
        "self.run.in_flight and (not (self.inside and self.not_finished))",
        "self.run.phase is Phase.ENDING or (self.run.in_flight and (not (self.inside and "
        "self.not_finished)))",
    ),
    Mutant(
        "what is finished is forgotten",
        "WorkerState.stopped",
        "self.finished_nodes = event.finished",
        "pass",
    ),
    Mutant(
        "who is at the end of the run has finished a step beyond it",
        "WorkerState.finish",
        "self.at_head, self.finished_nodes = (True, ())",
        "self.at_head = True",
    ),
    Mutant(
        "who receives a step has finished some of it",
        "membership_of",
        "worker.has_state and worker.position == truth",
        "worker.has_state",
    ),
    Mutant(
        "what two have finished is assigned twice",
        "_retain",
        "taken.isdisjoint(node)",
        "True",
    ),
    Mutant(
        "a subtree larger than the share stays",
        "_retain",
        "len(leaves) + len(node) <= size",
        "True",
    ),
    Mutant(
        "half a finished subtree is worth something",
        "_to_run",
        "any((low <= first and last <= high for low, high in share))",
        "any((low <= first < high for low, high in share))",
    ),
    Mutant(
        "workers without state can be the source",
        "select_members",
        "[worker for worker in stopped if worker.has_state]",
        "stopped",
    ),
    Mutant(
        "any worker with state can be the source",
        "select_members",
        "(worker for worker in taken if worker.has_state and worker.position == top)",
        "(worker for worker in taken if worker.has_state)",
    ),
    Mutant(
        "the most advanced may lose its place",
        "select_members",
        "worker is source or (worker.has_state and worker.position == top)",
        "worker.has_state or worker is initial_source",
    ),
    Mutant(
        "a source inside a body serves joiners",
        "select_members",
        "source.at_head or not source.has_state",
        "True",
    ),
    Mutant(
        "a half-written worker is the initial source",
        "StateLineage.drop_receiving_candidates",
        "self.source_candidates.pop(worker)",
        "pass",
    ),
    Mutant(
        "a worker that was told no is the initial source",
        "StateLineage.add_candidate",
        "worker.can_source and (not self.established)",
        "not self.established",
    ),
    Mutant(
        "a report never establishes the lineage",
        "Generation.stopped",
        "self._lineage.observed(event.lineage_id)",
        "pass",
    ),
    Mutant(
        "who finished does not say from which lineage",
        "Generation.worker_finished",
        "self._lineage.observed(event.lineage_id)",
        "self._lineage.observed(0)",
    ),
    Mutant(
        "no room is made for an initial source",
        "WorkerEligibility.find_initial_source",
        "self._make_room_for_initial_source(now)",
        "pass",
    ),
    Mutant(
        "losing everyone goes unnoticed",
        "MembershipPlanner.plan_next_generation",
        "run_termination.fail_without_state(self._registry, lineage.at_most, now)",
        "self.run.set_reason('?')",
    ),
    Mutant(
        "departing workers are released at once",
        "MembershipPlanner._leave_out",
        "registry.retain(worker, reason, now)",
        "registry.release(worker, reason, now)",
    ),
    Mutant(
        "departing workers are never released",
        "WorkerRegistry.progressed",
        "self.release(worker, worker.leave_reason, now)",
        "pass",
    ),
    Mutant(
        "departing workers are not recalled",
        "MembershipPlanner._select_members",
        "recalled = [*registry.retained.values()]",
        "recalled: list[WorkerState] = []",
    ),
    Mutant(
        "joiners before those who stay",
        "select_members",
        """order_by_location(
    [worker for worker in stopped if worker in chosen],
    [worker for worker in new if worker in chosen],
)""",
        """order_by_location(
    [worker for worker in new if worker in chosen],
    [worker for worker in stopped if worker in chosen],
)""",
    ),
    Mutant(
        "fewer than min_workers will do",
        "MembershipPlanner._blocked",
        "self._available < run.min_members",
        "self._available < 1",
    ),
    Mutant(
        "evicted while the group makes steps",
        "FailureDetector.silent_workers",
        "now < until",
        "False",
    ),
    Mutant(
        "sleep is taken for their silence",
        "Coordinator._defer_event",
        "self._registry.failure_detector.was_away(now)",
        "pass",
    ),
    Mutant(
        "judged by a heartbeat behind which others wait",
        "Coordinator._release_deferred",
        "self._hang_detector.catch_up(now)",
        "pass",
    ),
    Mutant(
        "who slept while it took what was held goes on",
        "Coordinator.handle",
        "leadership.in_doubt(event, now, self._registry.failure_detector.watches_any)",
        "leadership.held is None and leadership.in_doubt(event, now, "
        "self._registry.failure_detector.watches_any)",
    ),
    Mutant(
        "a run that is over leaves held facts",
        "Coordinator._release_deferred",
        """if self._run.phase is not Phase.OVER:
    break""",
        "break",
    ),
    Mutant(
        "a quiet coordinator does not confirm",
        "Leadership.in_doubt",
        "found or self.fell_quiet(now, waiting) or self._answered_late(event, now)",
        "found or self._answered_late(event, now)",
    ),
    Mutant(
        "a late answer to a claim counts",
        "Leadership._answered_late",
        "ours and now > self._asked_at + self.run.config.heartbeat_timeout_s",
        "False",
    ),
    Mutant("claims skip numbers", "Leadership.confirm", "self.claiming", "False"),
    Mutant(
        "earlier lineages come back",
        "MembershipPlanner._replace_stragglers",
        "0 < worker.lineage_id < lineage_id",
        "False",
    ),
    Mutant(
        "what was held is dropped",
        "Coordinator._release_deferred",
        "leadership.release(now)",
        "leadership.release(now)[:1]",
    ),
    Mutant(
        "judged before all is read",
        "Coordinator._evict_silent",
        "isinstance(event, m.DeadlineReached)",
        "True",
    ),
    Mutant(
        "silence is never judged",
        "FailureDetector.silent_workers",
        "self._take_overdue(now) if now >= self.due + patience_s else []",
        "[]",
    ),
    Mutant(
        "messages are no sign of life",
        "Coordinator._dispatch",
        "worker is not None and worker.stage not in UNTIMED_STAGES",
        "isinstance(event, m.HeartbeatReceived) and worker is not None and (worker.stage not "
        "in UNTIMED_STAGES)",
    ),
    Mutant(
        "the silent are looked at once only",
        "FailureDetector.silent_workers",
        "self.excused[worker] = until",
        "pass",
    ),
    Mutant(
        "the thawed are answered",
        "Coordinator._heartbeat_received",
        "m.EvictWorker(event.worker, 'not a worker of this run any more', stuck)",
        "m.RenewLease(event.worker, event.beat)",
    ),
    Mutant(
        "a stop unasked ends nothing",
        "Generation.stopped",
        "self.abort(f'{worker.id} stopped: {event.reason}')",
        "pass",
    ),
    Mutant(
        "a loss ends nothing",
        "Generation.drop",
        "phase is Phase.FORMING or (phase is Phase.RUNNING and (not finished))",
        "False",
    ),
    Mutant(
        "any loss breaks the group",
        "Generation.drop",
        """if self.members.pop(worker.id, None) is None:
    return""",
        "self.members.pop(worker.id, None)",
    ),
    Mutant("ends are told once", "Generation._remind", "self._tell_end(worker)", "pass"),
    Mutant(
        "told at every heartbeat",
        "Generation._remind",
        "beats & beats - 1 and beats % REMIND_BEATS",
        "False",
    ),
    Mutant(
        "told ever more seldom",
        "Generation._remind",
        "beats & beats - 1 and beats % REMIND_BEATS",
        "beats & beats - 1",
    ),
    Mutant(
        "an abort is repeated as seldom as the end was",
        "Generation._end",
        "worker.restart_reminders()",
        "pass",
    ),
    Mutant(
        "steps heard while taking over do not count",
        "Coordinator._heartbeat_received",
        "event.generation == self._generation.number",
        "event.generation == self._generation.number and run.in_flight",
    ),
    Mutant(
        "lost reports stay lost",
        "Generation.heartbeat_received",
        "self._check_lost_report(worker, event.phase)",
        "pass",
    ),
    Mutant("no deadline for forming", "Generation._check_forming", "now < self._form_by", "True"),
    Mutant(
        "the unreachable are tried again",
        "MembershipPlanner._exclude_unreachable",
        "dropped = members_to_exclude(generation.unreachable_pairs, members, needed)",
        """return
dropped = members_to_exclude(generation.unreachable_pairs, members, needed)""",
    ),
    Mutant(
        "who fails to join twice stays",
        "MembershipPlanner._retry_join",
        "again or worker.failed_joins > self.run.config.max_failed_joins",
        "False",
    ),
    Mutant(
        "the one that holds the state is dropped",
        "members_to_exclude",
        "[worker for worker in degree if heads != {worker}]",
        "list(degree)",
    ),
    Mutant(
        "identities start over after a take-over",
        "Coordinator._claim_granted",
        "self._registry.identities.adopt(event.generation)",
        "self._registry.identities.given = 0",
    ),
    Mutant(
        "identities before the claim",
        "Coordinator._replenish",
        """if taking_over and self._leadership.claimed <= self.generation:
    return""",
        "pass",
    ),
    Mutant(
        "evicted workers are assigned",
        "WorkerRegistry._remove",
        "self.ready.pop(worker.id, None)",
        "pass",
    ),
    Mutant(
        "the lost are assigned",
        "Generation.drop",
        "self.members.pop(worker.id, None) is None",
        "worker.id not in self.members",
    ),
    Mutant(
        "losses are not replaced",
        "WorkerRegistry.replenish",
        "len(self.provisioned) < wanted",
        "len(self.workers) < self.target_size",
    ),
    Mutant(
        "finished when the first one is",
        "MembershipPlanner.generation_over",
        "finished and (not self._generation.not_finished)",
        "finished",
    ),
    Mutant("a stop is not repeated", "Generation.announce", "self.tell_to_stop()", "pass"),
    Mutant(
        "a stop is not told again on heartbeats",
        "Generation._remind",
        """if self.run.stop is not None:
    self._tell_stop(worker, self.run.stop)""",
        "pass",
    ),
    Mutant(
        "talks on after the end",
        "Coordinator.handle",
        "self._dispatch_when_over(event, now)",
        "self._dispatch(event, now)",
    ),
    Mutant(
        "a limit goes below the minimum",
        "RunState.size",
        "max(self.limit, self.min_workers)",
        "self.limit",
    ),
    Mutant(
        "a limit releases nobody",
        "Coordinator._size_limited",
        "self._registry.resized(now)",
        "pass",
    ),
    Mutant(
        "size without bounds", "Coordinator._size_requested", "not 1 <= event.size <= most", "False"
    ),
    Mutant(
        "lost words are not asked for",
        "Coordinator._heartbeat_received",
        "run.emit(m.ReportState(worker.id, self._registry.inquiry))",
        "pass",
    ),
    Mutant(
        "a lost lineage stays lost",
        "Coordinator._repeat_begin",
        "self._eligibility.tell_to_begin(worker)",
        "pass",
    ),
    Mutant(
        "a take-over does not end what runs",
        "Generation.add_reported_member",
        "self.run.emit(m.AbortGeneration(worker.id, self.number))",
        "pass",
    ),
    Mutant(
        "does not wait for all reports",
        "Takeover.end",
        "self._registry.unreported or self._leadership.claimed <= generation.number",
        "self._leadership.claimed <= generation.number",
    ),
    Mutant(
        "departing workers are released before the next generation forms",
        "WorkerRegistry.progressed",
        "[*self.retained.values()] if self.run.in_flight else []",
        "[*self.retained.values()]",
    ),
    Mutant(
        "a death while forming counts as a failure to form",
        "Generation.drop",
        "self.lost_while_forming = True",
        "pass",
    ),
    Mutant(
        "anybody speaks for the newest generation",
        "Generation.stopped",
        "worker.entered == self.number",
        "True",
    ),
    Mutant(
        "a planned end that fails stays planned",
        "Generation.stopped",
        "self.abort(f'{worker.id} stopped before the planned end: {event.reason}')",
        "pass",
    ),
    Mutant(
        "a planned end is never aborted",
        "Generation.check_time",
        "self.abort('the planned end takes too long')",
        "pass",
    ),
    Mutant(
        "a planned end is not ahead",
        "Generation.plan_end",
        "self.steps.step + self.steps.pace + ahead",
        "self.steps.step",
    ),
    Mutant(
        "who never entered is tried again",
        "Generation._check_forming",
        "self.unreachable_pairs.update(((worker, worker) for worker in never))",
        "pass",
    ),
    Mutant(
        "a hand-over has no more time than forming",
        "Generation.heartbeat_received",
        "self._form_by = max(self._form_by, now + self.run.config.forming_timeout_s)",
        "pass",
    ),
    Mutant(
        "a replacement is asked for when its node is gone",
        "WorkerRegistry.drain",
        "self.provisioned.discard(worker.id)",
        "pass",
    ),
    Mutant(
        "the confirmed dead are waited for",
        "WorkerRegistry.lost",
        "self._generation.fence.confirm_death(worker.id)",
        "pass",
    ),
    Mutant(
        "the initial source is no more than others when scaling down",
        "WorkerRegistry.resized",
        "w.stage in EXPENDABLE_STAGES and w.id != source",
        "w.stage in EXPENDABLE_STAGES",
    ),
    Mutant(
        "survivors wait for a burst of joiners",
        "MembershipPlanner._earliest_start",
        "not survivors and len(registry.ready) < self.run.size",
        "len(registry.ready) < self.run.size",
    ),
    Mutant(
        "no initial source after a take-over",
        "Takeover.end",
        "lineage.only_candidates((w for w in members if w.can_source and w.entered == 0))",
        "pass",
    ),
    Mutant(
        "who does not fit stays after a take-over",
        "Takeover.end",
        "self._eligibility.fits(worker, now)",
        "pass",
    ),
    Mutant(
        "who was building at a take-over is never ready",
        "Takeover.reported",
        """if (
    worker.stage is Stage.BUILDING
    and event.signature is not None
    and event.generation == 0
):
    self._eligibility.became_ready(worker, event.signature, event.can_source, now)""",
        """if (
    worker.stage is Stage.BUILDING
    and event.signature is not None
    and event.generation == 0
):
    pass""",
    ),
    Mutant(
        "the least number holds up the end of the run",
        "RunState.min_members",
        "1 if self.stop is not None else min(self.min_workers, self.size)",
        "min(self.min_workers, self.size)",
    ),
    Mutant(
        "the excused are judged after they left",
        "FailureDetector.forget",
        "self.excused.pop(worker, None)",
        "pass",
        first=1150,
    ),
    Mutant("commit without compare-and-swap", "SimWorker.collective_done", "return", "pass"),
    Mutant(
        "commit without a lease",
        "SimWorker.collective_done",
        """if self.world.now > self.lease_until:
    self.failed('lease ran out')
else:
    self.commit()""",
        "self.commit()",
        LEASES,
        first=2290,
    ),
    Mutant(
        "lease from the answer's arrival",
        "SimWorker.receive",
        "self.beats.get(beat, -math.inf)",
        "self.world.now",
        LEASES,
        first=680,
    ),
    Mutant(
        "a stopped worker resumes",
        "SimWorker.wait",
        "self.ended",
        "self.generation",
        {"slow_messages": 0.3, "pause_s": 1.5, "false_failure": 3.0, "slots": 7},
    ),
    Mutant(
        "the body's state is handed to those behind",
        "SimWorker.received",
        "self.at_head, self.evaluated = (False, 0)",
        "self.at_head, self.evaluated, self.body_begun = (True, 0, source.step)",
        first=330,
    ),
    Mutant(
        "written to before all has arrived",
        "SimWorker.received",
        "self.failed('hand-over failed', (source.id,))",
        """self.state = GARBAGE
self.failed('hand-over failed', (source.id,))""",
        HAND_OVERS,
    ),
    Mutant(
        "has state before the copy is complete",
        "SimWorker.received",
        "self.state = GARBAGE",
        "self.state, self.has_state = (GARBAGE, True)",
        HAND_OVERS,
    ),
    Mutant(
        "a late planned end is ignored",
        "SimWorker.end",
        "generation == self.generation and (self.finished or self.attempting > last)",
        "False",
    ),
    Mutant(
        "planned ends are not kept",
        "SimWorker.attempt",
        "self.step >= self.planned.get(self.generation, math.inf)",
        "False",
    ),
    Mutant(
        "back to the checkpoint though somebody holds the state",
        "MembershipPlanner._state_location",
        "any((worker.has_state for worker in holders))",
        "False",
        {"commit_steps": 1, "kill": 3.0, "slots": 7},
    ),
    Mutant(
        "initial weights instead of the checkpoint",
        "MembershipPlanner._form",
        "lineage.checkpoint_step is not None",
        "False",
    ),
    Mutant(
        "an old search for a checkpoint counts",
        "StateLineage.forget_checkpoint",
        "self.searched, self.checkpoint_step = (False, None)",
        "pass",
    ),
    Mutant(
        "who found a checkpoint leads",
        "Leadership.in_doubt",
        "found or self.fell_quiet(now, waiting) or self._answered_late(event, now)",
        "self.fell_quiet(now, waiting) or self._answered_late(event, now)",
    ),
    Mutant(
        "a take-over renews the lease of any generation",
        "Coordinator._heartbeat_received",
        "not self._generation.is_in_earlier_generation(event)",
        "True",
    ),
    Mutant(
        "whoever must go is released before its state is committed",
        "DrainCheckpointer.decide",
        "self.committed_step >= top.step",
        "True",
    ),
    Mutant(
        "any commit record covers what they hold",
        "DrainCheckpointer.decide",
        "self.committed_step >= top.step",
        "self.committed_step",
    ),
    Mutant(
        "the last who holds the state leaves in time",
        "WorkerRegistry.timer_fired",
        "self._state_is_held_by_others(worker)",
        "True",
    ),
    Mutant(
        "a departing worker takes no checkpoint",
        "DrainCheckpointer.due",
        "draining += self._registry.retained.values()",
        "pass",
    ),
    Mutant(
        "long steps take the time of the last checkpoint",
        "GenerationEndPolicy._drain",
        "self._generation.plan_end(f'{who} must leave, and too few workers remain', at_once=True)",
        "self._generation.plan_end(f'{who} must leave, and too few workers remain')",
    ),
    Mutant(
        "what it ran is not heard after its death",
        "FailureCounter.cause_learned",
        "self.budgets.count_death_in(*event.micro_batch)",
        "pass",
    ),
    Mutant(
        "a cause that comes later is not heard",
        "WorkerRegistry.lost",
        "self.failures.cause_learned(event, now)",
        "pass",
    ),
    Mutant(
        "a stop is nobody's fault but its own",
        "Coordinator._dispatch",
        "self._failures.count(worker, now, blamed='')",
        "self._failures.count(worker, now)",
    ),
    Mutant(
        "the loss of another is taken back",
        "FailureCounter.lost",
        "(worker.id, worker.entered)",
        "self._blamed",
    ),
    Mutant(
        "a pause outlives the step",
        "FailureCounter.progressed",
        "self.retry_at = -math.inf",
        "pass",
    ),
    Mutant(
        "one for each notice of many",
        "DrainCheckpointer.request_ahead",
        "now < self._request_ahead_at",
        "False",
    ),
    Mutant(
        "all are asked for a checkpoint",
        "DrainCheckpointer.request_ahead",
        "sorted(members, key=lambda worker: worker.draining)[:MEMBERS_TOLD]",
        "sorted(members, key=lambda worker: worker.draining)",
    ),
    Mutant(
        "a notice that changes is not seen",
        "WorkerState.notice",
        "before != (self.draining, self.leave_at)",
        "not before[0]",
    ),
    Mutant(
        "who is due is looked up once",
        "DrainCheckpointer.due",
        "situation != self._due_of or now >= self._due_until",
        "situation != self._due_of",
    ),
    Mutant(
        "a commit record is not seen",
        "DrainCheckpointer._commit_situation",
        "(*self._situation(), self.committed_step, len(due))",
        "(*self._situation(), len(due))",
    ),
    Mutant(
        "who gives is past forming",
        "BEFORE_TRAINING",
        'BEFORE_TRAINING = frozenset({"start", "wait", "form", "give", "receive", "restore"})',
        'BEFORE_TRAINING = frozenset({"start", "wait", "form", "receive", "restore"})',
    ),
    Mutant(
        "what was committed before going back counts",
        "DrainCheckpointer.announced",
        "restores",
        "False",
    ),
    Mutant(
        "one half-way through a body keeps its state",
        "DrainCheckpointer.decide",
        "w.has_state and w.position == top and w.at_head",
        "w.has_state and w.position == top",
    ),
    Mutant(
        "one behind keeps its state",
        "DrainCheckpointer.decide",
        "w.has_state and w.position == top and w.at_head",
        "w.has_state and w.at_head",
    ),
    Mutant(
        "the end of the run is held up",
        "DrainCheckpointer.decide",
        "top.ended or not top.step or (not writers) or (now >= until)",
        "not top.step or not writers or (now >= until)",
    ),
    Mutant(
        "the first step is waited for in vain",
        "DrainCheckpointer.decide",
        "top.ended or not top.step or (not writers) or (now >= until)",
        "top.ended or not writers or (now >= until)",
    ),
    Mutant(
        "no checkpoint is taken for a drain",
        "DrainCheckpointer.decide",
        "top.ended or not top.step or (not writers) or (now >= until)",
        "top.ended or not top.step or (now >= until)",
    ),
    Mutant(
        "a commit record is waited for for ever",
        "DrainCheckpointer.decide",
        "top.ended or not top.step or (not writers) or (now >= until)",
        "top.ended or not top.step or (not writers)",
    ),
    Mutant(
        "a notice that was wrong ends each generation",
        "GenerationEndPolicy._drain",
        "due and run.config.checkpointing and made_a_step and checkpointer.in_time(due, now)",
        "due and run.config.checkpointing and made_a_step",
    ),
    Mutant(
        "a word that was lost is not said again",
        "DrainCheckpointer._tell_writers",
        "write != self._last_write or now >= self._repeat_at",
        "write != self._last_write",
    ),
    Mutant(
        "workers that write are not told again",
        "DrainCheckpointer._tell_writers",
        "write != self._last_write or now >= self._repeat_at",
        "now >= self._repeat_at",
    ),
    Mutant(
        "no checkpoint when the notice comes",
        "GenerationEndPolicy._drain",
        "checkpointer.request_ahead(now)",
        "pass",
    ),
    Mutant(
        "one for each look at a notice",
        "DrainCheckpointer.request_ahead",
        "self._requested_for.update(self._generation.draining)",
        "pass",
    ),
    Mutant(
        "who has time left is not counted",
        "GenerationEndPolicy._drain",
        "due or draining",
        "draining",
    ),
    Mutant(
        "those who must go stay to the end",
        "GenerationEndPolicy._drain",
        "due and run.config.checkpointing and made_a_step and checkpointer.in_time(due, now)",
        "False",
    ),
    Mutant(
        "a checkpoint where there is no storage",
        "MembershipPlanner.plan_next_generation",
        "checkpointer.due(now) if self.run.config.checkpointing else []",
        "checkpointer.due(now)",
        faults={"commit_steps": 0, "drain": 3.0, "steps": 60, "kill_all": 0.0},
    ),
    Mutant(
        "those who must go are kept though others came",
        "MembershipPlanner.plan_next_generation",
        "due and self._available - len(due) < self.run.min_members",
        "due",
    ),
    Mutant(
        "what is asked for while nobody trains is forgotten",
        "DrainCheckpointer.request",
        "not self.run.in_flight",
        "False",
    ),
    Mutant(
        "an answer to an earlier question counts",
        "Takeover.reported",
        "worker.stage is not Stage.UNREPORTED or event.asked != registry.inquiry",
        "worker.stage is not Stage.UNREPORTED",
    ),
    Mutant(
        "departing workers wait for joiners",
        "MembershipPlanner._earliest_start",
        "self._generation.members or registry.retained",
        "self._generation.members",
    ),
    Mutant(
        "places of those who did not fit a lost initial source stay empty",
        "WorkerEligibility.find_initial_source",
        "self._reset_rejections()",
        "pass",
    ),
    Mutant(
        "steps that were made before count as progress",
        "FailureBudgets.progressed",
        "step <= self._furthest",
        "not step",
    ),
    Mutant(
        "who dies in a micro-batch that was passed once blames it",
        "FailureBudgets.count_death_in",
        "step > self._furthest",
        "step",
    ),
    Mutant(
        "each of those who raise together is an error more",
        "FailureBudget.allows",
        "self._is_known(generation, number) or self.incidents < self.limit",
        "self.incidents < self.limit",
    ),
    Mutant("other software fits", "StateLineage.difference", "{**mine, **other}", "()"),
    Mutant(
        "a preemption counts",
        "FailureCounter.lost",
        "event.cause is m.Cause.PREEMPTED",
        "False",
    ),
    Mutant(
        "lack of memory is a loss as any other",
        "FailureCounter.lost",
        "self.budgets.memory if short else None",
        "None",
    ),
    Mutant(
        "an error of ours is tried again",
        "Coordinator._failed",
        "event.facts is None and self._failures.allows_user_error(worker)",
        "self._failures.allows_user_error(worker)",
    ),
    Mutant(
        "the error that took everyone is not told",
        "fail_without_state",
        "registry.failures.budgets.errors.incidents and user_error is not None",
        "False",
    ),
    Mutant(
        "a later loss without a pause ends the pause",
        "FailureCounter.count",
        "max(self.retry_at, now + budget.pause_s)",
        "now + budget.pause_s",
    ),
    Mutant(
        "the kind of those who are lost still counts",
        "StateLineage.set_initial_source",
        """if worker is None:
    self.signature = None""",
        "pass",
    ),
    Mutant(
        "places of those who did not fit stay empty after going back",
        "WorkerEligibility.start_from_checkpoint",
        "self._reset_rejections()",
        "pass",
    ),
    Mutant(
        "a joiner waits for nobody who builds",
        "GenerationEndPolicy._burst_ends_at",
        "registry.building",
        "False",
    ),
    Mutant(
        "a joiner waits for a builder however long it takes",
        "GenerationEndPolicy._burst_ends_at",
        "max(config.join_window_s, config.stabilization_s)",
        "math.inf",
    ),
    Mutant(
        "a joiner waits though it takes the last place",
        "GenerationEndPolicy._burst_ends_at",
        "len(registry.ready) >= free",
        "False",
    ),
    Mutant(
        "joins follow each other at once",
        "GenerationEndPolicy._burst_ends_at",
        "self._joined_at + config.stabilization_s",
        "-math.inf",
    ),
    Mutant(
        "an operator may need more workers than there are to be",
        "Coordinator._size_requested",
        "event.min_workers is not None and (not 1 <= least <= event.size)",
        "False",
    ),
    Mutant(
        "a size that is asked for alone sets the least number back",
        "Coordinator._size_requested",
        "self._run.min_workers",
        "self.config.min_workers",
    ),
    Mutant(
        "a builder that is gone counts",
        "WorkerRegistry._remove",
        "self.building.discard(worker.id)",
        "pass",
    ),
    Mutant(
        "where a worker runs is not kept",
        "Coordinator._dispatch",
        "registry.workers[worker_id].locate(location)",
        "pass",
    ),
    Mutant(
        "min_on_demand is ignored",
        "choose_departing",
        "floor - sum((worker.location.stable for worker in others))",
        "0 * sum((worker.location.stable for worker in others))",
    ),
    Mutant(
        "min_on_demand holds before all others go",
        "choose_departing",
        "min(missing, len(workers) - count)",
        "missing",
    ),
    Mutant(
        "for min_on_demand any node is kept",
        "_held",
        "(w.location.node in emptying, -on[w.location.node], w.location.node)",
        "(w.location.node in emptying, 0)",
    ),
    Mutant(
        "nodes are not emptied",
        "choose_departing",
        "node not in occupied and len(group) <= count - len(chosen)",
        "False",
    ),
    Mutant(
        "a node is emptied that others stay on",
        "choose_departing",
        "node not in occupied and len(group) <= count - len(chosen)",
        "len(group) <= count - len(chosen)",
    ),
    Mutant(
        "spot nodes are kept",
        "_to_empty",
        "(location.node not in emptying, not location.spot, -len(group))",
        "(location.node not in emptying, -len(group))",
    ),
    Mutant(
        "who has no node stays",
        "choose_departing",
        "not worker.location.node",
        "worker.location.node is None",
    ),
    Mutant(
        "a node that is being left is emptied like others",
        "_to_empty",
        "(location.node not in emptying, not location.spot, -len(group))",
        "(not location.spot, -len(group))",
    ),
    Mutant(
        "a node that is being left is thinned like others",
        "_to_thin",
        "(location.node not in emptying, not location.spot, len(group))",
        "(not location.spot, len(group))",
    ),
    Mutant(
        "for min_on_demand workers of a node that is being left are kept",
        "_held",
        "(w.location.node in emptying, -on[w.location.node], w.location.node)",
        "(-on[w.location.node], w.location.node)",
    ),
    Mutant(
        "who drains is overlooked when places are given",
        "select_members",
        "choose_departing(staying, len(staying) - size, new, floor, draining)",
        "choose_departing(staying, len(staying) - size, new, floor)",
    ),
    Mutant(
        "who drains is overlooked when standbys leave",
        "WorkerRegistry.resized",
        "choose_departing(loose, surplus, held, floor, draining)",
        "choose_departing(loose, surplus, held, floor)",
    ),
    Mutant("standbys on a node are overlooked", "WorkerRegistry.resized", "held", "()"),
    Mutant(
        "members whose weights differ go on",
        "MembershipPlanner.generation_over",
        "self._generation.mismatch is not None",
        "False",
        FLIPS,
    ),
    Mutant(
        "the newest checkpoint counts, whoever made it",
        "MembershipPlanner._search_checkpoint",
        "m.FindCheckpoint(self._lineage.at_most)",
        "m.FindCheckpoint()",
        FLIPS,
    ),
    Mutant(
        "checkpoints made after going back do not count",
        "StateLineage.forget_checkpoint",
        "self.at_most = None",
        "pass",
        FLIPS | {"kill_all": 3.0},
    ),
    Mutant(
        "a mismatch of an earlier generation counts",
        "Generation.assign",
        "self.unreachable_pairs, self.mismatch = (set(), None)",
        "self.unreachable_pairs = set()",
        FLIPS,
    ),
    Mutant(
        "only the worker that differs is replaced",
        "reject",
        """if worker.has_state:
    registry.release(worker, f'trained with {names}, whose weights differed', now)""",
        """if False:
    registry.release(worker, f'trained with {names}, whose weights differed', now)""",
        FLIPS,
    ),
    Mutant(
        "departing workers keep wrong weights",
        "reject",
        "[*generation.members.values(), *registry.retained.values()]",
        "[*generation.members.values()]",
        FLIPS | {"scale": 3.0, "drain": 3.0},
    ),
    Mutant(
        "workers without state are replaced, too",
        "reject",
        "worker.has_state and worker.id in mismatch.odd",
        "worker.id in mismatch.odd or not worker.has_state",
    ),
    Mutant(
        "weights that differ for ever are never the job's fault",
        "reject",
        "times > MAX_IN_A_ROW",
        "False",
    ),
    Mutant(
        "nobody is ever stuck",
        "HangDetector.heartbeat_received",
        "worker.progress.record(event)",
        "return",
        HANGS,
    ),
    Mutant(
        "those who wait in a collective are suspects",
        "HangDetector._look",
        "[worker for worker in inside if _order(worker) == least]",
        "inside",
        HANGS,
    ),
    Mutant(
        "who is a step behind in a collective is no suspect",
        "HangDetector._look",
        "len(last) == len(inside) and least[2] == PHASE_ORDER['collective']",
        "least[2] == PHASE_ORDER['collective']",
    ),
    Mutant(
        "the loop's body is a hang",
        "HangDetector._look",
        "[worker for worker in last if worker.progress.phase in UNTIMED_PHASES]",
        "[]",
    ),
    Mutant(
        "what is told to stop may not finish its body",
        "HangDetector._evict_if_stuck",
        "worker.progress.phase in UNTIMED_PHASES or not self._is_stuck(worker)",
        "not self._is_stuck(worker)",
    ),
    Mutant(
        "who computes has no longer limit", "HangDetector._is_stuck", "busy or is_first", "is_first"
    ),
    Mutant(
        "who may compile has no longer limit", "HangDetector._is_stuck", "busy or is_first", "busy"
    ),
    Mutant(
        "who does not stop when it is told is waited for",
        "HangDetector.heartbeat_received",
        "inside and self._generation.must_stop",
        "False",
        HANGS,
    ),
    Mutant(
        "who hangs as a new controller asks is waited for",
        "HangDetector.heartbeat_received",
        "worker.stage is Stage.UNREPORTED or (inside and self._generation.must_stop)",
        "inside and self._generation.must_stop",
        HANGS | {"crash_controller": 3.0},
    ),
    Mutant(
        "who has stopped waits too long",
        "HangDetector.heartbeat_received",
        "worker.id in self._generation.inside",
        "True",
        HANGS,
    ),
    Mutant(
        "the time before the end was told counts",
        "Generation._end",
        "worker.progress.restart()",
        "pass",
        HANGS,
    ),
    Mutant(
        "late and doubled heartbeats count",
        "HeartbeatProgress.record",
        """if event.beat <= self._beat:
    return""",
        "pass",
        HANGS | {"slow_messages": 0.3, "doubled": 0.3},
    ),
    Mutant(
        "who waited for one that came late is judged as it goes on",
        "HangDetector._look",
        "(all_stalled_s := min(map(self._stalled_s, inside))) < self.limit_s",
        "(all_stalled_s := 0.0)",
    ),
    Mutant(
        "a hand-over in which nothing moves is waited for",
        "HangDetector._look",
        "alike or stuck[0].progress.phase in HANDING_OVER",
        "alike",
    ),
    Mutant(
        "what was measured in an older generation counts",
        "LoadBalancer.reason_to_rebalance",
        "any((worker.measured_in != generation.number for worker in members))",
        "False",
        SPEEDS,
    ),
    Mutant(
        "virtual workers are reassigned again and again",
        "LoadBalancer.reason_to_rebalance",
        "self._look_at = now + MIN_INTERVAL_S",
        "pass",
        SPEEDS,
    ),
    Mutant("any gain is worth a pause", "_is_worth_a_pause", "(1.0 - MIN_GAIN) * now_s", "now_s"),
    Mutant("who is not measured takes no time", "assign_ranges", "usual", "1e-09"),
    Mutant(
        "a finished worker that is gone is assigned virtual workers",
        "LoadBalancer.reason_to_rebalance",
        "len(members) < len(membership.members)",
        "False",
    ),
    Mutant(
        "reassigned by speed, though a worker joins soon",
        "GenerationEndPolicy.plan_end_if_needed",
        """if joins_at == math.inf:
    self._balance_speeds(present, waiting, now)""",
        "self._balance_speeds(present, waiting, now)",
    ),
    Mutant(
        "a speed is forgotten when the generation ends",
        "Generation.heartbeat_received",
        """if event.virtual_s:
    worker.measured(event.virtual_s, self.number)""",
        "worker.measured(event.virtual_s, self.number)",
    ),
    Mutant(
        "a slow worker is replaced at once",
        "LoadBalancer.member_to_replace",
        "slow.since + self._slow_s",
        "slow.since",
        SPEEDS,
    ),
    Mutant(
        "slow workers are replaced one after the other",
        "LoadBalancer.member_to_replace",
        "max(slow.since + self._slow_s, self._replaced_at + 2 * self._slow_s)",
        "slow.since + self._slow_s",
        SPEEDS,
    ),
    Mutant(
        "who recovers stays too slow",
        "LoadBalancer._track_slow_member",
        "self._slow = None",
        "pass",
        SPEEDS,
    ),
    Mutant(
        "who is a little slower is too slow",
        "LoadBalancer._track_slow_member",
        "(1.0 - SLOW_GAIN) * most_s",
        "most_s",
        SPEEDS,
    ),
    Mutant(
        "who can be given less is replaced",
        "LoadBalancer._track_slow_member",
        "size > 1 or next_s > (1.0 - SLOW_GAIN) * most_s",
        "next_s > (1.0 - SLOW_GAIN) * most_s",
        SPEEDS,
    ),
    Mutant(
        "who was slow in an older generation is replaced",
        "LoadBalancer.member_to_replace",
        "slow is None or slow.seen_in != self._generation.number",
        "slow is None",
        SPEEDS,
    ),
    Mutant(
        "another that is slow inherits the time of the one before",
        "LoadBalancer._track_slow_member",
        "self._slow and self._slow.worker == slowest",
        "self._slow",
        SPEEDS,
    ),
    Mutant(
        "a slow worker is replaced though nobody is ready",
        "GenerationEndPolicy._balance_speeds",
        "waiting and (slow := self._load_balancer.member_to_replace(now)) is not None",
        "(slow := self._load_balancer.member_to_replace(now)) is not None",
        SPEEDS,
    ),
    Mutant(
        "who is slower gets more",
        "_fastest",
        "(sizes[rank] + 1) * seconds[rank]",
        "(sizes[rank] + 1) / seconds[rank]",
        SPEEDS,
    ),
]


@contextmanager
def broken(mutant: Mutant) -> Iterator[types.ModuleType]:
    """The simulator over modules of which one is broken; everything is put back afterwards."""
    ours = reloaded()
    shared = {
        __name__,
        messages.__name__,
        message_values.__name__,
    }  # one set of message classes, or nothing matches anything
    kept = {name: forget(name) for name in ours if name not in shared}
    try:
        name, path = home(mutant)
        module = types.ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module
        exec(compile(mutated(mutant), path, "exec"), vars(module))
        yield importlib.import_module("tests.simulation.world")
    finally:
        for name in reloaded():
            if name not in shared:
                forget(name)
        for name, module in kept.items():
            sys.modules[name] = module
            package, _, stem = name.rpartition(".")
            setattr(sys.modules[package], stem, module)


@cache
def places() -> dict[str, list[tuple[str, Path]]]:
    """For each name of a function or constant, the modules that define it."""
    package = elastic_dp.coordinator
    names = [found.name for found in walk_packages(package.__path__, f"{package.__name__}.")]
    found: dict[str, list[tuple[str, Path]]] = {}
    for name in [*names, WORKERS]:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        path = Path(spec.origin)
        for where in defined(ast.parse(path.read_text())):
            found.setdefault(where, []).append((name, path))
    return found


def home(mutant: Mutant) -> tuple[str, Path]:
    modules = places().get(mutant.where, [])
    assert len(modules) == 1, f"{mutant.name}: {mutant.where} is in {len(modules)} modules"
    return modules[0]


def defined(tree: ast.AST, prefix: str = "") -> dict[str, ast.AST]:
    """Functions, methods, and constants of the module, by name; of a constant, what it stands
    in."""
    found: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[prefix + node.targets[0].id] = tree
    return found


def mutated(mutant: Mutant) -> ast.Module:
    return replaced(ast.parse(home(mutant)[1].read_text()), mutant)


def replaced(tree: ast.Module, mutant: Mutant) -> ast.Module:
    """The module with what the mutant has instead."""
    old: list[Any] = ast.parse(mutant.code).body
    new: list[Any] = ast.parse(mutant.instead).body
    if all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (old, new)):
        old, new = [old[0].value], [new[0].value]  # anywhere, not only as a statement
    before, found = list(map(ast.dump, old)), 0
    for node in list(ast.walk(defined(tree)[mutant.where])):
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST) and [ast.dump(value)] == before:
                setattr(node, name, new[0])
                found += 1
            elif isinstance(value, list) and value and isinstance(value[0], ast.AST):
                dumps = list(map(ast.dump, value))
                for i in reversed(range(len(dumps) - len(before) + 1)):
                    if dumps[i : i + len(before)] == before:
                        value[i : i + len(before)] = new
                        found += 1
    assert found == 1, f"{mutant.name}: {found} times in {mutant.where}: {mutant.code}"
    return ast.fix_missing_locations(tree)


def reloaded() -> list[str]:
    """The modules that are imported again for each mutant; packages stay, since they hold none of
    the names that a mutant changes."""
    found = [name for name in sys.modules if name.startswith(RELOADED)]
    return [name for name in found if not hasattr(sys.modules[name], "__path__")]


def forget(name: str) -> types.ModuleType:
    """Unload a module, so that the next import loads it again, also `from package import it`."""
    package, _, stem = name.rpartition(".")
    vars(sys.modules[package]).pop(stem, None)
    return sys.modules.pop(name)


def caught(mutant: Mutant, seeds: range) -> tuple[int, str] | None:
    """The first seed in which an invariant is violated, by the mutant only; and the violation."""
    first = seeds.start
    while (found := violation(mutant, range(first, seeds.stop))) is not None:
        unbroken = replace(mutant, instead=mutant.code)
        if violation(unbroken, range(found[0], found[0] + 1)) is None:
            return found
        first = found[0] + 1
    return None


def violation(mutant: Mutant, seeds: range) -> tuple[int, str] | None:
    with broken(mutant) as world:
        for seed in seeds:
            try:
                world.World(seed, faults=mutant.faults).run()
            except Exception as error:
                return seed, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def caught_in_a_scenario(mutant: Mutant) -> str | None:
    """The first scripted scenario that fails: "module::test". The one that is known to notice the
    mutant is tried first."""
    known = NOTICED_BY.get(mutant.name, "::").partition("::")
    with broken(mutant):
        for module, only in ((known[0], known[2]), *((module, "") for module in SCENARIOS)):
            if module not in SCENARIOS:
                continue
            scenarios = importlib.import_module(f"tests.coordinator.{module}")
            for name, function in list(vars(scenarios).items()):
                if not name.startswith("test_") or only not in ("", name):
                    continue
                for values in cases(function):
                    try:
                        function(**values)
                    except Exception:
                        return f"{module}::{name}"
    return None


def cases(function: Any) -> list[dict[str, Any]]:
    """What pytest would call it with."""
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        names = (
            [n.strip() for n in mark.args[0].split(",")]
            if isinstance(mark.args[0], str)
            else mark.args[0]
        )
        rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
        found = [one | dict(zip(names, row, strict=True)) for one in found for row in rows]
    return found


def main() -> None:
    ours = (mutant for mutant in MUTANTS if home(mutant)[0] != WORKERS)
    found = {mutant.name: by for mutant in ours if (by := caught_in_a_scenario(mutant))}
    Path(__file__).with_name("noticed_by.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
