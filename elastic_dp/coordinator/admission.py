"""From a process that started to a worker that may become a member: who fits, and whose initial
weights count.

The first worker that starts is asked to be the initial source. If it dies before the lineage is
established, another candidate takes its place; if all workers were told that their weights do not
count, room is made for a fresh one.
"""

import math

from elastic_dp.coordinator import closing
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import Signature
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.worker_registry import WorkerRegistry
from elastic_dp.coordinator.worker_state import Stage, WorkerState


class Admission:
    def __init__(
        self,
        run: RunState,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
    ) -> None:
        self.run, self._registry = run, registry
        self._generation, self._lineage = generation, lineage
        self._sourceless_since = math.inf
        self.rejections = 0

    def begin(self, worker: WorkerState, now: float) -> None:
        """Its process is up."""
        self._registry.started(worker, now)
        self._lineage.propose(worker.id)
        self.tell_to_begin(worker)

    def tell_to_begin(self, worker: WorkerState) -> None:
        self.run.emit(m.BeginTraining(worker.id, worker.id == self._lineage.initial_source))

    def became_ready(
        self, worker: WorkerState | None, signature: Signature, can_source: bool, now: float
    ) -> None:
        if worker is None or worker.stage not in (Stage.STARTING, Stage.BUILDING):
            return
        lineage = self._lineage
        worker.became_ready(lineage.shared(signature), can_source)
        self._registry.move(worker, Stage.READY, now)
        lineage.add_candidate(worker)
        if lineage.needed == worker.id:
            self._set_signature(worker, now)
        elif self.fits(worker, now):
            self._registry.queue(worker, now)

    def _set_signature(self, source: WorkerState, now: float) -> None:
        """The initial source decides what fits; those already waiting are measured against it."""
        self._lineage.require(source.signature)
        if source.stage is Stage.READY:
            self._registry.queue(source, now)
        for worker in [*self._registry.ready.values()]:
            if worker is not source and not self.fits(worker, now):
                self._registry.unqueue(worker)

    def fits(self, worker: WorkerState, now: float) -> bool:
        """A worker that does not is released, and replaced a bounded number of times."""
        lineage = self._lineage
        if not lineage.same_model(worker):  # all run the same function: it is its doing
            error = (
                f"ModelError: parameter names, shapes or dtypes of {worker.id}'s model, or "
                "their order in its "
                "optimizer, differ from the others'; the train function must build the same "
                "in every worker "
                f"(and a set has another order in each process): {lineage.differing_line(worker)}"
            )
            closing.fail(self._registry, error, "", now)
            return False
        what = lineage.differing(worker, self.run.config.exact)
        if not what:
            return True
        self.rejections += 1
        if self.rejections > self.run.config.max_rejections:
            self._registry.give_up_place()
        self.run.explain(f"{worker.id} does not fit this run: {what}")
        self._registry.release(worker, f"does not fit this run: {what}", now)
        return False

    def find_initial_source(self, now: float) -> WorkerState | None:
        """The worker whose initial weights count, if it is at hand."""
        lineage, workers = self._lineage, self._registry.workers
        source = workers.get(lineage.initial_source) if lineage.initial_source else None
        if source is not None and source.stage in (Stage.READY, Stage.MEMBER):
            return source
        if lineage.checkpoint_step is not None:
            return self._find_reader(now)
        if source is not None and source.stage is Stage.BUILDING:
            return None
        lineage.choose(None)
        self._forget_misfits()
        source = next(iter(lineage.source_candidates.values()), None)
        if source is not None:
            lineage.choose(source.id)
            self.run.explain(f"{source.id} gives the initial weights")
            self._set_signature(source, now)
            self._sourceless_since = math.inf
            return source
        self._sourceless_since = min(self._sourceless_since, now)
        if now >= self._sourceless_since + self.run.config.source_timeout_s:
            self._make_room_for_initial_source(now)
        self.run.timers.wake(self._sourceless_since + self.run.config.source_timeout_s)
        return None

    def start_from_checkpoint(self) -> None:
        """Every worker with state is lost."""
        self._lineage.start_over()
        self._forget_misfits()

    def resized(self) -> None:
        """An operator asks for workers: rejections so far do not count."""
        self.rejections = 0

    def _forget_misfits(self) -> None:
        """Those for whom there was no place may fit what comes now."""
        self.rejections = 0
        self._registry.fill_all_places()

    def _find_reader(self, now: float) -> WorkerState | None:
        """Of the newest checkpoint: any worker that is at hand; they may all be of another kind
        than before."""
        at_hand = [*self._generation.members.values(), *self._registry.ready.values()]
        reader = min(at_hand, key=lambda worker: worker.draining, default=None)
        self._lineage.choose(None if reader is None else reader.id)
        if reader is not None and self._lineage.signature is None:
            self._set_signature(reader, now)
        return reader

    def _make_room_for_initial_source(self, now: float) -> None:
        """All workers were told that their weights do not count; a fresh one may need the place of
        one."""
        self._sourceless_since = now
        stateless = [*self._generation.members.values(), *self._registry.ready.values()]
        youngest = max(stateless, key=lambda worker: worker.number, default=None)
        if youngest is not None:
            self._registry.release(youngest, "a fresh worker must give the initial weights", now)
