"""Which checkpoints a run has: its commit records by name, in the order of its history, and what
may be deleted.

    <run>/checkpoints/seals/claim-00000007.from-00000003-000000000900.json  claim 7 went on from
                                                                            step 900 of claim 3
    <run>/checkpoints/seals/step-000000001000.claim-00000007.json           the commit record
    <run>/checkpoints/step-000000001000/<digest>/part-00000.safetensors

- Only what is committed is listed; one listing tells it all, and a commit record is read when it is
  asked for.
- History is a chain of claims. A claim is created once, by who holds the run's lease (lease.py),
  before it trains; the lease's number is its fence. What another claim committed beyond the step
  from which the next one went on is not part of history: that is a controller which was frozen, and
  did not know yet.
- Parts lie below the digest of the whole state, so parts of two states never meet, and the same
  state written twice, by whomever, is the same objects with the same bytes.
- Deleting begins with the commit record. So a crash between any two deletions leaves no checkpoint
  that is half there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.errors import CheckpointDamaged, CheckpointError, LeaseLost
from elastic_dp.storage import ObjectMissing, Store

_COMMIT = re.compile(r"step-(\d{12})\.claim-(\d{8})\.json")
_CLAIM = re.compile(r"claim-(\d{8})\.from-(\d{8})-(\d{12})\.json")
_PART = re.compile(r"step-(\d{12})/([0-9a-f]{32})/")


class CommitName(NamedTuple):
    step: int
    fence: int

    def __str__(self) -> str:
        return f"step-{self.step:012}.claim-{self.fence:08}.json"


class Claim(NamedTuple):
    """Who holds `fence` went on from `step` of the claim `base`; both 0 at the run's start."""

    fence: int
    base: int
    step: int

    def __str__(self) -> str:
        return f"claim-{self.fence:08}.from-{self.base:08}-{self.step:012}.json"


@dataclass(frozen=True)
class Keep:
    """What is kept: the newest `num_to_keep` (None: all), or the best ones where `score_attribute`
    names a metric; the newest in any case; and, for ever, each whose step `keep_every` divides.

    A checkpoint is ranked by the value that its own step logged. One without a value, or with NaN,
    is never the best; it ranks behind all that have one.
    """

    num_to_keep: int | None = 3
    keep_every: int | None = None
    score_attribute: str | None = None
    order: Literal["max", "min"] = "max"


