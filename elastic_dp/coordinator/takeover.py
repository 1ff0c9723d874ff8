"""Replaces a controller that is gone, from what the workers report.

Every generation up to the highest claimed one is treated as one that may still run: each worker is
told to leave it, and the next generation is formed when all workers have reported or fallen silent.
There may be workers that this coordinator does not know of, so the fence stays open until a worker
reports that it has left the newest generation, or the lease has expired.
"""

import math
from collections.abc import Iterable

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.leadership import Leadership
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.coordinator.planning.worker_eligibility import WorkerEligibility
from elastic_dp.coordinator.run_state import Phase, RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Stage
from elastic_dp.wording import counted


class Takeover:
    """Collects the reports of all workers of a run."""

    def __init__(
        self,
        run: RunState,
        leadership: Leadership,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
        eligibility: WorkerEligibility,
    ) -> None:
        self.run, self._leadership, self._registry = run, leadership, registry
        self._generation, self._lineage, self._eligibility = generation, lineage, eligibility

    def begin(
        self, workers: Iterable[WorkerId], highest_claimed: int, established: bool, now: float
    ) -> None:
        """Ask `workers` for their state and claim the generation after `highest_claimed`."""
        self._registry.inquiry = highest_claimed + 1
        self._lineage.established = established
        self.run.enter(Phase.TAKING_OVER)
        self._generation.assume_running(highest_claimed, now)
        for worker_id in workers:
            self._registry.adopt(worker_id, now)
            self._leadership.heard_at = now
        self._leadership.claim(highest_claimed, now)
        asked = len(self._registry.workers)
        self.run.set_reason(
            f"took over after generation {highest_claimed}, asking {counted(asked, 'worker')}"
        )

    def reported(self, event: m.WorkerReported, now: float) -> None:
        """Take the report of a worker."""
        registry, generation = self._registry, self._generation
        worker = registry.workers.get(event.worker)
        if worker is None:
            return
        if worker.stage is Stage.BUILDING and event.signature is not None and event.generation == 0:
            self._eligibility.became_ready(worker, event.signature, event.can_source, now)
        if worker.stage is not Stage.UNREPORTED or event.asked != registry.inquiry:
            return
        registry.unreported.discard(worker.id)
        worker.reported(event)
        if event.signature is None:
            registry.move(worker, Stage.BUILDING, -math.inf)
        elif generation.number == 0:  # no generation was ever announced
            registry.move(worker, Stage.BUILDING, now)
            self._eligibility.became_ready(worker, event.signature, event.can_source, now)
        else:
            registry.move(worker, Stage.MEMBER, now)
            generation.add_reported_member(worker)
        if worker.draining:
            registry.drain(worker, None, now)

    def end(self, now: float) -> None:
        """End the takeover when all workers have reported or are evicted, and the claim is
        granted.
        """
        generation, lineage = self._generation, self._lineage
        if self._registry.unreported or self._leadership.claimed <= generation.number:
            return
        generation.end_takeover()
        members = [*generation.members.values()]
        holders = [worker for worker in members if worker.has_state]
        if holders:
            lineage.observed(max(worker.lineage_id for worker in holders))
            newest = max(holders, key=lambda w: (w.lineage_id, w.position))
            lineage.signature = newest.signature
        else:
            fresh = [w for w in members if w.can_source and w.entered == 0]
            lineage.source_candidates = {worker.id: worker for worker in fresh}
        for worker in members:
            if not worker.has_state:
                self._eligibility.fits(worker, now)
        self.run.set_reason(f"generation {generation.number} ends: its controller is gone")
