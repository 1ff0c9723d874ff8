"""The record that each member sends to all others in a step: its results, flags and requests.

    1 byte      whether a hook fired twice
    n bytes     per parameter: whether it got a gradient
    m bytes     per buffer and extra state: whether it was changed
    msgpack     the rest

n and m are equal on all members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from elastic_dp.train.step.micro_batch import MicroBatchResult


@dataclass(frozen=True, slots=True)
class MemberHeader:
    """The record that one member sends."""

    late: bool
    used: bytes
    changed: bytes
    results: Mapping[int, MicroBatchResult]  # by virtual worker
    stop: str | None
    keep: bool
    keeps_late: bool
    bad: Iterable[int]
    weights: str | None
    groups: str | None = None  # the digest of the fields of the optimizer's parameter groups
    connected: bool | None = None  # whether its device is connected; None: nobody waits for that
    why_not: str | None = None  # why it could not be connected, once that has failed

    def to_bytes(self) -> bytes:
        rest: dict[str, Any] = {
            "v": [(v, x.loss, x.weight, x.metrics) for v, x in self.results.items()],
            "stop": self.stop,
            "keep": self.keep,
            "keeps_late": self.keeps_late,
            "bad": sorted(self.bad),
        }
        if self.weights is not None:
            rest["weights"] = self.weights
        if self.groups is not None:
            rest["groups"] = self.groups
        if self.connected is not None:
            rest["connected"] = self.connected
        if self.why_not is not None:
            rest["why_not"] = self.why_not
        flags = bytes([self.late]) + self.used + self.changed
        return flags + msgpack.packb(rest, unicode_errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The combined content of the records of all ranks."""

    stop: str | None
    late: bool  # a hook fired twice somewhere
    used: bytes  # per parameter of the layout, whether any virtual worker gave it a gradient
    changed: list[int]  # indices of buffers that any virtual worker changed
    keep: bool  # a member requests a checkpoint of this step
    keeps_late: bool  # a member is still writing its last checkpoint, so none is taken yet
    bad: frozenset[int]  # row groups that some member could not decode, and no step before recorded
    results: dict[int, MicroBatchResult]  # by virtual worker
    weights: list[str | None]  # by rank: the digest of its weights, where they are compared
    groups: set[str | None]  # digests of the parameter groups
    connected: bool  # the devices of all members are connected, and not used yet
    why_not: str | None  # why that of some member could not be connected

    @classmethod
    def of(cls, records: Sequence[bytes], used: int, changed: int) -> StepHeader:
        """Combines the records. `used` and `changed` are the numbers of flags for parameters and
        buffers."""
        size = 1 + used + changed
        either = _or([record[:size] for record in records])
        texts = [
            msgpack.unpackb(record[size:], unicode_errors="surrogatepass") for record in records
        ]
        return cls(
            stop=next((text["stop"] for text in texts if text["stop"]), None),
            late=bool(either[0]),
            used=either[1 : 1 + used],
            changed=[i for i, flag in enumerate(either[1 + used :]) if flag],
            keep=any(text["keep"] for text in texts),
            keeps_late=any(text["keeps_late"] for text in texts),
            bad=frozenset(group for text in texts for group in text["bad"]),
            results={
                v: MicroBatchResult(loss, weight, m)
                for text in texts
                for v, loss, weight, m in text["v"]
            },
            weights=[text.get("weights") for text in texts],
            groups={text.get("groups") for text in texts},
            connected=all(text.get("connected") for text in texts),
            why_not=next((text["why_not"] for text in texts if "why_not" in text), None),
        )


@dataclass(frozen=True, slots=True)
class StopAgreed:
    """A member requested the end in this step's header: no member commits the step."""

    reason: str


@dataclass(frozen=True, slots=True)
class RetryStep:
    """A parameter fired twice in one backward: no member commits, all repeat the step
    sequentially."""


def _or(rows: Sequence[bytes]) -> bytes:
    """Combines rows of one length byte by byte."""
    either = 0
    for row in rows:
        either |= int.from_bytes(row, "little")
    return either.to_bytes(len(rows[0]), "little")
