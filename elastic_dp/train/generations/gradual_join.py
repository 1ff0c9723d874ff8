"""A worker that joins a run with a large state takes it over in parts, while the others train.

It is in the group from the start, and has no virtual workers yet. In each step it receives a part
of the state, while the others run their micro-batches: a larger part where those take longer. It
gets the reduced gradient as all members do, and makes the same update. So what has arrived stays
current, bit for bit: the optimizer computes each element from that element's gradient and state
alone. What has not arrived is overwritten later. Once all is there, the workers pause for the small
rest (buffers, parameter groups, what the loop body changes), and divide the virtual workers among
all.

Until then the worker runs no loop body, its entry in a header does not count, and it has no share
of a checkpoint. If the generation ends meanwhile, what has arrived is kept in the next one, unless
the others are at another step then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_dp.checkpoint.codec import from_bytes, to_bytes
from elastic_dp.checkpoint.layout import flat_bytes, is_dense
from elastic_dp.coordinator.messages import Membership
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import GroupError
from elastic_dp.train.exactness.torch_optimizers import ELEMENTWISE
from elastic_dp.train.master_weights import class_of
from elastic_dp.train.state.state_moves import (
    UNIT_BYTES,
    Move,
    StateUnit,
    ranks_with,
    write_parts,
)
from elastic_dp.train.step.participants import StepParticipant, Verdict

if TYPE_CHECKING:
    from elastic_dp.train.generations.state_transfer import TransferPlan
    from elastic_dp.train.state.train_state import TrainState
    from elastic_dp.train.step.leaf_runner import WorkShares

LARGE_BYTES = 16 << 20  # of parameters. Of fewer, a copy takes no time that is worth a question.
OF_A_ROUND = 8  # a round moves this part of the bytes of the parameters
LEAST_BYTES = 4 << 20
MOST_ROUNDS = 8  # of one step: what is in flight takes host memory as the parameters do
OF_A_STEP = 20  # to begin the rounds of a step takes at most this part of its micro-batches' time
_SMALL_NUMEL = 16  # of state that goes with each range, such as the number of steps


class GradualJoin(StepParticipant):
    """Moves the state to the ranks `shares.joining`. `allowed`: what the job says about it."""

    name = "joining"

    def __init__(self, state: TrainState, shares: WorkShares, *, allowed: bool) -> None:
        optimizer = state.optimizers
        self._state, self._shares = state, shares
        self._allowed = (
            allowed
            and not state.holders.is_divided
            and state.previous is None
            and len(optimizer.all) == 1
            and class_of(optimizer.outer) in ELEMENTWISE
            and sum(p.nbytes for p in state.parameters.values()) >= LARGE_BYTES
        )
        self._move: Move | None = None
        self._source, self._rounds = 0, 1
        self._begun = 0.0, 0.0  # from when to when this step's rounds were begun
        self._trainable: list[bool] = []  # when the move began
        self._is_unsteady = False  # that has changed during a join, on all that were not new
        self._arrived = set[int]()  # units, in generations that ended meanwhile
        self._kept_at: tuple[int, int] | None = None  # lineage and step of those
        self._given = b""  # what the source says about this step

    def ranks(self, membership: Membership, plan: TransferPlan) -> frozenset[int]:
        """Returns the ranks that are to join gradually in this generation: those without state, if
        they are no more than the others and nobody is to leave soon."""
        members, source = membership.members, membership.members[plan.source]
        new = frozenset(rank for rank in plan.receivers if not members[rank].has_state)
        possible = self._allowed and source.has_state and not source.position.ended
        possible = possible and not membership.copies_first
        return new if possible and 2 * len(new) <= len(members) else frozenset()

    @property
    def ranks_now(self) -> frozenset[int]:
        return self._shares.joining

    @property
    def joins_here(self) -> bool:
        """Whether this worker is one of those that join."""
        return self._shares.rank in self._shares.joining

    @property
    def is_done(self) -> bool:
        """Whether all parts have arrived. Equal on all members."""
        return self._move is not None and self._move.is_done

    def kept_of(self, lineage_id: int) -> int | None:
        """Returns the step whose state the parts are of that this worker has, if it has some."""
        kept = self._kept_at
        return kept[1] if kept is not None and kept[0] == lineage_id else None

    def start(self, group: ProcessGroup, source: int, *, possible: bool, keeps: bool) -> bool:
        """Begins to move the state, which has the same structure on all members now. `possible`:
        on this one. `keeps`: what has arrived before. Returns whether it is possible on all. Raises
        GroupError."""
        if not keeps:
            self.forget()
        units = self._units() if possible and not self._is_unsteady else None
        if b"\0" in group.gather_equal(bytes([units is not None])):
            return False
        assert units is not None
        joining, count = self._shares.joining, len(units)
        mine = self._arrived if group.rank in joining else range(count)
        have = ranks_with(group, mine, count)
        nbytes = sum(p.nbytes for p in self._state.parameters.values()) // OF_A_ROUND
        budget, need = max(LEAST_BYTES, nbytes), [[*joining]] * count
        self._move = Move(group, units, have, need, budget=budget)
        self._source, self._rounds, self._trainable = source, 1, self._flags()
        return True

    def forget(self) -> None:
        """What has arrived does not count any more: all of the state comes anew."""
        self._arrived, self._kept_at = set(), None

    def finish(self) -> None:
        """Moves what is left at once. Raises GroupError."""
        assert self._move is not None
        self._move.finish()

    def close(self, lineage_id: int, step: int) -> None:
        """The generation ends after this step, or all members have the whole state."""
        if self._move is not None:
            self._arrived |= self._move.arrived
            self._kept_at = lineage_id, step
        self._move, self._given = None, b""

    # ----------------------------------------------------------------------------- step

    def begin(self, step: int) -> None:
        if self._move is None:
            return
        if not self.joins_here and self._flags() != self._trainable:
            self._is_unsteady = True
            raise GroupError("requires_grad has changed while a worker joins: it joins at once")
        if not self._move.in_flight:
            began = time.monotonic()
            self._move.begin(self._rounds)
            self._begun = began, time.monotonic()

    def propose(self) -> bytes:
        if self._move is None:
            return b""
        pace = bytes([self._pace()])
        if self._shares.rank != self._source:
            return pace
        state = self._state
        scale = None if state.loss_scale is None else vars(state.loss_scale)
        return pace + to_bytes({"held": state.optimizers.now(), "loss_scale": scale})

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        """The next step moves twice as much as this one, as much, or half: what the slowest of the
        members says that run micro-batches."""
        told = [proposal for proposal in proposals if proposal]
        pace = min((proposal[0] for proposal in told), default=1)
        self._rounds = min(MOST_ROUNDS, max(1, self._rounds * 2**pace // 2))
        self._given = next(filter(None, (proposal[1:] for proposal in told)), b"")
        return None

    def prepare(self) -> None:
        if self._move is None:
            return
        self._move.take()
        if self.joins_here:
            given: Any = from_bytes(self._given)
            self._state.optimizers.adopt_held(given["held"])
            if self._state.loss_scale is not None:
                vars(self._state.loss_scale).update(given["loss_scale"])

    # ------------------------------------------------------------------------------ private

    def _pace(self) -> int:
        """Returns 2 if the next step may move twice as much as this one: all has arrived while the
        micro-batches ran, and took little of this thread's time. 1: as much; 0: half."""
        assert self._move is not None
        began, ended = self._begun
        took, left = OF_A_STEP * (ended - began), time.monotonic() - ended
        if not self._move.is_over or took > left:
            return 0
        return 2 if 2 * took <= left else 1

    def _flags(self) -> list[bool]:
        return [p.requires_grad for p in self._state.parameters.values()]

    def _units(self) -> list[StateUnit] | None:
        """Returns ranges of each parameter with the same ranges of its optimizer state, and all of
        its state that has another shape. None if there is state that cannot be divided so."""
        optimizer, units = self._state.optimizer, list[StateUnit]()
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        if any(key not in optimized for key in optimizer.state):
            return None
        for p in self._state.parameters.values():
            entries: Mapping[str, Any] = optimizer.state.get(p, {})
            if not all(isinstance(x, torch.Tensor) and is_dense(x) for x in (p, *entries.values())):
                return None
            alike = [key for key, x in entries.items() if (x.shape, x.stride()) == _form(p)]
            rest = [key for key in entries if key not in alike]
            if any(entries[key].numel() > _SMALL_NUMEL for key in rest):
                return None
            sizes = [p.element_size(), *(entries[key].element_size() for key in alike)]
            step = max(1, UNIT_BYTES // sum(sizes))
            small = sum(entries[key].nbytes for key in rest)
            for first in range(0, p.numel(), step):
                count = min(step, p.numel() - first)
                read = partial(self._read, p, alike, rest, first, count)
                units.append(StateUnit(count * sum(sizes) + small, read, partial(_write, read)))
        return units

    def _read(
        self, p: torch.Tensor, alike: Sequence[str], rest: Sequence[str], first: int, count: int
    ) -> list[torch.Tensor]:
        """Returns the bytes of `count` elements from `first` on."""
        entries: Mapping[str, torch.Tensor] = self._state.optimizer.state.get(p, {})
        whole = [p.detach(), *(entries[key] for key in alike)]
        parts = [
            flat_bytes(x)[first * x.element_size() : (first + count) * x.element_size()]
            for x in whole
        ]
        return parts + [flat_bytes(entries[key]) for key in rest]


def _form(p: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return p.shape, p.stride()


def _write(read: Callable[[], Sequence[torch.Tensor]], content: torch.Tensor) -> None:
    write_parts(read(), content)
