"""What the members of a group agree on in a step before its commit, and do at it.

A step has a list of participants, the same on all members and in the same order. Each of them has
an entry of its own in the step's header, which every member sends to all others:

    begin     the step begins
    propose   this member's entry, once its micro-batches have run
    agree     the entries of all: go on, stop, or do the step again
    prepare   what needs a further exchange; the last call that may raise
    commit    the step is committed; the last participant first
    update    the gradient is there: before the optimizer's step
    ended     the optimizer has made its step, if there was a gradient for it
    undo      the step is not committed, and nothing of it may be left

`agree` must depend on the entries alone: all members have the same ones, so all decide alike.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import msgpack
import torch
import xxhash

from elastic_dp.coordinator.messages import ReplicaMismatch, WorkerId
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import GroupError, LoopError
from elastic_dp.train.gang import Gang
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.state.tensor_digests import digest_of
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.micro_batch import MicroBatchResult, not_finite_loss, take_read


@dataclass(frozen=True, slots=True)
class StopAgreed:
    """A member requested the end of the run: no member commits the step."""

    reason: str


@dataclass(frozen=True, slots=True)
class RetryStep:
    """No member commits the step. All of them do it again in the same generation."""


Verdict = StopAgreed | RetryStep | None  # None: the step goes on
LeafGradients = Mapping[torch.Tensor, torch.Tensor | None]


class StepParticipant:
    """One thing that members agree on in a step. Methods that are not overridden do nothing."""

    name: str  # of its entry in the header; no two participants of a step share one
    hears_all = False  # also the entries of workers that join gradually, and do not count yet

    def open(self, group: ProcessGroup) -> None:
        """A generation begins, with this group."""

    def begin(self, step: int) -> None:
        """Begins a step. It may have been attempted before."""

    def observes_leaves(self, step: int) -> bool:
        """Returns whether `leaf_ended` is to be called in this step. Then gradients are sent only
        after the last backward pass."""
        return False

    def leaf_ended(self, result: MicroBatchResult, gradients: LeafGradients) -> None:
        """A virtual worker of this member has these gradients, by parameter, which belong to the
        step. The result keeps what is found, also where the step is done again."""

    def unread(self) -> list[torch.Tensor]:
        """Returns tensors on a device whose values this member needs for its entry. The host waits
        once for those of all participants. Called only where training is on a device."""
        return []

    def take(self, read: Sequence[torch.Tensor]) -> None:
        """Takes what `unread` returned, on the host."""

    def propose(self) -> bytes:
        """Returns this member's entry. Empty entries are not sent."""
        return b""

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        """Takes the entries of all members, in rank order, of each process where a worker has
        several. Depends on nothing else. Raises GroupError if the generation has to end."""
        return None

    def prepare(self) -> None:
        """Does what is needed before the commit. May exchange with other members, and may raise
        GroupError or an error of the user's code."""

    def commit(self) -> None:
        """The step is committed. Cannot fail."""

    def update(self) -> None:
        """The optimizer is about to make its step."""

    def ended(self) -> None:
        """The optimizer has made its step. Not all steps have a gradient for it."""

    def metrics(self) -> Mapping[str, float]:
        """Returns metrics of the committed step, the same on all members."""
        return {}

    def stopped(self) -> None:
        """All members end the run: does what others need before it. Raises GroupError."""

    def undo(self) -> None:
        """Discards the step. May be called more than once."""


def propose_all(participants: Iterable[StepParticipant], gang: Gang | None = None) -> bytes:
    """Returns this member's record: the entries of each process of its worker."""
    proposed = ((one.name, one.propose()) for one in participants)
    own = msgpack.packb({name: entry for name, entry in proposed if entry})
    return msgpack.packb([own] if gang is None else gang.control.exchange(own))


def agree_all(
    participants: Iterable[StepParticipant],
    records: Sequence[bytes],
    joining: Collection[int] = (),
) -> Verdict:
    """Hands the members' records to the participants, and returns what they decide: to stop, if any
    of them says so, else to do the step again, if any says so, else to go on. Those of the ranks
    `joining` do not count."""
    every = [[msgpack.unpackb(own) for own in msgpack.unpackb(record)] for record in records]
    count = [own for rank, some in enumerate(every) if rank not in joining for own in some]
    all_of_them = [own for some in every for own in some]
    verdicts = [
        one.agree([own.get(one.name, b"") for own in (all_of_them if one.hears_all else count)])
        for one in participants
    ]
    stops = [verdict for verdict in verdicts if isinstance(verdict, StopAgreed)]
    retries = [verdict for verdict in verdicts if isinstance(verdict, RetryStep)]
    return (stops or retries or [None])[0]


