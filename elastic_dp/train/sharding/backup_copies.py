"""Copies of pieces for the members that are to be their backups, made while training goes on.

Behind a loss, pieces of which one holder is left have it as their primary, as far as all members
have equal parts so, and train on. Their backups get the state in the first steps of the generation:
some in each step. Members tell each other the sizes when the step begins, and send the state before
the backward pass that sends the gradients: it is on its way while they compute. They wait for it
behind that. The backups have the gradient of that step like all holders, so they take part in its
commit. Until then a piece has one holder, and is lost with it.

All other copies are made before the first step, as where a joiner is given its part: nobody may let
go of a piece before another member has it. All are, where a member is to leave soon. A generation
may end before they are made; then the coordinator lets no member go (`WorkerStopped.lacks_copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from elastic_dp.distributed.piece_assignment import Holders, Move
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.train.sharding.piece_exchange import PieceRound, rounds_of
from elastic_dp.train.sharding.piece_updates import State

# Of parameters: what a member sends in one step to another one, at least; and which part of their
# bytes it sends to all others together, if that is more.
STEP_BYTES = 1 << 20
STEP_PART = 64


def holders_now(group: ProcessGroup, held: Iterable[int], pieces: int) -> list[list[int]]:
    """Returns the ranks that hold each piece, the same on all members. `held`: by this one."""
    mine = bytearray(pieces)
    for piece in held:
        mine[piece] = 1
    ranks: list[list[int]] = [[] for _ in mine]
    for rank, flags in enumerate(group.gather_equal(bytes(mine))):
        for piece, flag in enumerate(flags):
            if flag:
                ranks[piece].append(rank)
    return ranks


class BackupCopies:
    """The copies of one generation."""

    def __init__(
        self,
        group: ProcessGroup,
        moves: Sequence[Move],
        holders: Sequence[Holders],
        held: Sequence[Sequence[int]],
        sizes: Sequence[int],
        *,
        at_once: bool,
    ) -> None:
        """`moves` lead from who holds each piece now, `held`, to `holders`. `at_once`: all copies
        are made before the first step."""
        self._group = group
        pairs = enumerate(zip(holders, held, strict=True))
        alone = {n for n, (one, ranks) in pairs if list(ranks) == [one.primary]}
        later = set[int]() if at_once else alone
        # What `exchange` is to do before the first step.
        self.before = rounds_of([move for move in moves if move.piece not in later], sizes)
        limit = max(STEP_BYTES, sum(sizes) // (STEP_PART * group.world_size))
        self._rounds = rounds_of([move for move in moves if move.piece in later], sizes, limit)
        self._round: PieceRound | None = None  # of this step
        self.received_bytes = 0  # in steps

    @property
    def are_made(self) -> bool:
        """Whether none is missing, or on its way."""
        return not self._rounds and self._round is None

    def begin(self, states: Mapping[int, State]) -> None:
        """Begins with the copies of the next step, if there are any, and waits for nobody. Raises
        GroupError."""
        if self._rounds:
            self._round = PieceRound(self._group, self._rounds.pop(0), states)

    def send(self) -> None:
        """Sends these copies, once. Waits for members that have not begun with the step. Raises
        GroupError."""
        if self._round is not None:
            self._round.send()

    def take(self, device: torch.device) -> dict[int, State]:
        """Waits for what is on its way, and returns the state of the pieces that arrive, as of the
        last commit. `device`: of the parameters. Raises GroupError."""
        if self._round is None:
            return {}
        arrived = dict(self._round.arrive(device))
        self.received_bytes += self._round.nbytes
        self._round = None
        return arrived
