"""The catalog of a run's checkpoints: its commit records, their history, and what may be deleted.

    <run>/checkpoints/seals/claim-00000007.from-00000003-000000000900.json  claim 7 continues from
                                                                            step 900 of claim 3
    <run>/checkpoints/seals/claim-….from-….without-00000950-00000960.json   … without the rows of
                                                                            steps 950 to 960
    <run>/checkpoints/seals/step-000000001000.claim-00000007.json           the commit record
    <run>/checkpoints/step-000000001000/<digest>.safetensors                a blob

- Only committed checkpoints are listed. One listing finds them all; a commit record is read when it
  is needed.
- The history of a run is a chain of claims. The holder of the run's lease (lease.py) creates a
  claim once, before it trains; the lease's number is the fence of the claim. A controller that was
  suspended may commit steps after its successor continued from an earlier one. Such commits are not
  part of the history.
- A run that is rewound has a claim that continues from an earlier step. What it leaves out is left
  out from there on, in all later claims.
- A blob is named by its content. Blobs of different states never collide, and the same state always
  gives the same objects with the same bytes (layout.py).
- A deletion starts with the commit record, so a crash between two deletions never leaves a
  committed checkpoint without its blobs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.errors import CheckpointDamaged, CheckpointError, LeaseLost
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.storage.json_files import path_in

_COMMIT = re.compile(r"step-(\d{12})\.claim-(\d{8})\.json")
_CLAIM = re.compile(r"claim-(\d{8})\.from-(\d{8})-(\d{12})(?:\.without-(\d+)-(\d+))?\.json")
_BLOB = re.compile(r"step-(\d{12})/([0-9a-f]{32})\.safetensors(\.|$)")


class CommitName(NamedTuple):
    """The name of a commit record: its step and the fence of its claim."""

    step: int
    fence: int

    def __str__(self) -> str:
        return f"step-{self.step:012}.claim-{self.fence:08}.json"


class Claim(NamedTuple):
    """The start of a controller's part of the history.

    The holder of `fence` continued from `step` of the claim `base`. Both are 0 at the start of the
    run. From there on, the rows of steps `left_out`, the first and the last one, are left out.
    """

    fence: int
    base: int
    step: int
    left_out: tuple[int, int] | None = None

    def __str__(self) -> str:
        without = "" if self.left_out is None else ".without-{:08}-{:08}".format(*self.left_out)
        return f"claim-{self.fence:08}.from-{self.base:08}-{self.step:012}{without}.json"


@dataclass(frozen=True)
class Keep:
    """The retention policy.

    The newest `num_to_keep` checkpoints stay (None: all of them), or the best ones if
    `score_attribute` names a metric. The newest one always stays, and so does each one whose step
    is a multiple of `keep_every`.

    A checkpoint is ranked by the value that its own step logged. A checkpoint without a value, or
    with NaN, ranks behind all others and is never the best.
    """

    num_to_keep: int | None = 3
    keep_every: int | None = None
    score_attribute: str | None = None
    order: Literal["max", "min"] = "max"


class Catalog:
    """The checkpoints of the run in a store. The constructor reads nothing."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folder = path_in(store, "checkpoints")

    def path(self, name: CommitName | Claim) -> str:
        """Returns the path of a commit record or claim in the store."""
        return f"{self.folder}/seals/{name}"

    def highest_fence(self) -> int:
        """Returns the highest fence of all claims and commit records, 0 if there are none."""
        names, claims = self._listed()
        return max([*(name.fence for name in names), *(claim.fence for claim in claims)], default=0)

    def names(self) -> list[CommitName]:
        """Returns the names of the committed checkpoints in the history, oldest first."""
        return history(*self._listed())

    def read(self, name: CommitName) -> CommitRecord:
        """Reads a commit record.

        Raises CheckpointDamaged if it cannot be read, and CheckpointError if it was deleted or its
        format is a later one.
        """
        try:
            content = self.store.read_all(self.path(name))
        except ObjectMissing:
            raise CheckpointError(f"the checkpoint of step {name.step} has been deleted") from None
        try:
            commit = CommitRecord.from_bytes(bytes(content), name.step)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path(name)}: {error}") from None
        if commit.fence != name.fence:
            raise CheckpointDamaged(name.step, f"its commit record belongs to claim {commit.fence}")
        return commit

    def commits(
        self, on_damage: Callable[[CheckpointDamaged], None] = lambda error: None
    ) -> Iterator[CommitRecord]:
        """Yields the commit records, newest first. Damaged ones are skipped, and `on_damage` is
        called with the error of each."""
        for name in reversed(self.names()):
            try:
                yield self.read(name)
            except CheckpointDamaged as error:
                on_damage(error)

    def find(
        self, step: int | Literal["latest", "best"] = "latest", keep: Keep | None = None
    ) -> CommitRecord:
        """Returns the commit record of a step, of the newest checkpoint, or of the best one by
        `keep`.

        Raises CheckpointError if there is none.
        """
        if step == "best":
            return self.best(keep or Keep())
        names = self.names()
        wanted = [name for name in names if step in ("latest", name.step)]
        if wanted:
            return self.read(wanted[-1])
        steps = ", ".join(str(name.step) for name in names) or "none"
        what = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        raise CheckpointError(f"{self.store.url} has no committed {what}; it has: {steps}")

    def best(self, keep: Keep) -> CommitRecord:
        """Returns the best commit record by the metric of `keep`. Raises CheckpointError if none
        has it."""
        name = keep.score_attribute
        if name is None:
            raise CheckpointError(
                'step="best" needs a metric: set '
                "CheckpointConfig.checkpoint_score_attribute, or pass the metric"
            )
        commits = list(self.commits())
        scored = [
            commit for commit in commits if _score(keep, commit.step, commit.metadata.metrics)[0]
        ]
        if not scored:
            known = sorted({metric for commit in commits for metric in commit.metadata.metrics})
            raise CheckpointError(
                f"no checkpoint of {self.store.url} has the metric {name!r}; they have: "
                f"{', '.join(known) or 'none'}"
            )
        return max(scored, key=lambda commit: _score(keep, commit.step, commit.metadata.metrics))

    def left_out(self) -> tuple[tuple[int, int], ...]:
        """Returns the first and the last step of each stretch whose rows the run leaves out. Each
        is counted without those before it."""
        chain = [*_chain((), self._listed()[1])]
        return tuple(claim.left_out for claim in reversed(chain) if claim.left_out is not None)

    def claim(
        self, fence: int, base: CommitName | None, left_out: tuple[int, int] | None = None
    ) -> Claim:
        """Starts to write under `fence`, continuing from `base` (None: from the start of the run),
        without the rows of steps `left_out`.

        Raises LeaseLost if another controller holds the same or a later fence.
        """
        assert base is None or base.fence < fence, (base, fence)
        before = [claim.fence for claim in self._listed()[1] if claim.fence < fence]
        of_base, step = (base.fence, base.step) if base else (0, 0)
        claim = Claim(fence, max([*before, of_base]), step, left_out)
        with contextlib.suppress(FileExistsError):  # our own: a fence has one holder
            content = json.dumps(claim._asdict()).encode()
            self.store.write(self.path(claim), content, create_only=True)
        _, claims = self._listed()
        others = [other for other in claims if other.fence >= fence and other != claim]
        if others:
            raise LeaseLost(f"claim {max(others).fence} of {self.store.url} was made meanwhile")
        return claim

    def retain(self, keep: Keep, fence: int, *, writing: Iterable[int] = ()) -> list[int]:
        """Deletes checkpoints that `keep` does not retain and blobs that were never committed.

        Steps in `writing` are left alone. Returns the steps whose commit records were deleted.
        Raises LeaseLost, before it deletes anything, if there is a later claim than `fence`.
        """
        metrics: dict[CommitName, Mapping[str, float]] = {}
        names, claims = self._listed()
        fences = [name.fence for name in names] + [claim.fence for claim in claims]
        if max(fences, default=0) > fence:
            raise LeaseLost(f"{self.store.url} was claimed again after claim {fence}")
        valid = history(names, claims)
        if keep.score_attribute is not None:
            for commit in self.commits():
                metrics[CommitName(commit.step, commit.fence)] = commit.metadata.metrics
        kept = to_keep(valid, keep, metrics)
        busy = set(writing)
        gone = [name for name in names if name not in kept and name.step not in busy]
        for name in gone:
            self.store.delete(self.path(name))
        self._sweep(kept, busy)
        return [name.step for name in gone]

    def _sweep(self, kept: set[CommitName], busy: set[int]) -> None:
        """Deletes the blobs that no retained commit record names, and temporary files of killed
        writers.

        Blobs of steps after the newest commit stay, because a worker may still be writing them.
        """
        newest = max((name.step for name in kept), default=0)
        named = {name.step: self._blobs_of(kept, name.step) for name in kept}
        for entry in self.store.find(f"{self.folder}/"):
            inner = entry.path[len(self.folder) + 1 :]
            found = _BLOB.match(inner)
            if found is None:
                if inner.endswith(".tmp"):
                    self.store.delete(entry.path)
                continue
            step, blob = int(found[1]), found[2]
            if step in busy or step > newest:
                continue
            of_step = named.get(step, set())
            if (of_step is not None and blob not in of_step) or inner.endswith(".tmp"):
                self.store.delete(entry.path)

    def _blobs_of(self, kept: Iterable[CommitName], step: int) -> set[str] | None:
        """Returns the names of the blobs of all commit records of a step.

        Returns None if one of the records cannot be read: then any blob may be in use.
        """
        try:
            mine = [self.read(name).manifest for name in kept if name.step == step]
            return {name for manifest in mine for name in manifest.headers}
        except (CheckpointDamaged, CheckpointError):
            return None

    def _listed(self) -> tuple[list[CommitName], list[Claim]]:
        """Lists the store and returns all commit records and claims, sorted."""
        names, claims = [], []
        for entry in self.store.find(f"{self.folder}/seals/"):
            inner = entry.path.rpartition("/")[2]
            if found := _COMMIT.fullmatch(inner):
                names.append(CommitName(*map(int, found.groups())))
            elif found := _CLAIM.fullmatch(inner):
                fence, base, step, first, last = (int(n or 0) for n in found.groups())
                claims.append(Claim(fence, base, step, (first, last) if first else None))
        return sorted(names), sorted(claims)


