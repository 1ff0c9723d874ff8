"""Whose state is the run's: the lineage that it descends from, and who fits it.

Before anybody was past forming, the truth is the initial weights of one worker, the initial_source; another that is `able`
may take its place if it dies. From then on the run is founded, and only who is whole can be a source. Once there is
a sealed checkpoint, that is the truth instead of anybody's initial weights, so whoever fits can be the initial_source; and
a run that has lost everyone who held its state begins again from there.
"""

import itertools
import zlib

from elastic_dp.protocol.messages import Signature, WorkerId
from elastic_dp.protocol.worker_state import WorkerState


class StateLineage:
    def __init__(self) -> None:
        self.established = False  # somebody holds the run's state
        self.lineage_id = 0  # the generation that its initial weights come from
        self.initial_source: WorkerId | None = None
        self.source_candidates: dict[
            WorkerId, WorkerState
        ] = {}  # void, and its initial weights may count
        self.signature: Signature | None = None  # what members must have in common
        self.searching = False  # for a checkpoint
        self.searched = False  # since the last generation was formed
        self.checkpoint_step: int | None = None  # the step of the one that was found
        self.at_most: int | None = None  # what was made after this step is wrong
        self._agreed, self._rejections = -1, 0

    @property
    def needed(self) -> WorkerId | None:
        """Without whom nothing can begin."""
        return self.initial_source if not self.established else None

    def shown(self, lineage_id: int) -> None:
        """Somebody whole was seen, whose state descends from the lineage in this generation."""
        self.established = True
        self.lineage_id = max(self.lineage_id, lineage_id)

    def found(self, step: int | None) -> None:
        self.searching, self.searched, self.checkpoint_step = False, True, step

    def forms(self) -> None:
        """A generation begins; if it ends before anybody is whole, there may be a newer checkpoint."""
        self.searched, self.checkpoint_step = False, None
        self.at_most = None

    def reject(self, agreed: int) -> int:
        """Nothing after step `agreed` counts. Returns how often that was so."""
        self._rejections = self._rejections + 1 if agreed <= self._agreed else 1
        self._agreed = max(self._agreed, agreed)
        self.at_most = agreed
        return self._rejections

    def again(self) -> None:
        """Everyone is lost, and there is a checkpoint."""
        self.established, self.initial_source = False, None
        self.source_candidates.clear()

    def forget(self, worker: WorkerId) -> None:
        self.source_candidates.pop(worker, None)
        if self.initial_source == worker:
            self.initial_source = None

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
