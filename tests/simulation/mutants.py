"""Each guard, taken out: where it stands, what replaces it.

A mutant is a textual replacement in one module's source, compiled into a copy; the text must be there exactly
once, so a guard cannot move away unnoticed. It is caught by the scripted scenes of tests/protocol (for guards
that take a rare coincidence to matter), or by a seed of the simulator.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_dp.protocol import membership, messages

PROTOCOL = "elastic_dp.protocol."
C, S, L = PROTOCOL + "coordinator", PROTOCOL + "seating", PROTOCOL + "liveness"
G, LEAD, STAFF = PROTOCOL + "generation", PROTOCOL + "leadership", PROTOCOL + "staff"
LEAVE = PROTOCOL + "leavers"
ADMIT, GATHER, SURVEY = PROTOCOL + "admission", PROTOCOL + "gathering", PROTOCOL + "survey"
KEEP = PROTOCOL + "keeping"
PROGRESS, DIFFER = PROTOCOL + "progress", PROTOCOL + "disagreement"
W, BUDGET = "tests.simulation.workers", PROTOCOL + "budget"
BALANCE, RESIZE = PROTOCOL + "balance", PROTOCOL + "resizing"
SCENES = (
    "test_coordinator",
    "test_progress",
    "test_disagreement",
    "test_keeping",
    "test_bursts",
    "test_balance",
    "test_budget",
    "test_resizing",
)
RELOADED = (PROTOCOL, "tests.simulation.", "tests.protocol.")


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    text: str
    instead: str
    climate: dict[str, float] = field(default_factory=dict)  # weather in which the guard matters
    first: int = 0  # seed from which on it is soon noticed


LEASES = {
    "cut_founder": 3.0,
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

FLIPS = {"flip": 6.0, "pause_s": 3.0, "steps": 40, "seal_steps": 1, "slots": 7}
SPEEDS = {"uneven": 1.0, "pause_s": 40.0, "steps": 300, "compute_s": 0.5, "body_s": 0.0}
HANGS = {"hang": 6.0, "pause_s": 5.0, "steps": 40, "slots": 7}

MUTANTS = [
    Mutant(
        "stop of an older generation counts",
        G,
        "worker is None or event.generation < self.number or worker.id not in self.open",
        "worker is None or worker.id not in self.open",
    ),
    Mutant(
        "finish of an older generation counts",
        G,
        "worker is None or event.generation != self.number or not self.run.in_flight",
        "worker is None or not self.run.in_flight",
    ),
    Mutant(
        "any claim counts",
        LEAD,
        "        if generation != self.claiming:\n            return False\n",
        "",
    ),
    Mutant(
        "heartbeat of an older generation counts",
        G,
        "if event.generation == self.number and in_flight:",
        "if in_flight:",
    ),
    Mutant(
        "announced without a claim",
        GATHER,
        "        if self._leadership.claimed <= generation.number:\n            run.phase = Phase.CLAIMING\n            self._leadership.claim(generation.number, now)\n",
        "        if self._leadership.claimed <= generation.number:\n            self._leadership.claimed = generation.number + 1\n            self._form(self._choose(founder, now), now)\n",
    ),
    Mutant(
        "a lost claim is ignored",
        C,
        "                self._stand_down(event)\n            case m.DeadlineReached",
        "                pass\n            case m.DeadlineReached",
    ),
    Mutant(
        "an early deadline counts",
        C,
        "if isinstance(event, m.DeadlineReached) and (deadline is None or now < deadline):\n            return []",
        "if isinstance(event, m.DeadlineReached):\n            self._staff.retry_at = now",
    ),
    Mutant(
        "no wait for the lease",
        G,
        "return self.acknowledged or not self.ghosts or now >= self.lease_until",
        "return True",
    ),
    Mutant(
        "the evicted count as dead",
        STAFF,
        "            self._generation.ghosts.add(worker.id)\n",
        "            pass\n",
    ),
    Mutant(
        "take-over does not wait for the lease",
        SURVEY,
        'generation.ghosts.add("")',
        "generation.acknowledged = True",
    ),
    Mutant(
        "renewed members are forgotten",
        G,
        "self.lease_until = max([worker.renewed_at for worker in seated]) + rules.lease_s",
        "self.lease_until = now",
    ),
    Mutant(
        "members that run keep no lease",
        G,
        "self.lease_until = max(self.lease_until, now + self.run.rules.lease_s)",
        "pass",
    ),
    Mutant(
        "a lease that a new controller renews is not waited for",
        C,
        "                self._generation.renewed(now)\n",
        "                pass\n",
    ),
    Mutant(
        "leases of the stopped are waited for",
        G,
        "        if inside:  # who",
        "        if True:  # who",
    ),
    Mutant(
        "the next forms while members are open",
        G,
        "return self.run.in_flight and not (self.open and self.unfinished)",
        "return self.run.phase is Phase.ENDING or (self.run.in_flight and not (self.open and self.unfinished))",
    ),
    Mutant(
        "void workers can be the source",
        S,
        "whole = [worker for worker in stopped if worker.whole]",
        "whole = stopped",
    ),
    Mutant(
        "any whole worker can be the source",
        S,
        "source = next((worker for worker in seated if worker.whole and worker.place == top), source)",
        "source = next((worker for worker in seated if worker.whole), source)",
    ),
    Mutant(
        "the most advanced may lose its seat",
        S,
        "if not any(worker is source or (worker.whole and worker.place == top) for worker in seated):",
        "if not any(worker.whole or worker is founder for worker in seated):",
    ),
    Mutant(
        "a source inside a body serves joiners",
        S,
        "copies = source.at_head or not source.whole",
        "copies = True",
    ),
    Mutant(
        "a half-written worker founds the run",
        GATHER,
        "beginning.able.pop(worker_id)  # may",
        "pass  # may",
    ),
    Mutant(
        "whoever was told no founds the run",
        ADMIT,
        "if can_source and not beginning.founded:",
        "if not beginning.founded:",
    ),
    Mutant(
        "the run is never founded by a report",
        G,
        "            self._beginning.shown(event.founded)\n",
        "            pass\n",
    ),
    Mutant(
        "who finished does not say from which beginning",
        G,
        "        self._beginning.shown(event.founded)  # after",
        "        self._beginning.shown(0)  # after",
    ),
    Mutant(
        "no room is made for a founder",
        ADMIT,
        "            self._make_room_for_founder(now)\n",
        "            pass\n",
    ),
    Mutant(
        "losing everyone goes unnoticed",
        GATHER,
        "                closing.lost_everyone(staff, beginning.at_most, now)\n                return\n",
        "                run.say('?')\n                return\n",
    ),
    Mutant(
        "leavers are forgotten at once",
        GATHER,
        "        staff.leavers[worker.id] = worker\n        staff.move(worker, Stage.LEAVER, now)\n",
        "        staff.release(worker, reason, now)\n        return\n",
    ),
    Mutant(
        "leavers never go",
        STAFF,
        "            self.release(leaver, leaver.leave_reason, now)\n",
        "            pass\n",
    ),
    Mutant(
        "leavers are not called back",
        GATHER,
        "recalled = [*staff.leavers.values()]",
        "recalled: list[Worker] = []",
    ),
    Mutant(
        "joiners before those who stay",
        S,
        "order = [worker for worker in stopped if worker in chosen]\n    order += [worker for worker in new if worker in chosen]",
        "order = [worker for worker in new if worker in chosen]\n    order += [worker for worker in stopped if worker in chosen]",
    ),
    Mutant(
        "fewer than min_workers will do",
        GATHER,
        "if at_hand < run.least:",
        "if at_hand < 1:",
    ),
    Mutant(
        "evicted while the group makes steps",
        L,
        "            if now < until:\n",
        "            if False:\n",
    ),
    Mutant(
        "sleep is taken for their silence",
        C,
        "                self._staff.liveness.was_away(now)\n",
        "                pass\n",
    ),
    Mutant(
        "judged by a heartbeat behind which others wait",
        C,
        "        self._progress.catch_up(now)\n",
        "",
    ),
    Mutant(
        "who slept while it took what was held goes on",
        C,
        "elif leadership.held is not None and leadership.releasing_at is None:",
        "elif leadership.held is not None and leadership.releasing_at is not None:\n"
        "            leadership.held.append(event)\n"
        "            self._release(now)\n"
        "        elif leadership.held is not None:",
    ),
    Mutant(
        "a run that is over leaves held facts",
        C,
        "            if self._run.phase is not Phase.OVER:\n                break\n",
        "            break\n",
    ),
    Mutant(
        "a quiet coordinator does not confirm",
        LEAD,
        "return found or self.fell_quiet(now, waiting) or self._answered_late(event, now)",
        "return found or self._answered_late(event, now)",
    ),
    Mutant(
        "a late answer to a claim counts",
        LEAD,
        "return ours and now > self._asked_at + self.run.rules.heartbeat_timeout_s",
        "return False",
    ),
    Mutant(
        "claims skip numbers",
        LEAD,
        "if self.claiming:  # one after the other",
        "if False:  # one after the other",
    ),
    Mutant(
        "earlier beginnings come back",
        GATHER,
        "if 0 < worker.founded < founded_in:",
        "if False:",
    ),
    Mutant(
        "what was held is dropped",
        C,
        "            for each in leadership.release(now):\n",
        "            for each in leadership.release(now)[:1]:\n",
    ),
    Mutant(
        "judged before all is read",
        C,
        "0.0 if isinstance(event, m.DeadlineReached) else",
        "0.0 if True else",
    ),
    Mutant(
        "silence is never judged",
        L,
        "self._named_once(now) if now >= self.due + patience_s else []",
        "[]",
    ),
    Mutant(
        "messages are no sign of life",
        C,
        "if worker is not None and worker.stage not in UNTIMED:",
        "if isinstance(event, m.WorkerHeard) and worker is not None and worker.stage not in UNTIMED:",
    ),
    Mutant(
        "the silent are looked at once only",
        L,
        "                self.excused[worker] = until  # the group",
        "                pass  # the group",
    ),
    Mutant(
        "the thawed are answered",
        C,
        '            run.emit(m.EvictWorker(event.worker, "not a worker of this run any more", stuck))\n',
        "            run.emit(m.RenewLease(event.worker, event.beat))\n",
    ),
    Mutant(
        "a stop unasked ends nothing",
        G,
        '            self.abort(f"{worker.id} stopped: {event.reason}")\n',
        "            pass\n",
    ),
    Mutant(
        "a loss ends nothing",
        G,
        "        if phase is Phase.FORMING or (phase is Phase.RUNNING and not finished):",
        "        if False:",
    ),
    Mutant(
        "any loss breaks the group",
        G,
        "        if self.members.pop(worker.id, None) is None:\n            return\n",
        "        self.members.pop(worker.id, None)\n",
    ),
    Mutant(
        "ends are told once",
        G,
        "        if self.run.phase is Phase.ENDING:\n            self._tell_end(worker)\n",
        "        if self.run.phase is Phase.ENDING:\n            pass\n",
    ),
    Mutant(
        "told at every heartbeat",
        G,
        "if beats & (beats - 1) and beats % REMIND_BEATS:",
        "if False:",
    ),
    Mutant(
        "told ever more seldom",
        G,
        "if beats & (beats - 1) and beats % REMIND_BEATS:",
        "if beats & (beats - 1):",
    ),
    Mutant(
        "an abort is repeated as seldom as the end was",
        G,
        "                worker.reminded_beats = 0\n                self._tell_end(worker)\n",
        "                self._tell_end(worker)\n",
    ),
    Mutant(
        "steps heard while taking over do not count",
        C,
        "            if event.generation == self._generation.number:\n                self._note_step(event.step, now)\n",
        "            if event.generation == self._generation.number and run.in_flight:\n                self._note_step(event.step, now)\n",
    ),
    Mutant(
        "lost reports stay lost",
        G,
        "                self._note_lost_report(worker, event.phase)\n",
        "                pass\n",
    ),
    Mutant(
        "no deadline for forming",
        G,
        "            if now < self._form_by:\n",
        "            if True:\n",
    ),
    Mutant(
        "the unreachable are tried again",
        GATHER,
        "        dropped = to_drop(",
        "        return\n        dropped = to_drop(",
    ),
    Mutant(
        "who fails to join twice stays",
        GATHER,
        "if again or worker.failed_joins > self.run.rules.max_failed_joins:",
        "if False:",
    ),
    Mutant(
        "the one that holds the state is dropped",
        S,
        "able = [worker for worker in degree if heads != {worker}]",
        "able = list(degree)",
    ),
    Mutant(
        "identities start over after a take-over",
        C,
        "            self._staff.identities.adopt(event.generation)\n",
        "            self._staff.identities.given = 0\n",
    ),
    Mutant(
        "identities before the claim",
        C,
        "            return  # identities are counted under the claim",
        "            pass",
    ),
    Mutant(
        "the dismissed are seated",
        STAFF,
        "        self.ready.pop(worker.id, None)\n",
        "",
    ),
    Mutant(
        "the lost are seated",
        G,
        "if self.members.pop(worker.id, None) is None:",
        "if worker.id not in self.members:",
    ),
    Mutant(
        "losses are not replaced",
        STAFF,
        "while len(self.useful) < wanted:",
        "while len(self.workers) < self.wanted:",
    ),
    Mutant(
        "finished when the first one is",
        GATHER,
        "if finished and not self._generation.unfinished:",
        "if finished:",
    ),
    Mutant(
        "a stop is not repeated",
        G,
        "        self.run.emit(m.FormGeneration(self.membership))\n        self.tell_to_stop()\n",
        "        self.run.emit(m.FormGeneration(self.membership))\n",
    ),
    Mutant(
        "a stop is not told again on heartbeats",
        G,
        "        elif self.run.stop is not None:\n            self._tell_stop(worker, self.run.stop)\n",
        "",
    ),
    Mutant(
        "talks on after the end",
        C,
        "        if self._run.phase is Phase.OVER:\n            self._take_when_over(event, now)\n        elif",
        "        if self._run.phase is Phase.OVER and not self._leadership.held:\n            self._take(event, now)\n        elif",
    ),
    Mutant(
        "size without bounds",
        C,
        "if not 1 <= event.size <= most:",
        "if False:",
    ),
    Mutant(
        "lost words are not asked for",
        C,
        "            run.emit(m.ReportYourself(worker.id, self._staff.asked))  # its word was lost\n",
        "            pass\n",
    ),
    Mutant(
        "a lost beginning stays lost",
        C,
        "            self._admission.tell_to_begin(worker)\n",
        "            pass\n",
    ),
    Mutant(
        "a take-over does not end what runs",
        SURVEY,
        "            self.run.emit(m.AbortGeneration(worker.id, generation.number))\n",
        "            pass\n",
    ),
    Mutant(
        "does not wait for all reports",
        SURVEY,
        "if self._staff.unreported or self._leadership.claimed <= generation.number:",
        "if self._leadership.claimed <= generation.number:",
    ),
    Mutant(
        "leavers go before the next generation forms",
        STAFF,
        "[*self.leavers.values()] if self.run.in_flight else []",
        "[*self.leavers.values()]",
    ),
    Mutant(
        "a death while forming counts as a failure to form",
        G,
        "            self.lost_while_forming = True\n            if",
        "            if",
    ),
    Mutant(
        "anybody speaks for the newest generation",
        G,
        "self.acknowledged = self.acknowledged or worker.entered == self.number",
        "self.acknowledged = True",
    ),
    Mutant(
        "a planned end that fails stays planned",
        G,
        '            self.abort(f"{worker.id} stopped before the planned end: {event.reason}")\n',
        "            pass\n",
    ),
    Mutant(
        "a planned end is never aborted",
        G,
        '                self.abort("the planned end takes too long")\n',
        "                pass\n",
    ),
    Mutant(
        "a planned end is not ahead",
        G,
        "self.step + self._pace + ahead",
        "self.step",
    ),
    Mutant(
        "who never entered is tried again",
        G,
        "                self.pairs.update((worker, worker) for worker in never)\n",
        "                pass\n",
    ),
    Mutant(
        "a hand-over has no more time than forming",
        G,
        "                self._form_by = max(self._form_by, now + self.run.rules.forming_timeout_s)\n",
        "                pass\n",
    ),
    Mutant(
        "a replacement is asked for when its node is gone",
        STAFF,
        "        self.useful.discard(worker.id)  # so a replacement",
        "        pass  # so a replacement",
    ),
    Mutant(
        "the confirmed dead are waited for",
        STAFF,
        "        self._generation.ghosts.discard(worker.id)\n",
        "",
    ),
    Mutant(
        "the founder is no more than others when scaling down",
        STAFF,
        "w.stage in LOOSE and w.id != founder",
        "w.stage in LOOSE",
    ),
    Mutant(
        "survivors wait for a burst of joiners",
        GATHER,
        "waiting = not survivors and",
        "waiting =",
    ),
    Mutant(
        "nobody founds the run after a take-over",
        SURVEY,
        "            beginning.able = {worker.id: worker for worker in able}\n",
        "            pass\n",
    ),
    Mutant(
        "who does not fit stays after a take-over",
        SURVEY,
        "                self._admission.fits(worker, now)\n",
        "                pass\n",
    ),
    Mutant(
        "who was building at a take-over is never ready",
        SURVEY,
        "            self._admission.became_ready(worker, event.signature, event.can_source, now)\n        if worker.stage is not",
        "            pass\n        if worker.stage is not",
    ),
    Mutant(
        "the least number holds up the end of the run",
        PROTOCOL + "run",
        "return 1 if self.stop is not None else min(",
        "return min(",
    ),
    Mutant(
        "the excused are judged after they left",
        L,
        "        self.excused.pop(worker, None)\n        if not self._heard:",
        "        if not self._heard:",
        first=1150,
    ),
    Mutant(
        "commit without compare-and-swap",
        W,
        "            return  # aborted: the compare-and-swap of the commit",
        "            pass",
    ),
    Mutant(
        "commit without a lease",
        W,
        '        elif self.world.now > self.lease_until:\n            self.failed("lease ran out")\n        else:\n            self.commit()',
        "        else:\n            self.commit()",
        LEASES,
        first=815,
    ),
    Mutant(
        "lease from the answer's arrival",
        W,
        "sent = self.beats.get(beat, -math.inf)",
        "sent = self.world.now",
        LEASES,
        first=680,
    ),
    Mutant(
        "a stopped worker resumes",
        W,
        "if membership is not None and membership.generation > self.ended:",
        "if membership is not None and membership.generation > self.generation:",
        {"slow_messages": 0.3, "pause_s": 1.5, "false_failure": 3.0, "slots": 7},
    ),
    Mutant(
        "the body's state is handed to those behind",
        W,
        "            elif source.step > self.step:\n                self.at_head, self.evaluated = False, 0\n",
        "            elif source.step > self.step:\n                self.at_head, self.evaluated, self.body_begun = True, 0, source.step\n",
        first=330,
    ),
    Mutant(
        "written to before all has arrived",
        W,
        '            self.failed("hand-over failed", (source.id,))  # staged',
        '            self.state = GARBAGE\n            self.failed("hand-over failed", (source.id,))  # staged',
        HAND_OVERS,
    ),
    Mutant(
        "whole before the copy is complete",
        W,
        '                self.state = GARBAGE\n            self.failed("the source is gone"',
        '                self.state, self.whole = GARBAGE, True\n            self.failed("the source is gone"',
        HAND_OVERS,
    ),
    Mutant(
        "a late planned end is ignored",
        W,
        "if generation == self.generation and (self.finished or self.attempting > last):",
        "if False:",
    ),
    Mutant(
        "planned ends are not kept",
        W,
        '        elif self.step >= self.planned.get(self.generation, math.inf):\n            self.failed("planned end")\n',
        "",
    ),
    Mutant(
        "back to the checkpoint though somebody holds the state",
        GATHER,
        "if not any(worker.whole for worker in holders):",
        "if holders:",
        {"seal_steps": 1, "kill": 3.0, "slots": 7},
    ),
    Mutant(
        "initial weights instead of the checkpoint",
        GATHER,
        "restore=beginning.sealed is not None",
        "restore=False",
    ),
    Mutant(
        "an old search for a checkpoint counts",
        PROTOCOL + "beginning",
        "        self.searched, self.sealed = False, None\n",
        "        pass\n",
    ),
    Mutant(
        "who found a checkpoint leads",
        LEAD,
        "return found or self.fell_quiet(now, waiting) or self._answered_late(event, now)",
        "return self.fell_quiet(now, waiting) or self._answered_late(event, now)",
    ),
    Mutant(
        "a take-over renews the lease of any generation",
        C,
        "        if not self._generation.is_past(event):\n",
        "        if True:\n",
    ),
    Mutant(
        "whoever must go is released before its state is sealed",
        KEEP,
        "if self.sealed >= top.step:",
        "if True:",
    ),
    Mutant(
        "any seal covers what they hold",
        KEEP,
        "if self.sealed >= top.step:",
        "if self.sealed:",
    ),
    Mutant(
        "the last who holds the state leaves in time",
        STAFF,
        " if self._is_held_by_others(worker):",
        ":",
    ),
    Mutant(
        "a leaver keeps nothing",
        KEEP,
        "            draining += self._staff.leavers.values()\n",
        "            pass\n",
    ),
    Mutant("long steps take the time of the last checkpoint", GATHER, ", at_once=True", ""),
    Mutant(
        "what it ran is not heard after its death",
        STAFF,
        "            self.budgets.died_in(*event.micro_batch)\n\n",
        "\n",
    ),
    Mutant(
        "a cause that comes later is not heard",
        STAFF,
        "            self._learn_why(event, now)\n",
        "",
    ),
    Mutant("a stop is nobody's fault but its own", C, 'now, blamed="")', "now)"),
    Mutant(
        "the loss of another is taken back",
        STAFF,
        "(worker.id, worker.entered), ",
        "self._blamed, ",
    ),
    Mutant("a pause outlives the step", STAFF, "            self.retry_at = -math.inf\n", ""),
    Mutant("one for each notice of many", KEEP, "if now < self._foresee_at:", "if False:"),
    Mutant("all are asked for a checkpoint", KEEP, "[:ASKED]", ""),
    Mutant(
        "a notice that changes is not seen",
        STAFF,
        "self.notices += known != (worker.draining, worker.leave_at)",
        "self.notices += not known[0]",
    ),
    Mutant("who is due is looked up once", KEEP, " or now >= self._due_until:", ":"),
    Mutant("a seal is not seen", KEEP, ", self.sealed, len(going))", ", len(going))"),
    Mutant("who gives is past forming", G, '"form", "give", "receive"', '"form", "receive"'),
    Mutant("what was sealed before going back counts", KEEP, "if restores:", "if False:"),
    Mutant("one half-way through a body keeps its state", KEEP, "and w.at_head", ""),
    Mutant("one behind keeps its state", KEEP, "w.whole and w.place == top", "w.whole"),
    Mutant("the end of the run is held up", KEEP, "if top.ended or", "if"),
    Mutant("the first step is waited for in vain", KEEP, "not top.step or", ""),
    Mutant("nobody keeps anything", KEEP, " or not writers or", " or"),
    Mutant("a seal is waited for for ever", KEEP, " or not self.in_time(going, now):", ":"),
    Mutant(
        "a notice that was wrong ends each generation", GATHER, " and keeping.in_time(due, now)", ""
    ),
    Mutant(
        "a word that was lost is not said again",
        KEEP,
        " or now >= self._again_at:",
        ":",
    ),
    Mutant(
        "those who write are not told anew",
        KEEP,
        "if (top.step, writers) != self._asked or now",
        "if now",
    ),
    Mutant(
        "no checkpoint when the notice comes",
        GATHER,
        "            keeping.foresee(now)\n",
        "            pass\n",
    ),
    Mutant(
        "one for each look at a notice",
        KEEP,
        "            self._foreseen.update(self._generation.draining)\n",
        "",
    ),
    Mutant(
        "who has time left is not counted",
        GATHER,
        "present - len(due or draining) + waiting",
        "present - len(draining) + waiting",
    ),
    Mutant(
        "those who must go stay to the end",
        GATHER,
        "elif due and run.rules.keeps and self._generation.step and keeping.in_time(due, now):",
        "elif False:",
    ),
    Mutant(
        "a checkpoint where there is no storage",
        GATHER,
        "going = self._keeping.due(now) if run.rules.keeps else []",
        "going = self._keeping.due(now)",
        climate={"seal_steps": 0, "drain": 3.0, "steps": 60, "kill_all": 0.0},
    ),
    Mutant(
        "those who must go are kept though others came",
        GATHER,
        "if going and at_hand - len(going) < run.least:",
        "if going:",
    ),
    Mutant(
        "what is asked for while nobody trains is forgotten",
        KEEP,
        "self._wanted = not self.run.in_flight",
        "self._wanted = False",
    ),
    Mutant(
        "an answer to an earlier question counts",
        SURVEY,
        "if worker.stage is not Stage.SURVEYED or event.asked != staff.asked:",
        "if worker.stage is not Stage.SURVEYED:",
    ),
    Mutant(
        "leavers wait for joiners",
        GATHER,
        "waiting = not survivors and",
        "waiting = not self._generation.members and",
    ),
    Mutant(
        "places of those who did not fit a lost founder stay empty",
        ADMIT,
        "        beginning.founder, beginning.signature = None, None\n        self._forget_misfits()\n",
        "        beginning.founder, beginning.signature = None, None\n",
    ),
    Mutant(
        "steps that were made before count as progress",
        BUDGET,
        "if step <= self._furthest:",
        "if not step:",
    ),
    Mutant(
        "who dies in a micro-batch that was passed once blames it",
        BUDGET,
        "        if step > self._furthest:\n            at =",
        "        if step:\n            at =",
    ),
    Mutant(
        "each of those who raise together is an error more",
        BUDGET,
        "return self._is_known(generation, number) or self.incidents < self.limit",
        "return self.incidents < self.limit",
    ),
    Mutant(
        "other software fits",
        PROTOCOL + "beginning",
        "for name in {**mine, **other}]",
        "for name in ()]",
    ),
    Mutant(
        "a preemption counts",
        STAFF,
        "if event.cause is m.Cause.PREEMPTED:",
        "if False:",
    ),
    Mutant(
        "want of memory is a loss as any other",
        STAFF,
        "self.budgets.memory if short else None",
        "None",
    ),
    Mutant(
        "an error of ours is tried again",
        C,
        "if event.facts is None and errors.allows(",
        "if errors.allows(",
    ),
    Mutant(
        "the error that took everyone is not told",
        PROTOCOL + "closing",
        "if staff.budgets.errors.incidents and staff.user_error is not None:",
        "if False:",
    ),
    Mutant(
        "a later loss without a pause ends the pause",
        STAFF,
        "max(self.retry_at, now + budget.pause_s)",
        "now + budget.pause_s",
    ),
    Mutant(
        "the kind of those who are lost still counts",
        ADMIT,
        "        if reader is None:\n            self._beginning.signature = None\n        elif",
        "        if reader is not None and",
    ),
    Mutant(
        "places of those who did not fit stay empty after going back",
        ADMIT,
        "        self._beginning.again()\n        self._forget_misfits()\n",
        "        self._beginning.again()\n",
    ),
    Mutant(
        "a joiner waits for nobody who builds",
        RESIZE,
        "    if outlook.building:\n",
        "    if False:\n",
    ),
    Mutant(
        "a joiner waits for a builder however long it takes",
        RESIZE,
        "since + max(rules.join_window_s, rules.stabilization_s), ",
        "math.inf, ",
    ),
    Mutant(
        "a joiner waits though it takes the last seat",
        RESIZE,
        "    if outlook.ready >= outlook.free:\n",
        "    if False:\n",
    ),
    Mutant(
        "joins follow each other at once",
        RESIZE,
        "outlook.joined_at + rules.stabilization_s",
        "-math.inf",
    ),
    Mutant(
        "any resize is worth its pause",
        RESIZE,
        "    if outlook.between_s > pays_s:\n",
        "    if True:\n",
    ),
    Mutant(
        "who is ready waits though nothing else changes",
        RESIZE,
        "    if outlook.between_s > pays_s:\n",
        "    if False:\n",
    ),
    Mutant(
        "who gains little waits for ever",
        RESIZE,
        "    most_s = MOST * outlook.pause_s\n",
        "    most_s = math.inf\n",
    ),
    Mutant(
        "a pause is counted from the first heartbeat, not in steps",
        RESIZE,
        "at - left_at - (step - left) / pace",
        "at - left_at",
    ),
    Mutant(
        "a generation without joiners tells what a join costs",
        RESIZE,
        "        if joins and began",
        "        if began",
    ),
    Mutant(
        "a step that was made before ends a pause",
        RESIZE,
        "if self._began is not None or step <= self._from:",
        "if self._began is not None:",
    ),
    Mutant(
        "an operator may need more workers than there are to be",
        C,
        "if event.min_workers is not None and not 1 <= least <= event.size:",
        "if False:",
    ),
    Mutant(
        "a size that is asked for alone sets the least number back",
        C,
        "least = self._run.min_workers if event.min_workers",
        "least = self.rules.min_workers if event.min_workers",
    ),
    Mutant(
        "a builder that is gone counts",
        STAFF,
        "        self.building.discard(worker.id)\n        self.unreported",
        "        self.unreported",
    ),
    Mutant(
        "where a worker runs is not kept",
        C,
        "                    workers[worker_id].home = home\n",
        "                    pass\n",
    ),
    Mutant(
        "the floor of on-demand workers is not kept",
        LEAVE,
        "    missing = floor - sum(",
        "    missing = 0 * sum(",
    ),
    Mutant(
        "the floor is kept before all others go",
        LEAVE,
        "min(missing, len(workers) - count)",
        "missing",
    ),
    Mutant(
        "for the floor any node is kept",
        LEAVE,
        "-on[w.home.node], w.home.node",
        "0",
    ),
    Mutant(
        "nodes are not emptied",
        LEAVE,
        "        if node not in occupied and len(group) <= count - len(chosen):",
        "        if False:",
    ),
    Mutant("a node is emptied that others stay on", LEAVE, "node not in occupied and ", ""),
    Mutant(
        "spot nodes are kept",
        LEAVE,
        "home.node not in emptying, not home.spot, -len(group)",
        "home.node not in emptying, -len(group)",
    ),
    Mutant(
        "who has no node stays",
        LEAVE,
        "reversed(workers) if not worker.home.node]",
        "reversed(workers) if worker.home.node is None]",
    ),
    Mutant(
        "a node that somebody leaves is emptied like others",
        LEAVE,
        "home.node not in emptying, not home.spot, -len(group)",
        "not home.spot, -len(group)",
    ),
    Mutant(
        "a node that somebody leaves is thinned like others",
        LEAVE,
        "home.node not in emptying, not home.spot, len(group)",
        "not home.spot, len(group)",
    ),
    Mutant(
        "for the floor workers of a node that somebody leaves are kept",
        LEAVE,
        "(w.home.node in emptying, -on",
        "(-on",
    ),
    Mutant(
        "who drains is overlooked when seats are given",
        S,
        "size, new, floor, going)",
        "size, new, floor)",
    ),
    Mutant(
        "who drains is overlooked when standbys leave",
        STAFF,
        "self.run.rules.min_on_demand, going)",
        "self.run.rules.min_on_demand)",
    ),
    Mutant(
        "standbys on a node are overlooked",
        STAFF,
        "leavers(loose, surplus, held, self",
        "leavers(loose, surplus, (), self",
    ),
    Mutant(
        "members whose weights differ go on",
        GATHER,
        "        if self._generation.disagreement is not None:\n",
        "        if False:\n",
        FLIPS,
    ),
    Mutant(
        "the newest checkpoint counts, whoever made it",
        GATHER,
        "self.run.emit(m.FindCheckpoint(self._beginning.at_most))",
        "self.run.emit(m.FindCheckpoint())",
        FLIPS,
    ),
    Mutant(
        "checkpoints made after going back do not count",
        PROTOCOL + "beginning",
        "        self.at_most = None\n",
        "",
        FLIPS | {"kill_all": 3.0},
    ),
    Mutant(
        "a disagreement of an earlier generation counts",
        G,
        "        self.ghosts, self.pairs, self.disagreement = set(), set(), None\n",
        "        self.ghosts, self.pairs = set(), set()\n",
        FLIPS,
    ),
    Mutant(
        "only who is odd is replaced",
        DIFFER,
        "        elif worker.whole:\n",
        "        elif False:\n",
        FLIPS,
    ),
    Mutant(
        "leavers keep wrong weights",
        DIFFER,
        "[*generation.members.values(), *staff.leavers.values()]",
        "[*generation.members.values()]",
        FLIPS | {"scale": 3.0, "drain": 3.0},
    ),
    Mutant(
        "void workers are replaced, too",
        DIFFER,
        "        if worker.whole and worker.id in said.odd:\n",
        "        if worker.id in said.odd or not worker.whole:\n",
    ),
    Mutant(
        "weights that differ for ever are never the job's fault",
        DIFFER,
        "    if times > MAX_IN_A_ROW:\n",
        "    if False:\n",
    ),
    Mutant(
        "nobody is ever stuck",
        PROGRESS,
        "        worker.standing.heard(event)\n",
        "        return\n",
        HANGS,
    ),
    Mutant(
        "those who wait in a collective are suspects",
        PROGRESS,
        "last = [worker for worker in inside if _order(worker) == least]",
        "last = inside",
        HANGS,
    ),
    Mutant(
        "who is a step behind in a collective is no suspect",
        PROGRESS,
        "alike = len(last) == len(inside) and least[2]",
        "alike = least[2]",
    ),
    Mutant(
        "the loop's body is a hang",
        PROGRESS,
        "        if untimed:\n",
        "        if False:\n",
    ),
    Mutant(
        "what is told to stop may not finish its body",
        PROGRESS,
        "        if worker.standing.phase in UNTIMED or not self._is_stuck(worker):",
        "        if not self._is_stuck(worker):",
    ),
    Mutant(
        "who computes has no longer limit",
        PROGRESS,
        "LONGER if busy or is_first else 1",
        "LONGER if is_first else 1",
    ),
    Mutant(
        "who may compile has no longer limit",
        PROGRESS,
        "LONGER if busy or is_first else 1",
        "LONGER if busy else 1",
    ),
    Mutant(
        "who does not stop when it is told is waited for",
        PROGRESS,
        "or (inside and self._generation.must_stop):",
        "or False:",
        HANGS,
    ),
    Mutant(
        "who hangs as a new controller asks is waited for",
        PROGRESS,
        "if worker.stage is Stage.SURVEYED or (",
        "if (",
        HANGS | {"crash_controller": 3.0},
    ),
    Mutant(
        "who has stopped waits too long",
        PROGRESS,
        "        inside = worker.id in self._generation.open\n",
        "        inside = True\n",
        HANGS,
    ),
    Mutant(
        "the time before the end was told counts",
        G,
        "                worker.standing.restart()  # what it was waiting for does not count\n",
        "",
        HANGS,
    ),
    Mutant(
        "late and doubled heartbeats count",
        PROTOCOL + "roster",
        "        if event.beat <= self._beat:\n            return  # late, or twice\n",
        "",
        HANGS | {"slow_messages": 0.3, "doubled": 0.3},
    ),
    Mutant(
        "who waited for one that came late is judged as it goes on",
        PROGRESS,
        "elif (all_stand_s := min(map(self._stands_s, inside))) < self.limit_s:",
        "elif all_stand_s := 0.0:",
    ),
    Mutant(
        "a hand-over in which nothing moves is waited for",
        PROGRESS,
        "(alike or stuck[0].standing.phase in HANDING_OVER)",
        "alike",
    ),
    Mutant(
        "what was measured in an older generation counts",
        BALANCE,
        "        if any(worker.measured_in != generation.number for worker in members):\n",
        "        if False:\n",
        SPEEDS,
    ),
    Mutant(
        "virtual workers are dealt anew again and again",
        BALANCE,
        "        self._look_at = now + REST_S\n",
        "",
        SPEEDS,
    ),
    Mutant(
        "any gain is worth a pause",
        BALANCE,
        "return then_s < (1.0 - MARGIN) * now_s",
        "return then_s < now_s",
    ),
    Mutant(
        "who is not measured takes no time",
        BALANCE,
        "filled = [s or usual for s in seconds]",
        "filled = [s or 1e-9 for s in seconds]",
    ),
    Mutant(
        "who has finished and is gone is dealt to",
        BALANCE,
        "        if len(members) < len(membership.seats):\n",
        "        if False:\n",
    ),
    Mutant(
        "dealt anew, though somebody joins soon",
        GATHER,
        "elif joins_at == math.inf:",
        "else:",
    ),
    Mutant(
        "a speed is forgotten when the generation ends",
        G,
        "                if event.virtual_s:\n",
        "                if True:\n",
    ),
    Mutant(
        "a slow worker is replaced at once",
        BALANCE,
        "max(slow.since + self._slow_s, self._replaced_at",
        "max(slow.since, self._replaced_at",
        SPEEDS,
    ),
    Mutant(
        "slow workers are replaced one after the other",
        BALANCE,
        "max(slow.since + self._slow_s, self._replaced_at + 2 * self._slow_s)",
        "slow.since + self._slow_s",
        SPEEDS,
    ),
    Mutant(
        "who recovers stays too slow",
        BALANCE,
        "            self._slow = None\n        else:",
        "            pass\n        else:",
        SPEEDS,
    ),
    Mutant(
        "who is a little slower is too slow",
        BALANCE,
        "next_s > (1.0 - SLOW_MARGIN) * most_s",
        "next_s > most_s",
        SPEEDS,
    ),
    Mutant(
        "who can be given less is replaced",
        BALANCE,
        "if last - first > 1 or next_s",
        "if next_s",
        SPEEDS,
    ),
    Mutant(
        "who was slow in an older generation is replaced",
        BALANCE,
        "if slow is None or slow.seen_in != self._generation.number:",
        "if slow is None:",
        SPEEDS,
    ),
    Mutant(
        "another that is slow inherits the time of the one before",
        BALANCE,
        "if self._slow and self._slow.worker == slowest else now",
        "if self._slow else now",
        SPEEDS,
    ),
    Mutant(
        "a slow worker is replaced though nobody is ready",
        GATHER,
        "elif waiting and (slow :=",
        "elif (slow :=",
        SPEEDS,
    ),
    Mutant(
        "who is slower gets more",
        BALANCE,
        "((sizes[rank] + 1) * seconds[rank], rank)",
        "((sizes[rank] + 1) / seconds[rank], rank)",
        SPEEDS,
    ),
]


@contextmanager
def broken(mutant: Mutant) -> Iterator[types.ModuleType]:
    """The simulator over modules of which one is broken; everything is put back afterwards."""
    ours = [name for name in sys.modules if name.startswith(RELOADED)]
    shared = {
        __name__,
        messages.__name__,
        membership.__name__,
    }  # one set of message classes, or nothing matches anything
    kept = {name: forget(name) for name in ours if name not in shared}
    try:
        original = importlib.util.find_spec(mutant.module)
        assert original is not None and original.origin is not None
        source = Path(original.origin).read_text()
        found = source.count(mutant.text)
        assert found == 1, f"{mutant.name}: {found} times in {mutant.module}: {mutant.text}"
        module = types.ModuleType(mutant.module)
        module.__file__ = original.origin
        sys.modules[mutant.module] = module
        exec(
            compile(source.replace(mutant.text, mutant.instead), original.origin, "exec"),
            vars(module),
        )
        yield importlib.import_module("tests.simulation.world")
    finally:
        for name in [n for n in sys.modules if n.startswith(RELOADED)]:
            if name not in shared:
                forget(name)
        for name, module in kept.items():
            sys.modules[name] = module
            package, _, stem = name.rpartition(".")
            setattr(sys.modules[package], stem, module)


def forget(name: str) -> types.ModuleType:
    """So that whoever imports it next gets a new one, also by `from package import it`."""
    package, _, stem = name.rpartition(".")
    vars(sys.modules[package]).pop(stem, None)
    return sys.modules.pop(name)


def caught(mutant: Mutant, seeds: range) -> tuple[int, str] | None:
    """The first seed in which some checker objects, and only to the mutant; and its words."""
    first = seeds.start
    while (found := objection(mutant, range(first, seeds.stop))) is not None:
        unbroken = replace(mutant, instead=mutant.text)
        if objection(unbroken, range(found[0], found[0] + 1)) is None:
            return found
        first = found[0] + 1
    return None


def objection(mutant: Mutant, seeds: range) -> tuple[int, str] | None:
    with broken(mutant) as world:
        for seed in seeds:
            try:
                world.World(seed, climate=mutant.climate).run()
            except Exception as error:
                return seed, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def caught_in_a_scene(mutant: Mutant) -> str | None:
    """The first scripted scene that fails."""
    with broken(mutant):
        scenes = [importlib.import_module(f"tests.protocol.{name}") for name in SCENES]
        for name, function in [item for module in scenes for item in vars(module).items()]:
            if not name.startswith("test_"):
                continue
            for values in cases(function):
                try:
                    function(**values)
                except Exception:
                    return name
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