def step_folder(folder: str, step: int) -> str:
    """Returns the path of the folder of a step's blobs in the store."""
    return f"{folder}/step-{step:012}"


def blob_path(folder: str, step: int, name: str) -> str:
    """Returns the path of a blob in the store."""
    return f"{step_folder(folder, step)}/{name}.safetensors"


def history(names: Iterable[CommitName], claims: Iterable[Claim]) -> list[CommitName]:
    """Returns the commit records that belong to the history, oldest first.

    All records of the newest claim count. Of the claim from which it continued, the records up to
    that step count, and so on back to the start of the run.
    """
    committed = set(names)
    found: list[CommitName] = []
    limit: int | None = None
    for claim in _chain((name.fence for name in committed), claims):
        mine = [name for name in committed if name.fence == claim.fence]
        found += [name for name in mine if limit is None or name.step <= limit]
        limit = claim.step if limit is None else min(limit, claim.step)
    return sorted(found)


def _chain(fences: Iterable[int], claims: Iterable[Claim]) -> Iterator[Claim]:
    """Yields the newest claim of these and of those that have `fences`, and those that it descends
    from, newest first."""
    by_fence = {claim.fence: claim for claim in claims}
    fence = max([*by_fence, *fences], default=0)
    while fence:
        claim = by_fence.get(fence, Claim(fence, 0, 0))
        yield claim
        fence = claim.base if claim.base < fence else 0


def to_keep(
    names: list[CommitName], keep: Keep, metrics: Mapping[CommitName, Mapping[str, float]]
) -> set[CommitName]:
    """Returns the names that the retention policy `keep` retains."""
    if keep.num_to_keep is None or not names:
        return set(names)
    ranked = sorted(names, key=lambda name: _score(keep, name.step, metrics.get(name, {})))
    kept = {*ranked[-keep.num_to_keep :], names[-1]}
    if keep.keep_every is not None:
        kept |= {name for name in names if name.step % keep.keep_every == 0}
    return kept


def _score(keep: Keep, step: int, metrics: Mapping[str, float]) -> tuple[bool, float, int]:
    """Returns a sort key, best last. Checkpoints without the metric, or with NaN, come first."""
    value = metrics.get(keep.score_attribute or "")
    if value is None or value != value:
        return False, 0.0, step
    return True, value if keep.order == "max" else -value, step