class Results(StepParticipant):
    """What the micro-batches of this member have given: loss, weight and metrics of each virtual
    worker, row groups that could not be decoded, and operations without a deterministic kernel. No
    later step reads those row groups."""

    name = "results"

    def __init__(
        self,
        state: TrainState,
        data: RowSource,
        inexact_because: Sequence[str] = (),
        gang: Gang | None = None,
    ) -> None:
        self._state, self._data, self._gang = state, data, gang
        self._because, self._new_because = inexact_because, list[str]()
        self._step = 0
        self.own: Mapping[int, MicroBatchResult] = {}  # of this member's virtual workers
        self.of_all: dict[int, MicroBatchResult] = {}  # from `prepare` on, those that count
        self._bad: frozenset[int] = frozenset()  # row groups that some member has found

    def begin(self, step: int) -> None:
        self._step = step
        self.undo()

    def unread(self) -> list[torch.Tensor]:
        return [value for result in self.own.values() for value in result.unread.values()]

    def take(self, read: Sequence[torch.Tensor]) -> None:
        take_read(self.own, read)

    def propose(self) -> bytes:
        number = self._gang.micro_batch if self._gang is not None else int
        rows = [(number(v), x.loss, x.weight, x.metrics) for v, x in self.own.items()]
        found = [self._data.bad_row_groups(self._step, v) for v in self.own]
        new = sorted(frozenset[int]().union(*found) - self._state.bad_row_groups)
        because = [one for one in self._because if one not in self._state.inexact_because]
        return msgpack.packb([rows, new, because], unicode_errors="surrogatepass")

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        told = [msgpack.unpackb(p, unicode_errors="surrogatepass") for p in proposals if p]
        # Processes of one worker may give the same micro-batch. That of the first one counts.
        self.of_all = {
            v: MicroBatchResult(loss, weight, metrics)
            for rows, *_ in reversed(told)
            for v, loss, weight, metrics in rows
        }
        self._bad = frozenset(n for _, new, _ in told for n in new)
        self._new_because = list(dict.fromkeys(one for *_, because in told for one in because))
        return None

    def prepare(self) -> None:
        """Keeps those with a weight, in the order of virtual workers. Raises LossError, and
        DataError if too much cannot be decoded."""
        of_all, step, describe = sorted(self.of_all.items()), self._step, self._data.describe
        for v, one in of_all:
            if one.weight and not math.isfinite(one.loss) and self._state.loss_scale is None:
                raise not_finite_loss(one.loss, step, f"virtual worker {v}", describe(step, v))
        self.of_all = {v: one for v, one in of_all if one.weight}
        if self._bad:
            self._data.check_bad(self._state.bad_row_groups | self._bad)

    def commit(self) -> None:
        self._state.bad_row_groups |= self._bad
        self._data.mark_bad(self._bad)
        self._state.inexact_because += self._new_because

    def undo(self) -> None:
        self.own, self.of_all, self._bad, self._new_because = {}, {}, frozenset(), []


class Wishes(StepParticipant):
    """What is asked of the run by way of any member: to end, or a checkpoint of this step. That
    waits while a member writes its last one."""

    name = "wishes"

    def __init__(self, control: WorkerControl) -> None:
        self._control = control
        self.stop: str | None = None  # why this member asks to end, from `begin` on
        self._wants_checkpoint = self.late = False  # late: a member is still writing

    @property
    def checkpoint(self) -> bool:
        """Whether this step has a checkpoint by request."""
        return self._wants_checkpoint and not self.late

    def begin(self, step: int) -> None:
        self.stop = self._control.stop_reason

    def propose(self) -> bytes:
        flags = bytes([self._control.checkpoint_wanted, self._control.checkpoint_late])
        wishes = flags + (self.stop or "").encode("utf-8", "surrogatepass")
        return wishes if any(wishes) else b""

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        some = [p for p in proposals if p]
        self._wants_checkpoint = any(p[0] for p in some)
        self.late = any(p[1] for p in some)
        reason = next(filter(None, (p[2:] for p in some)), b"").decode("utf-8", "surrogatepass")
        return StopAgreed(reason) if reason else None

    def commit(self) -> None:
        if self.checkpoint:
            self._control.checkpoint_wanted = False

    def undo(self) -> None:
        self._wants_checkpoint = self.late = False