class Catalog:
    """The checkpoints of the run at a store's URL. Reads nothing until it is asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folder = f"{store.path.rstrip('/')}/checkpoints".lstrip("/" if not store.path else "")

    def path(self, name: CommitName | Claim) -> str:
        return f"{self.folder}/seals/{name}"

    def highest_fence(self) -> int:
        """Of all claims and commits; 0 before the first."""
        names, claims = self._listed()
        return max([*(name.fence for name in names), *(claim.fence for claim in claims)], default=0)

    def names(self) -> list[CommitName]:
        """Of the committed checkpoints of this history, oldest first."""
        return history(*self._listed())

    def read(self, name: CommitName) -> CommitRecord:
        """Raises CheckpointDamaged, or CheckpointError if it is of a later format."""
        try:
            content = self.store.read_all(self.path(name))
        except ObjectMissing:
            raise CheckpointError(f"the checkpoint of step {name.step} has been deleted") from None
        try:
            commit = CommitRecord.from_bytes(bytes(content), name.step)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path(name)}: {error}") from None
        if commit.fence != name.fence:
            raise CheckpointDamaged(name.step, f"its commit record is that of claim {commit.fence}")
        return commit

    def commits(self, damaged: list[CheckpointDamaged] | None = None) -> Iterator[CommitRecord]:
        """Newest first. Damaged ones are left out, and put into `damaged`."""
        for name in reversed(self.names()):
            try:
                yield self.read(name)
            except CheckpointDamaged as error:
                if damaged is not None:
                    damaged.append(error)

    def find(
        self, step: int | Literal["latest", "best"] = "latest", keep: Keep | None = None
    ) -> CommitRecord:
        """The commit record of that step, the newest, or the best by `keep`. Raises CheckpointError
        if there is none."""
        if step == "best":
            return self.best(keep or Keep())
        names = self.names()
        wanted = [name for name in names if step in ("latest", name.step)]
        if wanted:
            return self.read(wanted[-1])
        steps = ", ".join(str(name.step) for name in names) or "none at all"
        what = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        raise CheckpointError(f"{self.store.url} has no committed {what}; it has: {steps}")

    def best(self, keep: Keep) -> CommitRecord:
        """By the metric that `keep` names. Raises CheckpointError if no checkpoint has it."""
        name = keep.score_attribute
        if name is None:
            raise CheckpointError(
                'step="best" needs a metric: set '
                "CheckpointConfig.checkpoint_score_attribute, or name it here"
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

    def claim(self, fence: int, base: CommitName | None) -> Claim:
        """Begin to write under `fence`, going on from `base` (None: from the start). Raises
        LeaseLost if others do."""
        assert base is None or base.fence < fence, (base, fence)
        claim = Claim(fence, *((base.fence, base.step) if base else (0, 0)))
        with contextlib.suppress(FileExistsError):  # ours, from before: a fence is held by one
            content = json.dumps(claim._asdict()).encode()
            self.store.write(self.path(claim), content, create_only=True)
        _, claims = self._listed()
        others = [other for other in claims if other.fence >= fence and other != claim]
        if others:
            raise LeaseLost(f"claim {max(others).fence} of {self.store.url} was made meanwhile")
        return claim

    def retain(self, keep: Keep, fence: int, *, writing: Iterable[int] = ()) -> list[int]:
        """Delete what is not kept, and what was never committed, except of the steps in `writing`.
        Returns the steps whose commit records went. Raises LeaseLost if `fence` is no longer the
        newest claim, and deletes nothing."""
        metrics: dict[CommitName, Mapping[str, float]] = {}
        names, claims = self._listed()
        fences = [name.fence for name in names] + [claim.fence for claim in claims]
        if max(fences, default=0) > fence:
            raise LeaseLost(f"{self.store.url} was claimed by others after claim {fence}")
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
        """Delete the parts that no kept commit record names, and what a killed writer left beside
        them; but nothing of later steps than the newest commit's, which may be being written."""
        newest = max((name.step for name in kept), default=0)
        folders = {name.step: self._digests(kept, name.step) for name in kept}
        for entry in self.store.find(f"{self.folder}/"):
            inner = entry.path[len(self.folder) + 1 :]
            found = _PART.match(inner)
            if found is None:
                if inner.endswith(".tmp"):
                    self.store.delete(entry.path)
                continue
            step, digest = int(found[1]), found[2]
            if step in busy or step > newest:
                continue
            named = folders.get(step, set())
            if (named is not None and digest not in named) or inner.endswith(".tmp"):
                self.store.delete(entry.path)

    def _digests(self, kept: Iterable[CommitName], step: int) -> set[str] | None:
        """The folders of a step that commits name. None if one cannot be read: then all may be
        needed."""
        try:
            return {self.read(name).digest[:32] for name in kept if name.step == step}
        except (CheckpointDamaged, CheckpointError):
            return None

    def _listed(self) -> tuple[list[CommitName], list[Claim]]:
        names, claims = [], []
        for entry in self.store.find(f"{self.folder}/seals/"):
            inner = entry.path.rpartition("/")[2]
            if found := _COMMIT.fullmatch(inner):
                names.append(CommitName(*map(int, found.groups())))
            elif found := _CLAIM.fullmatch(inner):
                claims.append(Claim(*map(int, found.groups())))
        return sorted(names), sorted(claims)


def part_path(folder: str, step: int, digest: str, number: int) -> str:
    return f"{folder}/step-{step:012}/{digest[:32]}/part-{number:05}.safetensors"


def history(names: Iterable[CommitName], claims: Iterable[Claim]) -> list[CommitName]:
    """The commit records that count, oldest first: of the newest claim all, of the one it went on
    from those up to there, and so on back to the start."""
    committed, by_fence = set(names), {claim.fence: claim for claim in claims}
    fence = max([*by_fence, *(name.fence for name in committed)], default=0)
    found: list[CommitName] = []
    limit: int | None = None
    while fence:
        claim = by_fence.get(fence, Claim(fence, 0, 0))
        mine = [name for name in committed if name.fence == fence]
        found += [name for name in mine if limit is None or name.step <= limit]
        limit = claim.step if limit is None else min(limit, claim.step)
        fence = claim.base if claim.base < fence else 0
    return sorted(found)


def to_keep(
    names: list[CommitName], keep: Keep, metrics: Mapping[CommitName, Mapping[str, float]]
) -> set[CommitName]:
    if keep.num_to_keep is None or not names:
        return set(names)
    ranked = sorted(names, key=lambda name: _score(keep, name.step, metrics.get(name, {})))
    kept = {*ranked[-keep.num_to_keep :], names[-1]}
    if keep.keep_every is not None:
        kept |= {name for name in names if name.step % keep.keep_every == 0}
    return kept


def _score(keep: Keep, step: int, metrics: Mapping[str, float]) -> tuple[bool, float, int]:
    """To sort by, best last; one without the metric, or with NaN, is behind all others."""
    value = metrics.get(keep.score_attribute or "")
    if value is None or value != value:
        return False, 0.0, step
    return True, value if keep.order == "max" else -value, step
