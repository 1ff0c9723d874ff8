"""Taking over from a controller that is gone: what there is, as the workers tell it.

Every generation up to the highest that was claimed is treated as one that may still run: each worker is told to leave
it, and the next is formed when all have said so, or fallen silent. There may be workers that nobody told us of, so a
ghost without a name keeps the next generation waiting until somebody speaks for the newest one, or its lease ran out.
"""

import math
from collections.abc import Iterable

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.admission import Admission
from elastic_dp.protocol.beginning import Beginning
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.leadership import Leadership
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.roster import Stage
from elastic_dp.protocol.run import Phase, Run
from elastic_dp.protocol.staff import Staff
from elastic_dp.wording import counted


class Survey:
    def __init__(
        self,
        run: Run,
        leadership: Leadership,
        staff: Staff,
        generation: Generation,
        beginning: Beginning,
        admission: Admission,
    ) -> None:
        self.run, self._leadership, self._staff = run, leadership, staff
        self._generation, self._beginning, self._admission = generation, beginning, admission

    def begin(
        self, workers: Iterable[WorkerId], highest_claimed: int, founded: bool, now: float
    ) -> None:
        self._generation.number = highest_claimed
        self._staff.asked = highest_claimed + 1
        self._beginning.founded = founded
        self.run.phase = Phase.SURVEYING
        # Whoever led before may have renewed until now.
        self._generation.lease_until = now + self.run.rules.lease_s
        for worker_id in workers:
            self._staff.adopt(worker_id, now)
            self._leadership.heard_at = now
        self._leadership.claim(highest_claimed, now)
        asked = len(self._staff.workers)
        self.run.say(
            f"took over after generation {highest_claimed}, asking {counted(asked, 'worker')}"
        )

    def reported(self, event: m.WorkerReported, now: float) -> None:
        staff, generation = self._staff, self._generation
        worker = staff.workers.get(event.worker)
        if worker is None:
            return
        if worker.stage is Stage.BUILDING and event.signature is not None and event.generation == 0:
            self._admission.became_ready(worker, event.signature, event.can_source, now)
        if worker.stage is not Stage.SURVEYED or event.asked != staff.asked:
            return
        staff.unreported.discard(worker.id)
        worker.signature, worker.can_source = event.signature, event.can_source
        worker.entered, worker.founded = event.generation, event.founded
        worker.place, worker.whole = event.place, event.whole
        if event.signature is None:
            staff.move(worker, Stage.BUILDING, -math.inf)
        elif generation.number == 0:  # none was ever announced
            staff.move(worker, Stage.BUILDING, now)
            self._admission.became_ready(worker, event.signature, event.can_source, now)
        else:  # it may hold, or be about to enter, any generation up to the newest
            staff.move(worker, Stage.MEMBER, now)
            generation.members[worker.id] = worker
            generation.open.add(worker.id)
            generation.unfinished.add(worker.id)
            self.run.emit(m.AbortGeneration(worker.id, generation.number))
        if worker.draining:
            staff.drain(worker, None, now)

    def end(self, now: float) -> None:
        """Once all are heard or given up, and the claim shows that this one leads."""
        generation, beginning = self._generation, self._beginning
        if self._staff.unreported or self._leadership.claimed <= generation.number:
            return
        self.run.phase = Phase.ENDING
        generation.formed = True
        generation.ghosts.add("")  # there may be workers that we were not told of
        members = [*generation.members.values()]
        whole = [worker for worker in members if worker.whole]
        if whole:
            beginning.shown(max(worker.founded for worker in whole))
            beginning.signature = max(whole, key=lambda w: (w.founded, w.place)).signature
        else:
            able = [worker for worker in members if worker.can_source and worker.entered == 0]
            beginning.able = {worker.id: worker for worker in able}
        for worker in members:
            if not worker.whole:
                self._admission.fits(worker, now)
        self.run.say(f"generation {generation.number} ends: its controller is gone")
