"""From a process that started to a void worker that may be seated: who fits, and whose initial weights count.

The first that starts is asked to be the founder. If it dies before the run is founded, another that may take its
place does; if all at hand were told that their weights do not count, room is made for a fresh one.
"""

import math

from elastic_dp.protocol import closing
from elastic_dp.protocol import messages as m
from elastic_dp.protocol.beginning import Beginning
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.messages import Signature
from elastic_dp.protocol.roster import Stage, Worker
from elastic_dp.protocol.run import Run
from elastic_dp.protocol.staff import Staff


class Admission:
    def __init__(
        self, run: Run, staff: Staff, generation: Generation, beginning: Beginning
    ) -> None:
        self.run, self._staff = run, staff
        self._generation, self._beginning = generation, beginning
        self._sourceless_since = math.inf
        self.rejections = 0

    def begin(self, worker: Worker, now: float) -> None:
        """Its process is up."""
        beginning = self._beginning
        self._staff.move(worker, Stage.BUILDING, now)
        worker.renewed_at = now  # its first lease runs from its start
        self._staff.liveness.heard(worker.id, now)
        if not beginning.founded and beginning.founder is None and not beginning.able:
            beginning.founder = worker.id
        self.tell_to_begin(worker)

    def tell_to_begin(self, worker: Worker) -> None:
        self.run.emit(m.BeginTraining(worker.id, worker.id == self._beginning.founder))

    def became_ready(
        self, worker: Worker | None, signature: Signature, can_source: bool, now: float
    ) -> None:
        if worker is None or worker.stage not in (Stage.STARTING, Stage.BUILDING):
            return
        beginning = self._beginning
        if signature == beginning.signature:
            signature = beginning.signature  # one in memory, however many workers
        worker.signature, worker.can_source = signature, can_source
        self._staff.move(worker, Stage.READY, now)
        if can_source and not beginning.founded:
            beginning.able[worker.id] = worker
        if beginning.needed == worker.id:
            self._set_signature(worker, now)
        elif self.fits(worker, now):
            self._staff.queue(worker, now)

    def _set_signature(self, founder: Worker, now: float) -> None:
        """The founder decides what fits; those already waiting are measured against it."""
        self._beginning.signature = founder.signature
        if founder.stage is Stage.READY:
            self._staff.queue(founder, now)
        for worker in [*self._staff.ready.values()]:
            if worker is not founder and not self.fits(worker, now):
                self._staff.ready.pop(worker.id, None)

    def fits(self, worker: Worker, now: float) -> bool:
        """Whoever does not is released, and replaced a bounded number of times."""
        beginning = self._beginning
        if not beginning.same_model(worker):  # all run the same function: it is its doing
            error = (
                f"ModelError: parameter names, shapes or dtypes of {worker.id}'s model, or their order in its "
                "optimizer, differ from the others'; the train function must build the same in every worker "
                f"(and a set has another order in each process): {beginning.differing_line(worker)}"
            )
            closing.fail(self._staff, error, "", now)
            return False
        what = beginning.differing(worker, self.run.rules.exact)
        if not what:
            return True
        self.rejections += 1
        if self.rejections > self.run.rules.max_rejections:
            self._staff.unfilled += 1
        self.run.explain(f"{worker.id} does not fit this run: {what}")
        self._staff.release(worker, f"does not fit this run: {what}", now)
        return False

    def find_founder(self, now: float) -> Worker | None:
        """The worker whose initial weights count, if it is at hand."""
        beginning = self._beginning
        founder = self._staff.workers.get(beginning.founder) if beginning.founder else None
        if founder is not None and founder.stage in (Stage.READY, Stage.MEMBER):
            return founder
        if beginning.sealed is not None:
            return self._find_reader(now)
        if founder is not None and founder.stage is Stage.BUILDING:
            return None
        beginning.founder, beginning.signature = None, None
        self._forget_misfits()
        founder = next(iter(beginning.able.values()), None)
        if founder is not None:
            beginning.founder = founder.id
            self.run.explain(f"{founder.id} gives the initial weights")
            self._set_signature(founder, now)
            self._sourceless_since = math.inf
            return founder
        self._sourceless_since = min(self._sourceless_since, now)
        if now >= self._sourceless_since + self.run.rules.source_timeout_s:
            self._make_room_for_founder(now)
        self.run.alarms.wake(self._sourceless_since + self.run.rules.source_timeout_s)
        return None

    def begin_again(self) -> None:
        self._beginning.again()
        self._forget_misfits()

    def _forget_misfits(self) -> None:
        """Those for whom there was no place may fit what comes now."""
        self.rejections = self._staff.unfilled = 0

    def _find_reader(self, now: float) -> Worker | None:
        """Of the newest checkpoint: anybody who is at hand; they may all be of another kind than before."""
        at_hand = [*self._generation.members.values(), *self._staff.ready.values()]
        reader = min(at_hand, key=lambda worker: worker.draining, default=None)
        self._beginning.founder = None if reader is None else reader.id
        if reader is None:
            self._beginning.signature = None
        elif self._beginning.signature is None:
            self._set_signature(reader, now)
        return reader

    def _make_room_for_founder(self, now: float) -> None:
        """All at hand were told that their weights do not count; a fresh one may need the place of one."""
        self._sourceless_since = now
        void = [*self._generation.members.values(), *self._staff.ready.values()]
        youngest = max(void, key=lambda worker: worker.number, default=None)
        if youngest is not None:
            self._staff.release(youngest, "a fresh worker must give the initial weights", now)
