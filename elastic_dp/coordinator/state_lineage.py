"""Whose state is the run's: the initial state that it descends from, and which workers fit it.

Before the first generation has formed, the truth is the initial weights of one worker, the initial
source. Another candidate may take its place if it dies. From then on the lineage is established,
and only a worker with state can be a source. A committed checkpoint takes the place of all initial
weights, so any worker that fits can then be the initial source. A run that has lost every worker
with state starts again from the checkpoint.
"""

import itertools
import zlib
from collections.abc import Iterable

from elastic_dp.coordinator.messages import Signature, WorkerId
from elastic_dp.coordinator.workers.worker_state import WorkerState


class StateLineage:
    """The origin of the run's state, and the signature that members must have."""

    def __init__(self) -> None:
        self.established = False  # some worker has the run's state
        self.lineage_id = 0  # the generation whose source gave the initial weights
        self.initial_source: WorkerId | None = None
        # Workers without state whose initial weights may count.
        self.source_candidates: dict[WorkerId, WorkerState] = {}
        self.signature: Signature | None = None  # what members must have in common
        self.searching = False  # for a checkpoint
        self.searched = False  # a checkpoint was searched since the last generation was formed
        self.checkpoint_step: int | None = None  # the step of the checkpoint that was found
        self.at_most: int | None = None  # everything after this step is wrong
        self._agreed, self._rejections = -1, 0

    @property
    def required_source(self) -> WorkerId | None:
        """The worker without which the run cannot begin."""
        return self.initial_source if not self.established else None

    # ---------------------------------------------------------------------- the state

    def observed(self, lineage_id: int) -> None:
        """Record that a worker has state that descends from lineage `lineage_id`."""
        self.established = True
        self.lineage_id = max(self.lineage_id, lineage_id)

    def found(self, step: int | None) -> None:
        """Record the answer: the step of the newest checkpoint, or None."""
        self.searching, self.searched, self.checkpoint_step = False, True, step

    def members_chosen(self, generation: int) -> None:
        """Record that the members of `generation` are chosen."""
        if not self.established:
            self.lineage_id = generation

    def forget_checkpoint(self) -> None:
        """Forget the checkpoint that was found.

        If the generation ends before any member has state, there may be a newer one.
        """
        self.searched, self.checkpoint_step = False, None
        self.at_most = None

    def reject(self, agreed: int) -> int:
        """Declare everything after step `agreed` wrong. Return how often in a row this has
        happened.
        """
        self._rejections = self._rejections + 1 if agreed <= self._agreed else 1
        self._agreed = max(self._agreed, agreed)
        self.at_most = agreed
        return self._rejections

    def start_over(self) -> None:
        """Begin a new lineage: every worker with state is lost, and there is a checkpoint."""
        self.established, self.initial_source = False, None
        self.source_candidates.clear()

    # --------------------------------------------------------------- the initial source

    def propose(self, worker: WorkerId) -> None:
        """Make the first worker that starts the initial source, if there is none."""
        if not self.established and self.initial_source is None and not self.source_candidates:
            self.initial_source = worker

    def set_initial_source(self, worker: WorkerId | None) -> None:
        """Set the initial source. None also clears the signature."""
        self.initial_source = worker
        if worker is None:
            self.signature = None

    def add_candidate(self, worker: WorkerState) -> None:
        """Remember a worker whose initial weights may count."""
        if worker.can_source and not self.established:
            self.source_candidates[worker.id] = worker

    def drop_receiving_candidates(self, workers: Iterable[WorkerId]) -> None:
        """Drop candidates that receive state from now on: their initial weights are being
        overwritten.
        """
        for worker in self.source_candidates.keys() & set(workers):
            if worker != self.initial_source:
                self.source_candidates.pop(worker)

    def forget(self, worker: WorkerId) -> None:
        self.source_candidates.pop(worker, None)
        if self.initial_source == worker:
            self.initial_source = None

    # ------------------------------------------------------------------------ who fits

    def interned(self, signature: Signature) -> Signature:
        """Return the equal signature that is already in memory, if there is one."""
        return self.signature if signature == self.signature and self.signature else signature

    def same_model(self, worker: WorkerState) -> bool:
        """Return whether the worker's model has the run's layout."""
        ours, theirs = self.signature, worker.signature
        return ours is None or theirs is None or ours.layout == theirs.layout

    def layout_difference(self, worker: WorkerState) -> str:
        """Return the first difference between the worker's layout and the run's, in words."""
        assert self.signature is not None and worker.signature is not None
        its, ours = (layout_lines(signature) for signature in (worker.signature, self.signature))
        both = itertools.zip_longest(its, ours, fillvalue="nothing")
        return next((f"{mine!r}, not {others!r}" for mine, others in both if mine != others), "")

    def difference(self, worker: WorkerState, exact: bool) -> str:
        """Return in words why the worker does not fit the run; empty if it fits."""
        ours, theirs = self.signature, worker.signature
        if ours is None or theirs is None:
            return ""
        mine, other = dict(ours.software), dict(theirs.software)
        pairs = [(name, other.get(name), mine.get(name)) for name in {**mine, **other}]
        pairs.append(("data", theirs.data, ours.data))
        if exact:
            pairs.append(("kind", theirs.kind, ours.kind))
        return ", ".join(f"{name} {its!r}, not {run!r}" for name, its, run in pairs if its != run)


def layout_lines(signature: Signature) -> list[str]:
    """Return the lines that describe a signature's layout."""
    return zlib.decompress(signature.lines).decode().split("\n") if signature.lines else []
