"""Whose state is the run's: the beginning that it descends from, and who fits it.

Before anybody was past forming, the truth is the initial weights of one worker, the founder; another that is `able`
may take its place if it dies. From then on the run is founded, and only who is whole can be a source. Once there is
a sealed checkpoint, that is the truth instead of anybody's initial weights, so whoever fits can be the founder; and
a run that has lost everyone who held its state begins again from there.
"""

import itertools
import zlib

from elastic_dp.protocol.messages import Signature, WorkerId
from elastic_dp.protocol.roster import Worker


class Beginning:
    def __init__(self) -> None:
        self.founded = False  # somebody holds the run's state
        self.founded_in = 0  # the generation that its initial weights come from
        self.founder: WorkerId | None = None
        self.able: dict[WorkerId, Worker] = {}  # void, and its initial weights may count
        self.signature: Signature | None = None  # what members must have in common
        self.searching = False  # for a checkpoint
        self.searched = False  # since the last generation was formed
        self.sealed: int | None = None  # the step of the one that was found
        self.at_most: int | None = None  # what was made after this step is wrong
        self._agreed, self._rejections = -1, 0

    @property
    def needed(self) -> WorkerId | None:
        """Without whom nothing can begin."""
        return self.founder if not self.founded else None

    def shown(self, founded_in: int) -> None:
        """Somebody whole was seen, whose state descends from the beginning in this generation."""
        self.founded = True
        self.founded_in = max(self.founded_in, founded_in)

    def found(self, step: int | None) -> None:
        self.searching, self.searched, self.sealed = False, True, step

    def forms(self) -> None:
        """A generation begins; if it ends before anybody is whole, there may be a newer checkpoint."""
        self.searched, self.sealed = False, None
        self.at_most = None

    def reject(self, agreed: int) -> int:
        """Nothing after step `agreed` counts. Returns how often that was so."""
        self._rejections = self._rejections + 1 if agreed <= self._agreed else 1
        self._agreed = max(self._agreed, agreed)
        self.at_most = agreed
        return self._rejections

    def again(self) -> None:
        """Everyone is lost, and there is a checkpoint."""
        self.founded, self.founder = False, None
        self.able.clear()

    def forget(self, worker: WorkerId) -> None:
        self.able.pop(worker, None)
        if self.founder == worker:
            self.founder = None

    def same_model(self, worker: Worker) -> bool:
        ours, theirs = self.signature, worker.signature
        return ours is None or theirs is None or ours.layout == theirs.layout

    def differing_line(self, worker: Worker) -> str:
        """The first of its layout that is another than the run's, in words."""
        assert self.signature is not None and worker.signature is not None
        its, ours = (lines_of(signature) for signature in (worker.signature, self.signature))
        both = itertools.zip_longest(its, ours, fillvalue="nothing")
        return next((f"{mine!r}, not {others!r}" for mine, others in both if mine != others), "")

    def differing(self, worker: Worker, exact: bool) -> str:
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
