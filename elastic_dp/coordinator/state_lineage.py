"""Whose state is the run's: the initial state that it descends from, and which workers fit it.

Before any member was past forming, the truth is the initial weights of one worker, the initial
source; another candidate may take its place if it dies. From then on the lineage is established,
and only a worker that has state can be a source. Once there is a committed checkpoint, that is the
truth instead of anybody's initial weights, so any worker that fits can be the initial source; a run
that has lost every worker with state starts again from there.
"""

import itertools
import zlib
from collections.abc import Iterable

from elastic_dp.coordinator.messages import Signature, WorkerId
from elastic_dp.coordinator.worker_state import WorkerState


class StateLineage:
    def __init__(self) -> None:
        self.established = False  # some worker has the run's state
        self.lineage_id = 0  # the generation that its initial weights come from
        self.initial_source: WorkerId | None = None
        # Workers without state whose initial weights may count.
        self.source_candidates: dict[WorkerId, WorkerState] = {}
        self.signature: Signature | None = None  # what members must have in common
        self.searching = False  # for a checkpoint
        self.searched = False  # since the last generation was formed
        self.checkpoint_step: int | None = None  # of the one that was found
        self.at_most: int | None = None  # what was made after this step is wrong
        self._agreed, self._rejections = -1, 0

    @property
    def needed(self) -> WorkerId | None:
        """Without whom nothing can begin."""
        return self.initial_source if not self.established else None

    # ---------------------------------------------------------------------- the state

    def establish(self) -> None:
        self.established = True

    def shown(self, lineage_id: int) -> None:
        """A worker with state was seen, whose state descends from this lineage."""
        self.established = True
        self.lineage_id = max(self.lineage_id, lineage_id)

    def assume(self, established: bool) -> None:
        """A takeover knows no more than this."""
        self.established = established

    def search(self) -> bool:
        """For the newest checkpoint; whether that has to be requested."""
        first, self.searching = not self.searching, True
        return first

    def found(self, step: int | None) -> None:
        self.searching, self.searched, self.checkpoint_step = False, True, step

    def forms(self, generation: int) -> None:
        """The generation's members are chosen."""
        if not self.established:
            self.lineage_id = generation

    def formed(self) -> None:
        """A generation begins; if it ends before any member has state, there may be a newer
        checkpoint."""
        self.searched, self.checkpoint_step = False, None
        self.at_most = None

    def reject(self, agreed: int) -> int:
        """Nothing after step `agreed` counts. Returns how often that was so."""
        self._rejections = self._rejections + 1 if agreed <= self._agreed else 1
        self._agreed = max(self._agreed, agreed)
        self.at_most = agreed
        return self._rejections

    def start_over(self) -> None:
        """Every worker with state is lost, and there is a checkpoint."""
        self.established, self.initial_source = False, None
        self.source_candidates.clear()

    # --------------------------------------------------------------- the initial source

    def propose(self, worker: WorkerId) -> None:
        """The first that starts, while there is no other."""
        if not self.established and self.initial_source is None and not self.source_candidates:
            self.initial_source = worker

    def choose(self, worker: WorkerId | None) -> None:
        """The initial source, or none: then nobody's signature counts."""
        self.initial_source = worker
        if worker is None:
            self.signature = None

    def add_candidate(self, worker: WorkerState) -> None:
        if worker.can_source and not self.established:
            self.source_candidates[worker.id] = worker

    def only_candidates(self, workers: Iterable[WorkerState]) -> None:
        self.source_candidates = {worker.id: worker for worker in workers}

    def may_be_half_written(self, workers: Iterable[WorkerId]) -> None:
        """They receive state from now on, so their initial weights are no more."""
        for worker in self.source_candidates.keys() & set(workers):
            if worker != self.initial_source:
                self.source_candidates.pop(worker)

    def forget(self, worker: WorkerId) -> None:
        self.source_candidates.pop(worker, None)
        if self.initial_source == worker:
            self.initial_source = None

    # ------------------------------------------------------------------------ who fits

    def require(self, signature: Signature | None) -> None:
        """What members must have in common from now on."""
        self.signature = signature

    def shared(self, signature: Signature) -> Signature:
        """One in memory, however many workers have it."""
        return self.signature if signature == self.signature and self.signature else signature

    def same_model(self, worker: WorkerState) -> bool:
        ours, theirs = self.signature, worker.signature
        return ours is None or theirs is None or ours.layout == theirs.layout

    def differing_line(self, worker: WorkerState) -> str:
        """The first of its layout that is another than the run's, in words."""
        assert self.signature is not None and worker.signature is not None
        its, ours = (lines_of(signature) for signature in (worker.signature, self.signature))
        both = itertools.zip_longest(its, ours, fillvalue="nothing")
        return next((f"{mine!r}, not {others!r}" for mine, others in both if mine != others), "")

    def differing(self, worker: WorkerState, exact: bool) -> str:
        """What keeps it out, in words; empty if it fits."""
        ours, theirs = self.signature, worker.signature
        if ours is None or theirs is None:
            return ""
        mine, other = dict(ours.software), dict(theirs.software)
        pairs = [(name, other.get(name), mine.get(name)) for name in {**mine, **other}]
        pairs.append(("data", theirs.data, ours.data))
        if exact:
            pairs.append(("kind", theirs.kind, ours.kind))
        return ", ".join(f"{name} {its!r}, not {run!r}" for name, its, run in pairs if its != run)


def lines_of(signature: Signature) -> list[str]:
    return zlib.decompress(signature.lines).decode().split("\n") if signature.lines else []
