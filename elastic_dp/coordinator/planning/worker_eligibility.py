"""Decides which started workers may become members, and whose initial weights count. Who of them
joins the next generation is decided in member_selection.py.

The first worker that starts is asked to be the initial source. If it dies before the lineage is
established, another candidate takes its place. If every worker has been told that its weights do
not count, one is released so that a fresh worker can be the source.
"""

import math

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator import run_termination
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.messages import Signature
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState
from elastic_dp.wording import counted


class WorkerEligibility:
    """Checks the signatures of workers and chooses the initial source."""

    def __init__(
        self,
        run: RunState,
        registry: WorkerRegistry,
        generation: Generation,
        lineage: StateLineage,
    ) -> None:
        self.run, self._registry = run, registry
        self._generation, self._lineage = generation, lineage
        self._no_source_since = math.inf
        self.rejections = 0
        self.replaced_slow = 0

    def begin(self, worker: WorkerState, now: float) -> None:
        """Record that the worker's process is up and tell it to start training."""
        self._registry.started(worker, now)
        self._lineage.propose(worker.id)
        self.tell_to_begin(worker)

    def tell_to_begin(self, worker: WorkerState) -> None:
        """Send BeginTraining, which says whether the worker is the initial source."""
        self.run.emit(m.BeginTraining(worker.id, worker.id == self._lineage.initial_source))

    def became_ready(
        self, worker: WorkerState | None, signature: Signature, can_source: bool, now: float
    ) -> None:
        """Queue a worker whose model is built, unless its signature does not fit the run."""
        if worker is None or worker.stage not in (Stage.STARTING, Stage.BUILDING):
            return
        lineage = self._lineage
        worker.signature, worker.can_source = lineage.interned(signature), can_source
        self._registry.move(worker, Stage.READY, now)
        lineage.add_candidate(worker)
        if lineage.required_source == worker.id:
            self._set_signature(worker, now)
        elif self.fits(worker, now):
            self._registry.queue(worker, now)

    def _set_signature(self, source: WorkerState, now: float) -> None:
        """Take the source's signature as the run's and check the workers that already wait against
        it.
        """
        self._lineage.signature = source.signature
        if source.stage is Stage.READY:
            self._registry.queue(source, now)
        for worker in [*self._registry.ready.values()]:
            if worker is not source and not self.fits(worker, now):
                self._registry.ready.pop(worker.id, None)

    def fits(self, worker: WorkerState, now: float) -> bool:
        """Return whether the worker's signature fits the run.

        A worker with a different model fails the run. A worker with other data or another kind of
        machine is released, and replaced at most `max_rejections` times.
        """
        lineage = self._lineage
        # all workers run the same function, so its code is at fault
        if not lineage.same_model(worker):
            error = (
                f"ModelError: the model of {worker.id} differs from the others' in the names, "
                "shapes or dtypes of its parameters, or in the optimizer's order of parameters. "
                "The train function must build the same model in every worker (do not iterate "
                "over a set, whose order differs between processes): "
                f"{lineage.layout_difference(worker)}"
            )
            run_termination.fail(self._registry, error, "", now)
            return False
        what = lineage.difference(worker, self.run.config.exact)
        if not what:
            return True
        self._reject()
        self.run.explain(f"{worker.id} does not fit this run: {what}")
        self._registry.release(worker, f"does not fit this run: {what}", now)
        return False

    def replace_failed(self, worker: WorkerState, event: m.WorkerFailed, now: float) -> None:
        """Replace a worker whose code failed before it joined: the members train, so its node may
        be at fault.
        """
        self._reject()
        self.run.explain(f"{worker.id} fails before it joins: {event.error}\n{event.traceback}")
        self._registry.evict(worker, f"its code fails before it joins: {event.error}", now)

    def replace_slow(self, worker: WorkerState, reason: str, now: float) -> None:
        """Let a slow member leave once it is replaced, on another node if there is one.

        One leaves at a time. A replacement may be as slow, so `max_rejections` are replaced.
        """
        most = self.run.config.max_rejections
        if worker.stage is not Stage.MEMBER or self._generation.draining or self.run.stop:
            return
        if self.run.config.virtual_workers == 1:  # none can take its place while it is there
            return
        self.replaced_slow += 1
        if self.replaced_slow > most:
            if self.replaced_slow == most + 1:
                self.run.explain(f"{worker.id} stays: {most} slow workers were replaced before it")
            return
        self.run.explain(f"{worker.id} is to be replaced: {reason}")
        self.run.emit(m.AvoidNode(worker.id))
        self._registry.drain(worker, None, now, f"it is slow: {reason}")

    def _reject(self) -> None:
        """Count a worker that cannot join. Too many are not replaced."""
        self.rejections += 1
        if self.rejections > self.run.config.max_rejections:
            self._registry.unfilled += 1
            self.run.explain(
                f"{counted(self.rejections, 'worker')} could not join; this one is not replaced "
                "until the run is scaled"
            )

    def find_initial_source(self, now: float) -> WorkerState | None:
        """Return the worker whose initial weights count, or None while there is none that can be
        used.
        """
        lineage, workers = self._lineage, self._registry.workers
        source = workers.get(lineage.initial_source) if lineage.initial_source else None
        if source is not None and source.stage in (Stage.READY, Stage.MEMBER):
            return source
        if lineage.checkpoint_step is not None:
            return self._find_checkpoint_reader(now)
        if source is not None and source.stage is Stage.BUILDING:
            return None
        lineage.set_initial_source(None)
        self._reset_rejections()
        source = next(iter(lineage.source_candidates.values()), None)
        if source is not None:
            lineage.set_initial_source(source.id)
            self.run.explain(f"{source.id} is the source of the initial weights")
            self._set_signature(source, now)
            self._no_source_since = math.inf
            return source
        self._no_source_since = min(self._no_source_since, now)
        if now >= self._no_source_since + self.run.config.source_timeout_s:
            self._make_room_for_initial_source(now)
        self.run.timers.wake(self._no_source_since + self.run.config.source_timeout_s)
        return None

    def start_from_checkpoint(self) -> None:
        """Begin a new lineage from the newest checkpoint, after every worker with state is lost."""
        self._lineage.start_over()
        self._reset_rejections()

    def _reset_rejections(self) -> None:
        """Request replacements again: workers that did not fit before may fit the new signature."""
        self.rejections = 0
        self._registry.unfilled = 0

    def _find_checkpoint_reader(self, now: float) -> WorkerState | None:
        """Return any available worker that can read the newest checkpoint.

        These workers may be of another kind than those that wrote it.
        """
        at_hand = [*self._generation.members.values(), *self._registry.ready.values()]
        reader = min(at_hand, key=lambda worker: worker.draining, default=None)
        self._lineage.set_initial_source(None if reader is None else reader.id)
        if reader is not None and self._lineage.signature is None:
            self._set_signature(reader, now)
        return reader

    def _make_room_for_initial_source(self, now: float) -> None:
        """Release the youngest worker, so that a fresh worker can be the initial source.

        Every present worker has been told that its initial weights do not count.
        """
        self._no_source_since = now
        stateless = [*self._generation.members.values(), *self._registry.ready.values()]
        youngest = max(stateless, key=lambda worker: worker.number, default=None)
        if youngest is not None:
            self._registry.release(
                youngest, "a new worker must be the source of the initial weights", now
            )
