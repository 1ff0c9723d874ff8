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

from elastic_dp.protocol import messages

PROTOCOL = "elastic_dp.protocol."
C, S, L = PROTOCOL + "coordinator", PROTOCOL + "seating", PROTOCOL + "liveness"
G, LEAD, STAFF = PROTOCOL + "generation", PROTOCOL + "leadership", PROTOCOL + "staff"
ADMIT, GATHER, SURVEY = PROTOCOL + "admission", PROTOCOL + "gathering", PROTOCOL + "survey"
W = "tests.simulation.workers"
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
        "        if self._leadership.claimed <= generation.number:\n            self._leadership.claimed = generation.number + 1\n            self._form(seating, now)\n",
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
        "self.lease_until = renewed_at + rules.lease_s",
        "self.lease_until = now",
    ),
    Mutant(
        "members that run keep no lease",
        G,
        "self.lease_until = max(self.lease_until, now + self.run.rules.lease_s)",
        "pass",
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
        "beginning.able.pop(worker.id, None)  # may",
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
        "no room is made for a founder",
        ADMIT,
        "            self._make_room_for_founder(now)\n",
        "            pass\n",
    ),
    Mutant(
        "losing everyone goes unnoticed",
        GATHER,
        "            closing.lost_everyone(staff, now)\n            return\n",
        "            run.say('?')\n            return\n",
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
        "if short or top is None or w.place > top",
        "if False",
    ),
    Mutant(
        "joiners before those who stay",
        S,
        "order = [worker for worker in stopped if worker.id in chosen]\n    order += [worker for worker in new if worker.id in chosen]",
        "order = [worker for worker in new if worker.id in chosen]\n    order += [worker for worker in stopped if worker.id in chosen]",
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
        "a quiet coordinator does not confirm",
        LEAD,
        "return self.fell_quiet(now, waiting) or self._answered_late(event, now)",
        "return self._answered_late(event, now)",
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
        "for each in (event, *self._leadership.release(now)):",
        "for each in (event, *self._leadership.release(now)[:0]):",
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
        '            run.emit(m.EvictWorker(event.worker, "not a worker of this run any more"))\n',
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
        "                self.members[worker_id].reminded_beats = 0\n",
        "",
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
        "for pool in (self.ready, self.leavers):",
        "for pool in (self.leavers,):",
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
        "            if self.run.stop is not None:\n                self.run.emit(m.StopTraining(worker.id, self.run.stop))\n",
        "",
    ),
    Mutant(
        "a stop is not told again on heartbeats",
        G,
        "        elif self.run.stop is not None:\n            self.run.emit(m.StopTraining(worker.id, self.run.stop))\n",
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
        "            run.emit(m.ReportYourself(worker.id))  # its word was lost\n",
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
        "[*self.leavers.values()] if self.run.in_flight else ()",
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
        "self.step + self._pace + self.run.rules.steps_ahead",
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
        "worker.stage not in LOOSE or worker.id == self._beginning.founder",
        "worker.stage not in LOOSE",
    ),
    Mutant(
        "survivors wait for a burst of joiners",
        GATHER,
        "waiting = not self._generation.members and",
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
        first=310,
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
        first=130,
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
]


@contextmanager
def broken(mutant: Mutant) -> Iterator[types.ModuleType]:
    """The simulator over modules of which one is broken; everything is put back afterwards."""
    ours = [name for name in sys.modules if name.startswith(RELOADED)]
    shared = {
        __name__,
        messages.__name__,
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
        scenes = importlib.import_module("tests.protocol.test_coordinator")
        for name, function in vars(scenes).items():
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
