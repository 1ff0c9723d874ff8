"""From a process that started to a void worker that may be seated: who fits, and whose initial weights count.

The first that starts is asked to be the initial_source. If it dies before the run is founded, another that may take its
place does; if all at hand were told that their weights do not count, room is made for a fresh one.
"""

import math

from elastic_dp.protocol import closing
from elastic_dp.protocol import messages as m
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.messages import Signature
from elastic_dp.protocol.run_state import RunState
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_registry import WorkerRegistry
from elastic_dp.protocol.worker_state import Stage, WorkerState


class Admission:
    def __init__(
        self, run: RunState, registry: WorkerRegistry, generation: Generation, lineage: StateLineage
    ) -> None:
        self.run, self._registry = run, registry
        self._generation, self._lineage = generation, lineage
        self._sourceless_since = math.inf
        self.rejections = 0

    def begin(self, worker: WorkerState, now: float) -> None:
        """Its process is up."""
        lineage = self._lineage
        self._registry.move(worker, Stage.BUILDING, now)
        worker.renewed_at = now  # its first lease runs from its start
        self._registry.failure_detector.heard(worker.id, now)
        if (
            not lineage.established
            and lineage.initial_source is None
            and not lineage.source_candidates
        ):
            lineage.initial_source = worker.id
        self.tell_to_begin(worker)

    def tell_to_begin(self, worker: WorkerState) -> None:
        self.run.emit(m.BeginTraining(worker.id, worker.id == self._lineage.initial_source))

    def became_ready(
        self, worker: WorkerState | None, signature: Signature, can_source: bool, now: float
    ) -> None:
        if worker is None or worker.stage not in (Stage.STARTING, Stage.BUILDING):
            return
        lineage = self._lineage
        if signature == lineage.signature:
            signature = lineage.signature  # one in memory, however many workers
        worker.signature, worker.can_source = signature, can_source
        self._registry.move(worker, Stage.READY, now)
        if can_source and not lineage.established:
            lineage.source_candidates[worker.id] = worker
        if lineage.needed == worker.id:
            self._set_signature(worker, now)
        elif self.fits(worker, now):
            self._registry.queue(worker, now)

    def _set_signature(self, initial_source: WorkerState, now: float) -> None:
        """The initial_source decides what fits; those already waiting are measured against it."""
        self._lineage.signature = initial_source.signature
        if initial_source.stage is Stage.READY:
            self._registry.queue(initial_source, now)
        for worker in [*self._registry.ready.values()]:
            if worker is not initial_source and not self.fits(worker, now):
                self._registry.ready.pop(worker.id, None)

    def fits(self, worker: WorkerState, now: float) -> bool:
        """Whoever does not is released, and replaced a bounded number of times."""
        lineage = self._lineage
        if not lineage.same_model(worker):  # all run the same function: it is its doing
            error = (
                f"ModelError: parameter names, shapes or dtypes of {worker.id}'s model, or their order in its "
                "optimizer, differ from the others'; the train function must build the same in every worker "
                f"(and a set has another order in each process): {lineage.differing_line(worker)}"
            )
            closing.fail(self._registry, error, "", now)
            return False
        what = lineage.differing(worker, self.run.config.exact)
        if not what:
            return True
        self.rejections += 1
        if self.rejections > self.run.config.max_rejections:
            self._registry.unfilled += 1
        self.run.explain(f"{worker.id} does not fit this run: {what}")
        self._registry.release(worker, f"does not fit this run: {what}", now)
        return False

    def find_initial_source(self, now: float) -> WorkerState | None:
        """The worker whose initial weights count, if it is at hand."""
        lineage = self._lineage
        initial_source = (
            self._registry.workers.get(lineage.initial_source) if lineage.initial_source else None
        )
        if initial_source is not None and initial_source.stage in (Stage.READY, Stage.MEMBER):
            return initial_source
        if lineage.checkpoint_step is not None:
            return self._find_reader(now)
        if initial_source is not None and initial_source.stage is Stage.BUILDING:
            return None
        lineage.initial_source, lineage.signature = None, None
        self._forget_misfits()
        initial_source = next(iter(lineage.source_candidates.values()), None)
        if initial_source is not None:
            lineage.initial_source = initial_source.id
            self.run.explain(f"{initial_source.id} gives the initial weights")
            self._set_signature(initial_source, now)
            self._sourceless_since = math.inf
            return initial_source
        self._sourceless_since = min(self._sourceless_since, now)
        if now >= self._sourceless_since + self.run.config.source_timeout_s:
            self._make_room_for_initial_source(now)
        self.run.timers.wake(self._sourceless_since + self.run.config.source_timeout_s)
        return None

    def start_from_checkpoint(self) -> None:
        self._lineage.again()
        self._forget_misfits()

    def _forget_misfits(self) -> None:
        """Those for whom there was no place may fit what comes now."""
        self.rejections = self._registry.unfilled = 0

    def _find_reader(self, now: float) -> WorkerState | None:
        """Of the newest checkpoint: anybody who is at hand; they may all be of another kind than before."""
        at_hand = [*self._generation.members.values(), *self._registry.ready.values()]
        reader = min(at_hand, key=lambda worker: worker.draining, default=None)
        self._lineage.initial_source = None if reader is None else reader.id
        if reader is None:
            self._lineage.signature = None
        elif self._lineage.signature is None:
            self._set_signature(reader, now)
        return reader

    def _make_room_for_initial_source(self, now: float) -> None:
        """All at hand were told that their weights do not count; a fresh one may need the place of one."""
        self._sourceless_since = now
        void = [*self._generation.members.values(), *self._registry.ready.values()]
        youngest = max(void, key=lambda worker: worker.number, default=None)
        if youngest is not None:
            self._registry.release(youngest, "a fresh worker must give the initial weights", now)
