"""Whose state is the run's: the beginning that it descends from, and who fits it.

Before anybody was past forming, the truth is the initial weights of one worker, the founder; another that is `able`
may take its place if it dies. From then on the run is founded, and only who is whole can be a source.
"""

from elastic_dp.protocol.messages import Signature, WorkerId
from elastic_dp.protocol.roster import Worker


class Beginning:
    def __init__(self) -> None:
        self.founded = False  # somebody holds the run's state
        self.founded_in = 0  # the generation that its initial weights come from
        self.founder: WorkerId | None = None
        self.able: dict[WorkerId, Worker] = {}  # void, and its initial weights may count
        self.signature: Signature | None = None  # what members must have in common

    @property
    def needed(self) -> WorkerId | None:
        """Without whom nothing can begin."""
        return self.founder if not self.founded else None

    def shown(self, founded_in: int) -> None:
        """Somebody whole was seen, whose state descends from the beginning in this generation."""
        self.founded = True
        self.founded_in = max(self.founded_in, founded_in)

    def forget(self, worker: WorkerId) -> None:
        self.able.pop(worker, None)
        if self.founder == worker:
            self.founder = None

    def same_model(self, worker: Worker) -> bool:
        ours, theirs = self.signature, worker.signature
        return ours is None or theirs is None or ours.layout == theirs.layout

    def differing(self, worker: Worker, exact: bool) -> str:
        """What keeps it out, in words; empty if it fits."""
        ours, theirs = self.signature, worker.signature
        if ours is None or theirs is None:
            return ""
        names = ("data", "kind") if exact else ("data",)
        return ", ".join(
            f"{name} {getattr(theirs, name)!r}, not {getattr(ours, name)!r}"
            for name in names
            if getattr(ours, name) != getattr(theirs, name)
        )
