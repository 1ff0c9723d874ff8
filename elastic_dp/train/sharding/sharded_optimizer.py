"""An optimizer whose state is divided among the members of a generation, each piece on two of them.

A step updates out of place before its commit, and the commit swaps:

    held        the state of the pieces that this member holds, as of the last commit
    prepared    the same after the step that is being attempted, until it is committed

Who has committed a step has the updated parameters of all members, and so knows that all members
have prepared it (`parameter_gather.py`). Therefore a member that was aborted before its commit
keeps what it has prepared until it knows whether some other member has committed: if so, its
prepared state is the right one (`roll_forward`); if not, the step is done again.

With one member or two, all hold everything. Then a step updates in place after its commit, as it
does without sharding, and no parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from elastic_dp.distributed.piece_assignment import Holders, assign_pieces, moves_to
from elastic_dp.distributed.piece_routes import HeldRange, HeldRanges
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import PiecesLost
from elastic_dp.train.exactness.elementwise_updates import parameters_to_keep_whole
from elastic_dp.train.sharding.parameter_gather import ParameterGather
from elastic_dp.train.sharding.piece_exchange import exchange
from elastic_dp.train.sharding.piece_norm import PieceNorm, clip
from elastic_dp.train.sharding.piece_updates import PieceUpdates, State
from elastic_dp.train.sharding.pieces import StatePiece, pieces_of

_ALL_HOLD = 2  # up to so many members, each holds everything


class ShardedOptimizer:
    """The state of the user's optimizer, whose own `state` stays empty."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters.values())
        whole = parameters_to_keep_whole(optimizer, self._parameters)
        self.pieces: list[StatePiece] = pieces_of(self._parameters, whole)
        self._updates = PieceUpdates(optimizer, self._parameters, self.pieces)
        self.sizes = [
            piece.numel * self._parameters[piece.parameter].element_size()
            if self._updates.has(number)
            else 0  # it has no state
            for number, piece in enumerate(self.pieces)
        ]
        self.held: dict[int, State] = {}
        self._prepared: tuple[int, dict[int, State]] | None = None  # with the number of the step
        self._whole: dict[int, State] | None = None  # of all pieces, where they were gathered
        self._group: ProcessGroup | None = None
        self._holders: list[Holders] = []
        self._gathers: dict[frozenset[int], ParameterGather] = {}  # by the updated pieces
        self._gather: ParameterGather | None = None  # of this step
        self.absorb()

    # ------------------------------------------------------------------------- a generation

    def open(
        self, group: ProcessGroup, topology: Sequence[Sequence[int]], *, gather_whole: bool
    ) -> int:
        """Gives each member the pieces that it is to hold in this generation. All members are at
        the same step. Returns the number of bytes received.

        With `gather_whole`, every member gets the state of all pieces, for a checkpoint. Raises
        PiecesLost if nobody holds some piece, and GroupError.
        """
        self.close()
        self._prepared = None
        world_size, rank = group.world_size, group.rank
        held = self._holders_now(group)
        lost = sum(not ranks for ranks in held)
        if lost:
            raise PiecesLost(
                f"{lost} of the {len(self.pieces)} pieces of the optimizer's state were on lost "
                "workers alone"
            )
        holders = assign_pieces(self.sizes, world_size, topology, held)
        everyone = range(world_size)
        targets = [everyone if gather_whole else one.ranks for one in holders]
        moves = moves_to(targets, held, self.sizes)
        received, nbytes = exchange(group, moves, self.sizes, self.held)
        self.held |= received
        if moves:
            group.gather_bytes(b"")  # all have what they need: from now on others may let it go
        self._whole = dict(self.held) if gather_whole else None
        self.held = {n: state for n, state in self.held.items() if rank in holders[n].ranks}
        self._group, self._holders = group, holders
        self._norm = PieceNorm(group, self._parameters, self.pieces, holders)
        return nbytes

    def close(self) -> None:
        """Leaves the generation. What is prepared is kept; see `roll_forward`."""
        self._group, self._gather = None, None
        self._gathers.clear()  # an abandoned operation may still write to their memory

    def _holders_now(self, group: ProcessGroup) -> list[list[int]]:
        """Returns the ranks that hold each piece, the same on all members."""
        mine = bytearray(len(self.pieces))
        for piece in self.held:
            mine[piece] = 1
        told = group.gather_bytes(bytes(mine))
        return [
            [rank for rank, flags in enumerate(told) if flags[piece]]
            for piece in range(len(self.pieces))
        ]

    # ------------------------------------------------------------------------------- a step

    @property
    def all_hold_all(self) -> bool:
        """Whether each member of the generation holds everything."""
        return self._group is None or self._group.world_size <= _ALL_HOLD

    def begin(self) -> None:
        """Begins an attempt at a step: what another attempt prepared does not count any more."""
        self._prepared = self._gather = self._whole = None

    def needed(self) -> HeldRanges | None:
        """Returns which ranks need the gradient of which elements; None: all need all."""
        if self.all_hold_all:
            return None
        ranges: dict[torch.Tensor, list[HeldRange]] = {}
        for number, (piece, one) in enumerate(zip(self.pieces, self._holders, strict=True)):
            of_parameter = ranges.setdefault(self._parameters[piece.parameter], [])
            of_parameter.append(HeldRange(number, piece.first, piece.last, one.ranks))
        return ranges

    @torch.no_grad()
    def prepare(
        self,
        step: int,
        held: Mapping[int, torch.Tensor],
        used: AbstractSet[torch.Tensor],
        clip_norm: float | None,
        memory: Mapping[torch.dtype, torch.Tensor],
    ) -> torch.Tensor | None:
        """Updates what this member holds, out of place. Returns the norm of the gradient, or None
        if not all of it is finite; then nothing is prepared. Raises GroupError.

        `held` has the gradients of the pieces that this member holds, of shape (numel,). Those of
        parameters that are not in `used` do not count. `memory`: see `ParameterGather`; the same
        in all steps of a generation.
        """
        assert self._group is not None
        gradients = {
            n: flat
            for n, flat in held.items()
            if self._parameters[self.pieces[n].parameter] in used
        }
        norm = self._norm.norm(gradients, wide=any(p.dtype == torch.float64 for p in used))
        if not self._norm.all_finite(norm, gradients):
            return None
        if clip_norm is not None:
            clip(gradients.values(), clip_norm, norm)
        updated = frozenset(
            number
            for number, piece in enumerate(self.pieces)
            if self._updates.has(number) and self._parameters[piece.parameter] in used
        )
        gather = self._gathers.get(updated)
        if gather is None:
            gather = ParameterGather(
                self._group, self._parameters, self.pieces, self._holders, updated, memory
            )
            self._gathers = {updated: gather}
        gather.load()
        states = {n: _copy(self.held[n]) for n in gather.targets}
        shaped = {
            n: self.pieces[n].within(gradients[n], self._parameters[self.pieces[n].parameter])
            for n in gather.targets
        }
        self._updates.run(gather.targets, shaped, states)
        self._prepared, self._gather = (step, states), gather
        return norm

    def gather(self) -> None:
        """Sends the updated parameters to all members and waits for theirs. Raises GroupError."""
        assert self._gather is not None
        self._gather.launch()
        self._gather.wait()

    def gather_whole(self) -> None:
        """Gives all members the state of all pieces, as it is after the commit that follows.
        Raises GroupError."""
        if self.all_hold_all:
            return
        assert self._group is not None
        present = self.held | (self._prepared[1] if self._prepared is not None else {})
        everyone = range(self._group.world_size)
        held = [one.ranks for one in self._holders]
        moves = moves_to([everyone] * len(held), held, self.sizes)
        received, _ = exchange(self._group, moves, self.sizes, present)
        self._whole = present | received

    def step_ends(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates all parameters, after the commit. `gradients`: see `step_in_place`."""
        if self.all_hold_all:
            self.step_in_place(gradients)
        else:
            self.commit()

    def commit(self) -> None:
        """Makes the prepared state and the gathered parameters those of the step."""
        assert self._prepared is not None and self._gather is not None
        self._gather.install()
        self.held |= self._prepared[1]
        self._prepared = self._gather = None

    @torch.no_grad()
    def step_in_place(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates all parameters where each member holds everything. `gradients` has one for each
        parameter."""
        tensors = {
            number: piece.of(self._parameters[piece.parameter].detach())
            for number, piece in enumerate(self.pieces)
            if self._updates.has(number) and gradients[piece.parameter] is not None
        }
        shaped = {}
        for number in tensors:
            gradient = gradients[self.pieces[number].parameter]
            assert gradient is not None
            shaped[number] = self.pieces[number].of(gradient)
        self._updates.run(tensors, shaped, self.held)

    # -------------------------------------------------------------------- state transfers

    def roll_forward(self, step: int) -> None:
        """Goes to `step`, which another member has committed and this one has not: by what it has
        prepared. Without that it holds nothing, and others have it."""
        prepared, self._prepared, self._whole = self._prepared, None, None
        if prepared is not None and prepared[0] == step:
            self.held |= prepared[1]
        else:
            self.held = {}

    def forget(self) -> None:
        """Holds nothing from now on: this worker joins a run, and `open` gives it its pieces."""
        self._optimizer.state.clear()
        self.held, self._prepared, self._whole = {}, None, None

    @torch.no_grad()
    def absorb(self) -> None:
        """Takes over the whole state from the user's optimizer, and holds all pieces."""
        self.forget_prepared()
        self.held = {}
        for number, piece in enumerate(self.pieces):
            p = self._parameters[piece.parameter]
            given = self._optimizer.state.get(p, {})
            self.held[number] = {key: _part(piece, p, value) for key, value in given.items()}
        self._optimizer.state.clear()

    def forget_prepared(self) -> None:
        self._prepared = self._whole = None

    @property
    def has_whole(self) -> bool:
        """Whether this member has the state of all pieces as of the last commit."""
        return self._whole is not None or len(self.held) == len(self.pieces)

    @torch.no_grad()
    def whole(self) -> dict[torch.Tensor, State]:
        """Returns the state by parameter, as an optimizer that is not sharded has it."""
        assert self.has_whole
        states = self.held if self._whole is None else self._whole
        whole: dict[torch.Tensor, State] = {}
        for number, piece in enumerate(self.pieces):
            p = self._parameters[piece.parameter]
            mine = states[number]
            if piece.whole:
                whole[p] = mine
                continue
            of_parameter = whole.setdefault(p, {})
            for key, value in mine.items():
                if not _is_divided(value):
                    of_parameter[key] = value
                    continue
                if key not in of_parameter:
                    of_parameter[key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                piece.of(of_parameter[key]).copy_(value)
        return {p: state for p, state in whole.items() if state}

    @property
    def held_bytes(self) -> int:
        """The size of the state that this member holds."""
        return sum(
            value.numel() * value.element_size()
            for state in self.held.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def _is_divided(value: Any) -> bool:
    """Returns whether a value of a piece's state has an element for each of its own."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _copy(state: State) -> State:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _part(piece: StatePiece, parameter: torch.Tensor, value: Any) -> Any:
    """Returns what belongs to a piece of a value of its parameter's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if piece.whole or value.dim() == 0:
        return value.clone()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return piece.of(value).clone()