class WeightComparison(StepParticipant):
    """Compares the weights of all members after each step that is a multiple of `every`; None:
    never. Their digests travel in the header of the step after it.

    A faulty replica (a flipped bit, a bad kernel) affects all others through its gradients. The run
    therefore goes back to the last step after which all members agreed. That step's number travels
    with the state. Weights that go into a checkpoint are compared in the step after it.
    """

    name = "weights"

    def __init__(self, parameters: Mapping[str, torch.Tensor], every: int | None) -> None:
        self._parameters, self._every = parameters, every
        self._step = 0
        self.wanted = 0  # this step goes into a checkpoint
        self.members: tuple[WorkerId, ...] = ()  # of the generation
        self.agreed = 0  # after this step all members agreed, or read a checkpoint
        self.mismatch: ReplicaMismatch | None = None

    def compares_updates(self, step: int, *, keeps: bool) -> bool:
        """Returns whether those who update the same part of a sharded state compare what they make
        in this step. `keeps`: it goes into a checkpoint."""
        return self._every is not None and (keeps or step % self._every == 0)

    def compare_updates(self, step: int, ranks: Collection[int]) -> None:
        """`ranks` are those that update the same part of a sharded state, and differ in the weights
        after `step`. Raises GroupError if there are any: no member may continue from that step."""
        if ranks:
            self._differ(step, tuple(self.members[rank] for rank in sorted(ranks)))

    def begin(self, step: int) -> None:
        self._step = step

    def propose(self) -> bytes:
        """Returns the digest of the weights after the step before, if they are compared."""
        step, every = self._step - 1, self._every
        if every is None or step <= self.agreed or (step % every and step != self.wanted):
            return b""
        if len(self.members) == 1:
            self.agreed = step  # there is no other member
            return b""
        return digest_of(list(self._parameters.values())).encode()

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        if not any(proposals):
            return None
        processes, step = len(proposals) // len(self.members), self._step - 1
        rows = [proposals[i : i + processes] for i in range(0, len(proposals), processes)]
        digests = [b" ".join(filter(None, row)) for row in rows]
        said = {worker: one for worker, one in zip(self.members, digests, strict=True) if one}
        if len(set(said.values())) <= 1:
            self.agreed = step
            return None
        usual, times = Counter(said.values()).most_common(1)[0]
        majority = times > len(said) / 2
        self._differ(step, tuple(w for w, one in said.items() if one != usual or not majority))

    def _differ(self, step: int, odd: tuple[WorkerId, ...]) -> NoReturn:
        self.mismatch = ReplicaMismatch(self.agreed, odd)
        raise GroupError(f"the weights of members differ after step {step}: {', '.join(odd)}")


class DeviceConnections(StepParticipant):
    """Whether all devices are connected: then gradients use that from the next step on."""

    name = "devices"
    hears_all = True

    def open(self, group: ProcessGroup) -> None:
        assert group.on_device is not None
        self._on_device = group.on_device

    def begin(self, step: int) -> None:
        self._step = step

    def propose(self) -> bytes:
        if self._on_device.switched:
            return b""
        failure = self._on_device.connecting_failure() or ""
        return bytes([self._on_device.connected]) + failure.encode("utf-8", "surrogatepass")

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        failures = [p[1:].decode("utf-8", "surrogatepass") for p in proposals]
        connected = all(p and p[0] for p in proposals)
        why_not = next(filter(None, failures), None)
        self._on_device.agree(self._step, connected=connected, why_not=why_not)
        return None


class ParameterGroups(StepParticipant):
    """The fields of the optimizer's parameter groups, which the loop's body may set
    (`group["lr"] *= 0.1`). If it decides so by something that a worker that joined lacks, the next
    step would give the members different weights."""

    name = "parameter_groups"

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], describe: Callable[[], str]
    ) -> None:
        """`describe`: returns who this worker is, for messages."""
        self._optimizers, self._describe = optimizers, describe
        self._differ = False

    def open(self, group: ProcessGroup) -> None:
        self._group = group

    def begin(self, step: int) -> None:
        self._step, self._differ = step, False

    def propose(self) -> bytes:
        return xxhash.xxh3_64_digest(repr(fields_of(self._optimizers)).encode())

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        self._differ = len(set(proposals)) > 1
        return None

    def prepare(self) -> None:
        if self._differ:
            told = [self._describe(), fields_of(self._optimizers)]
            records = self._group.gather_bytes(json.dumps(told).encode())
            raise groups_differ(self._step, records)

    def undo(self) -> None:
        self._differ = False


Fields = list[list[list[Any]]]  # by group: name and value of each field


def fields_of(optimizers: Iterable[torch.optim.Optimizer]) -> Fields:
    """Returns the fields that are numbers, strings, None, or lists and tuples of them."""
    return [
        [
            [key, plain]
            for key, value in group.items()
            if key != "params" and (plain := _plain(value)) is not ...
        ]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def groups_differ(step: int, records: Sequence[bytes]) -> LoopError:
    """Returns the error for members whose records, of who they are and their fields, differ."""
    members, fields = zip(*map(json.loads, records), strict=True)
    other, number, key = next(
        (rank, number, key)
        for rank, groups in enumerate(fields)
        for number, pair in enumerate(zip(fields[0], groups, strict=True))
        for key in _differing(*pair)
    )
    values = [dict(fields[rank][number]).get(key) for rank in (0, other)]
    return LoopError(
        f"before step {step} optimizer.param_groups[{number}][{key!r}] is {values[0]!r} on "
        f"{members[0]}, and {values[1]!r} on {members[other]}. The "
        "body of the loop over ctx.steps sets it by something that a worker that joins begins "
        "anew, such as a counter: keep that in c = ctx.carry(count=0) before the loop, and pass "
        "objects, such as a scheduler, as state="
    )


def _differing(one: list[list[Any]], other: list[list[Any]]) -> list[str]:
    first, second = dict(one), dict(other)
    return [key for key in first | second if repr(first.get(key)) != repr(second.get(key))]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu" and value.numel() == 1
        return value.item() if on_host else ...
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        plain = [_plain(item) for item in value]
        return ... if ... in plain else plain
    return ...


def either_of(rows: Sequence[bytes]) -> bytes:
    """Combines rows of one length byte by byte."""
    either = 0
    for row in rows:
        either |= int.from_bytes(row, "little")
    return either.to_bytes(len(rows[0]), "little")
