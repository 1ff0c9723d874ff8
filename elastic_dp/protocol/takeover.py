"""Taking over from a controller that is gone: what there is, as the workers tell it.

Every generation up to the highest that was claimed is treated as one that may still run: each worker is told to leave
it, and the next is formed when all have said so, or fallen silent. There may be workers that nobody told us of, so a
ghost without a name keeps the next generation waiting until somebody speaks for the newest one, or its lease ran out.
"""

import math
from collections.abc import Iterable

from elastic_dp.protocol import messages as m
from elastic_dp.protocol.admission import Admission
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.leadership import Leadership
from elastic_dp.protocol.messages import WorkerId
from elastic_dp.protocol.run_state import Phase, RunState
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_registry import WorkerRegistry
from elastic_dp.protocol.worker_state import Stage
from elastic_dp.wording import counted


class Takeover:
    def __init__(
        self,
        run: RunState,
        leadership: Leadership,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
        admission: Admission,
    ) -> None:
        self.run, self._leadership, self._registry = run, leadership, registry
        self._generation, self._lineage, self._admission = generation, lineage, admission

    def begin(
        self, workers: Iterable[WorkerId], highest_claimed: int, founded: bool, now: float
    ) -> None:
        self._generation.number = highest_claimed
        self._registry.asked = highest_claimed + 1
        self._lineage.established = founded
        self.run.phase = Phase.TAKING_OVER
        # Whoever led before may have renewed until now.
        self._generation.lease_until = now + self.run.config.lease_s
        for worker_id in workers:
            self._registry.adopt(worker_id, now)
            self._leadership.heard_at = now
        self._leadership.claim(highest_claimed, now)
        asked = len(self._registry.workers)
        self.run.say(
            f"took over after generation {highest_claimed}, asking {counted(asked, 'worker')}"
        )

    def reported(self, event: m.WorkerReported, now: float) -> None:
        registry, generation = self._registry, self._generation
        worker = registry.workers.get(event.worker)
        if worker is None:
            return
        if worker.stage is Stage.BUILDING and event.signature is not None and event.generation == 0:
            self._admission.became_ready(worker, event.signature, event.can_source, now)
        if worker.stage is not Stage.UNREPORTED or event.asked != registry.asked:
            return
        registry.unreported.discard(worker.id)
        worker.signature, worker.can_source = event.signature, event.can_source
        worker.entered, worker.lineage_id = event.generation, event.founded
        worker.position, worker.has_state = event.place, event.whole
        if event.signature is None:
            registry.move(worker, Stage.BUILDING, -math.inf)
        elif generation.number == 0:  # none was ever announced
            registry.move(worker, Stage.BUILDING, now)
            self._admission.became_ready(worker, event.signature, event.can_source, now)
        else:  # it may hold, or be about to enter, any generation up to the newest
            registry.move(worker, Stage.MEMBER, now)
            generation.members[worker.id] = worker
            generation.inside.add(worker.id)
            generation.not_finished.add(worker.id)
            self.run.emit(m.AbortGeneration(worker.id, generation.number))
        if worker.draining:
            registry.drain(worker, None, now)

    def end(self, now: float) -> None:
        """Once all are heard or given up, and the claim shows that this one leads."""
        generation, lineage = self._generation, self._lineage
        if self._registry.unreported or self._leadership.claimed <= generation.number:
            return
        self.run.phase = Phase.ENDING
        generation.formed = True
        generation.unconfirmed_dead.add("")  # there may be workers that we were not told of
        members = [*generation.members.values()]
        whole = [worker for worker in members if worker.has_state]
        if whole:
            lineage.shown(max(worker.lineage_id for worker in whole))
            lineage.signature = max(whole, key=lambda w: (w.lineage_id, w.position)).signature
        else:
            able = [worker for worker in members if worker.can_source and worker.entered == 0]
            lineage.source_candidates = {worker.id: worker for worker in able}
        for worker in members:
            if not worker.has_state:
                self._admission.fits(worker, now)
        self.run.say(f"generation {generation.number} ends: its controller is gone")
