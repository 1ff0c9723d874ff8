"""An optimizer whose state is divided among the members of a generation, each piece on two of them.

Before its commit a step updates copies of what this member sends, a few pieces at a time. The
states of some of them are kept, as far as there is memory for them (`KEPT_BYTES`). All other pieces
are updated in place after the commit, also those whose parameters have been sent:

    held        the state of the pieces that this member holds, as of the last commit
    prepared    the gradients of these pieces in the step that is being attempted, until its commit

Who has committed a step has the updated parameters of all members, and so knows that all members
have prepared it (`parameter_gather.py`). Therefore a member that was aborted before its commit
keeps what it has prepared until it knows whether some other member has committed: if so, and in the
same generation, it updates by the gradients that it has prepared (`roll_forward`); if not, the step
is done again.

Behind a loss, pieces of which one holder is left have it as their primary, as far as all members
have equal parts so, and train on. Their backups get the state in the first steps of the generation:
some in each step. The state is sent before the members compute, and waited for behind that. The
backups have the gradient of that step like all holders, so they take part in its commit. Until then
a piece has one holder, and is lost with it. All other copies are made before the first step, as
where a joiner is given its part: nobody may let go of a piece before another member has it. All
are, where a member is to leave soon. A generation may end before they are made; then the
coordinator lets no member go (`WorkerStopped.lacks_copies`).

With one member or two, all hold everything. Then a step updates in place after its commit, as it
does without sharding, and no parameters are gathered.

On a device the host launches all of this, and waits once, behind the gather. Then each member says
on the host that its device has done everything, and nobody commits before all have said so: a
member whose collectives were aborted would hand on whatever it has, as if it were right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from elastic_dp.checkpoint.codec import decode
from elastic_dp.checkpoint.commit_record import Manifest, StateTree
from elastic_dp.checkpoint.layout import TensorSpec
from elastic_dp.checkpoint.snapshot import HeldPiece, HeldState
from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.gradient_norm import GradientNorm
from elastic_dp.distributed.gradient_units import elements_per_unit
from elastic_dp.distributed.piece_assignment import (
    HeldRange,
    HeldRanges,
    Holders,
    assign_pieces,
)
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import LoopError, PiecesLost
from elastic_dp.extensions.sharding.elementwise_updates import parameters_to_keep_whole
from elastic_dp.extensions.sharding.parameter_gather import ParameterGather, digest_of_piece
from elastic_dp.extensions.sharding.pieces import (
    PieceUpdates,
    State,
    StatePiece,
    part_of,
    pieces_of,
)
from elastic_dp.train.checkpointing.collective_read import Ranges, ReadCheckpoint
from elastic_dp.train.master_weights import may_write_to_gradients
from elastic_dp.train.state.state_moves import Move, StateUnit, move, ranks_with
from elastic_dp.train.state.state_payload import from_vector, tensor_slot, to_vectors
from elastic_dp.train.state.train_state import OptimizerHolders

ALL_HOLD = 2  # up to so many members, each holds everything
# Of parameters of which there are copies at a time, or one piece. A device is given its work in few
# large pieces, in place, too: torch's optimizers make temporary tensors for all that they update
# together there.
UPDATED_BYTES, UPDATED_BYTES_ON_DEVICE = 1 << 20, 64 << 20
KEPT_BYTES = 8 << 20  # of the parameters whose next state is kept until the commit
CALLS_PART = 16  # of a unit, whose update takes as long as the calls for a piece
# Of parameters: what a member sends in one step for backups, at least; and the part of their bytes
# that it sends, if that is more.
STEP_BYTES = 1 << 20
STEP_PART = 64


@dataclass(slots=True)
class _PreparedStep:
    """What the commit of `step` makes the state of this member."""

    step: int
    generation: int
    gradients: dict[int, torch.Tensor]  # of the pieces that it holds and that are updated
    states: dict[int, State]  # the next ones, of some of them


class ShardedOptimizer(OptimizerHolders):
    """The state of the user's optimizer, whose own `state` stays empty."""

    is_divided = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters.values())
        groups = optimizer.param_groups
        # By parameter: its number in the order of the optimizer's groups.
        self._numbers = {id(p): n for n, p in enumerate(p for g in groups for p in g["params"])}
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        whole = parameters_to_keep_whole(optimizer, self._parameters)
        self.pieces: list[StatePiece] = pieces_of(self._parameters, whole)
        self._updates = PieceUpdates(optimizer, self._parameters, self.pieces)
        self.sizes = [
            piece.numel * self._parameters[piece.parameter].element_size()
            if self._updates.has(number)
            else 0  # it has no state
            for number, piece in enumerate(self.pieces)
        ]
        # What members share evenly. The calls of an update take the time of some more bytes.
        of_calls = elements_per_unit(torch.uint8) // CALLS_PART
        self._loads = [size + of_calls if size else 0 for size in self.sizes]
        self.held: dict[int, State] = {}
        self._prepared: _PreparedStep | None = None
        self.committed_in = 0  # the generation of the last commit
        self._generation = 0
        self._group: ProcessGroup | None = None
        self.holders: list[Holders] = []  # of this or the last generation, by piece
        self._copies: Move | None = None  # for backups, in steps of this generation
        self._arrived: dict[int, State] = {}  # and not held yet
        self._left_early = False  # the last one, before they were made
        # Of the last step that was prepared, and which parameters it gathers.
        self._gather: ParameterGather | None = None
        self._gathered: list[bool] = []
        self.absorb()

    # ------------------------------------------------------------------------- a generation

    def open(
        self,
        group: ProcessGroup,
        generation: int,
        topology: Sequence[Sequence[int]],
        *,
        at_once: bool = False,
    ) -> int:
        """Gives each member the pieces that it is to hold in this generation, but for backups of
        pieces that one member alone holds: these are copied in its first steps. All members are at
        the same step. Returns the number of bytes received. `at_once`: these are copied, too.
        Raises PiecesLost if nobody holds some piece, and GroupError."""
        self.close()
        self._prepared = None
        world_size, rank = group.world_size, group.rank
        held = ranks_with(group, self.held, len(self.pieces))
        if lost := sum(not ranks for ranks in held):
            raise PiecesLost(
                f"{lost} of the {len(self.pieces)} pieces of the optimizer's state were on lost "
                "workers alone"
            )
        holders = assign_pieces(self._loads, world_size, topology, held)
        # Before a run's first step there is next to nothing to copy.
        at_once = at_once or world_size <= ALL_HOLD or not self.committed_in
        later = [
            not at_once and ranks == [one.primary] for ranks, one in zip(held, holders, strict=True)
        ]
        need = [one.ranks for one in holders]
        units = [
            StateUnit(size, partial(self._read, number), partial(self._write, number), exact=False)
            for number, size in enumerate(self.sizes)
        ]
        self._arrived = {}
        before = [() if waits else ranks for ranks, waits in zip(need, later, strict=True)]
        nbytes = move(group, units, held, before)
        self._hold_arrived()
        if any(set(ranks).difference(one.ranks) for ranks, one in zip(held, holders, strict=True)):
            group.gather_bytes(b"")  # all have what they need: from now on others may let it go
        self.held = {n: state for n, state in self.held.items() if rank in need[n]}
        self._group, self._generation, self.holders = group, generation, holders
        behind = [ranks if waits else () for ranks, waits in zip(need, later, strict=True)]
        budget = max(STEP_BYTES, sum(self.sizes) // STEP_PART)
        self._copies = Move(group, units, held, behind, budget=budget)
        self._left_early = False
        return nbytes

    def _read(self, number: int) -> list[torch.Tensor]:
        has_arrived = number in self._arrived  # and is sent on
        return to_vectors(self._arrived[number] if has_arrived else self.held[number])

    def _write(self, number: int, content: torch.Tensor) -> None:
        self._arrived[number] = from_vector(content, self._device)

    def _hold_arrived(self) -> None:
        self.held |= self._arrived
        self._arrived = {}

    def close(self) -> None:
        """Leaves the generation. What is prepared is kept; see `roll_forward`."""
        self._group = None
        self._gather = None  # an abandoned operation may still write to its memory
        self._left_early |= not self.backups_are_made
        self._copies = None
        if self._prepared is not None:  # made again where they are needed: memory is short now
            self._prepared.states = {}

    # ------------------------------------------------------------------------------- a step

    @property
    def all_hold_all(self) -> bool:
        """Whether each member of the generation holds everything."""
        return self._group is None or self._group.world_size <= ALL_HOLD

    def begin(self) -> None:
        """Begins an attempt at a step: what another attempt prepared does not count any more. Sends
        the next copies of pieces that have no backup. Raises LoopError if user code wrote to the
        optimizer's state, which nothing would read, and GroupError."""
        state = self._optimizer.state
        if not isinstance(state, DividedState) or any(dict.values(state)):
            raise LoopError(
                "the optimizer's state was written to since the loop over ctx.steps began, e.g. "
                'by load_state_dict: with sharding="optimizer" each worker holds a part of it, '
                "elsewhere. Load it before the loop, or leave sharding out"
            )
        self._prepared = None
        if self._copies is not None:
            self._copies.begin()

    def take_copies(self) -> None:
        """Holds the copies that were sent, once they have arrived. Called before anything of this
        step is launched on a device. Raises GroupError."""
        if self._copies is not None:
            self._copies.take()
            self._hold_arrived()

    def copy_rest(self) -> None:
        """Makes all missing copies: some member is about to leave. Raises GroupError."""
        if self._copies is not None:
            self._copies.finish()
            self.take_copies()

    def needed(self) -> HeldRanges | None:
        """Returns which ranks need the gradient of which elements; None: all need all."""
        if self.all_hold_all:
            return None
        ranges: dict[torch.Tensor, list[HeldRange]] = {}
        for number, (piece, one) in enumerate(zip(self.pieces, self.holders, strict=True)):
            of_parameter = ranges.setdefault(self._parameters[piece.parameter], [])
            of_parameter.append(HeldRange(number, piece.first, piece.last, one.ranks))
        return ranges

    @torch.no_grad()
    def prepare(
        self,
        step: int,
        gradients: Mapping[int, torch.Tensor],
        used: AbstractSet[torch.Tensor],
        memory: Mapping[torch.dtype, torch.Tensor],
    ) -> None:
        """Updates copies of what this member sends. `gradients`: of the pieces that this member
        holds, shaped as `StatePiece.within` shapes them; of the parameters in `used`, which are the
        same on all members. `memory`: see `ParameterGather`; the same in all steps of a generation.
        """
        assert self._group is not None
        gathered = [p in used for p in self._parameters]
        gather = self._gather
        if gather is None or gather.memory is not memory or self._gathered != gathered:
            pairs = enumerate(self.pieces)
            updated = [n for n, one in pairs if gathered[one.parameter] and self._updates.has(n)]
            layout = self._group, self._parameters, self.pieces, self.holders
            gather = ParameterGather(*layout, updated, memory)
            self._gather, self._gathered = gather, gathered
        mine = {n: gradients[n] for n in [*gather.targets, *gather.backed] if n in self.held}
        self._prepared = prepared = _PreparedStep(step, self._generation, mine, {})
        for some in self._chunks(gather.targets):
            copies = {n: gather.targets[n].copy_(self._of_piece(n)) for n in some}
            self._update_copies(copies, prepared)

    @torch.no_grad()
    def gather(self, norm: GradientNorm, *, compares: bool) -> set[int]:
        """Sends the updated parameters to all members, and waits for theirs and for the norm of the
        gradient. Raises GroupError. With `compares` it updates copies of what this member is the
        backup of, meanwhile. Returns the primaries that have sent other bits, this member's own
        rank with them; empty if all are equal."""
        group, gather, prepared = self._group, self._gather, self._prepared
        assert group is not None and gather is not None and prepared is not None
        digests: dict[int, torch.Tensor] = {}
        gather.launch()
        for some in self._chunks(n for n in gather.backed if compares and n in self.held):
            copies = {n: self._of_piece(n).clone() for n in some}
            self._update_copies(copies, prepared)
            digests |= {n: digest_of_piece(one) for n, one in copies.items()}
        gather.wait()
        told = [norm.tensor]
        if digests:
            told.append(gather.differ(digests))
        if group.on_device is not None:
            told = group.on_device.read(told)
        norm.value = float(told[0])
        pairs = zip(digests, told[1].tolist(), strict=True) if digests else ()
        odd = {self.holders[number].primary for number, differs in pairs if differs}
        return odd | {group.rank} if odd else odd

    def _update_copies(self, copies: Mapping[int, torch.Tensor], prepared: _PreparedStep) -> None:
        """Updates these copies of pieces. The state of the pieces stays as it is. The next one is
        kept, if there is room for it."""
        given = {n: prepared.gradients[n] for n in copies}
        if may_write_to_gradients(self._optimizer):  # which are needed again
            given = {n: one.clone() for n, one in given.items()}
        states = {n: self.held[n] for n in copies}
        self._updates.run(copies, given, states, copies=True)
        if sum(self.sizes[n] for n in [*prepared.states, *copies]) <= KEPT_BYTES:
            prepared.states |= states

    def _chunks(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Yields pieces that are updated together, small ones first."""
        on_device = accelerator_of(self._device).asynchronous
        limit = UPDATED_BYTES_ON_DEVICE if on_device else UPDATED_BYTES
        chunk, size = list[int](), 0
        for number in sorted(numbers, key=self.sizes.__getitem__):
            chunk.append(number)
            size += self.sizes[number]
            if size >= limit:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _of_piece(self, number: int) -> torch.Tensor:
        piece = self.pieces[number]
        return piece.of(self._parameters[piece.parameter].detach())

    def step_ends(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates all parameters, after the commit. `gradients` has one for each parameter, where
        each member holds everything."""
        if self.all_hold_all:
            of_pieces = {}
            for number, piece in enumerate(self.pieces):
                gradient = gradients[piece.parameter]
                if gradient is not None and self._updates.has(number):
                    of_pieces[number] = piece.of(gradient)
            self._update_in_place(of_pieces)
        else:
            assert self._prepared is not None and self._gather is not None
            self._advance(self._prepared)
            self._gather.install()
            self._prepared = None
        self.committed_in = self._generation

    def _advance(self, prepared: _PreparedStep) -> None:
        """Makes the state of what this member holds that of the prepared step."""
        gradients = prepared.gradients.items()
        self._update_in_place({n: one for n, one in gradients if n not in prepared.states})
        self.held |= prepared.states

    @torch.no_grad()
    def _update_in_place(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Updates these pieces, which this member holds, and their state."""
        on_device = accelerator_of(self._device).asynchronous  # see UPDATED_BYTES
        for some in self._chunks(gradients) if on_device else [gradients]:
            of_some = {n: gradients[n] for n in some}
            self._updates.run({n: self._of_piece(n) for n in some}, of_some, self.held)

    # -------------------------------------------------------------------- state transfers

    def roll_forward(self, step: int, generation: int) -> None:
        """Goes to `step`, which another member has committed in `generation` and this one has not:
        by what it has prepared there. Without that it holds nothing, and others have it. The
        parameters and the groups are still those of the step before."""
        prepared, self._prepared = self._prepared, None
        self.committed_in = generation
        if prepared is not None and (prepared.step, prepared.generation) == (step, generation):
            self._advance(prepared)
        else:
            self.held = {}

    def tree(self) -> dict[str, Any]:
        return {"sharded": self.committed_in}

    def take_over(self, step: Mapping[str, Any], *, joins: bool) -> None:
        if "sharded" in step and not joins:
            self.roll_forward(step["record"]["number"], step["sharded"])

    def adopted(self, step: Mapping[str, Any], *, joins: bool) -> None:
        if "sharded" not in step:  # a checkpoint: `restore` follows
            self.absorb()
        elif joins:
            self.forget(step["sharded"])

    def forget(self, generation: int) -> None:
        """Holds nothing, as a worker that joins a run, whose last commit was in `generation`."""
        self._optimizer.state = DividedState()
        self.held, self._prepared = {}, None
        self.committed_in = generation

    @torch.no_grad()
    def absorb(self) -> None:
        """Takes over the whole state from the user's optimizer, and holds all pieces."""
        self.held, self._prepared = {}, None
        self.committed_in = 0
        for number, piece in enumerate(self.pieces):
            p = self._parameters[piece.parameter]
            given = self._optimizer.state.get(p, {})
            self.held[number] = {key: part_of(piece, p, value) for key, value in given.items()}
            if piece.last == p.numel():  # its last piece: memory for one parameter at a time
                self._optimizer.state.pop(p, None)
        self._optimizer.state = DividedState()

    def holders_of_any(
        self, world_size: int, topology: Sequence[Sequence[int]]
    ) -> Sequence[Holders]:
        """Returns the holders of all pieces in a generation whose members can read any."""
        everyone = range(world_size)
        return assign_pieces(self._loads, world_size, topology, [everyone] * len(self.sizes))

    @property
    def has_all(self) -> bool:
        """Whether this member holds all pieces."""
        return len(self.held) == len(self.pieces)

    @property
    def backups_are_made(self) -> bool:
        """Whether each piece has all its holders in this generation."""
        return self._copies is None or self._copies.is_done

    def lacks_copies(self, generation: int) -> bool:
        """Whether some piece may have one holder since `generation`, which this member has left."""
        return generation != self._generation or self._left_early

    # -------------------------------------------------------------------------- checkpoints

    def to_write(self, worker: str, members: Sequence[str]) -> HeldState:
        found = []
        for number, piece, p, of_optimizer in self._optimized():
            state = self.held.get(number)
            if state is None:
                continue
            ranks = self.holders[number].ranks if self.holders else ()
            holders = tuple(members[rank] for rank in ranks) or (worker,)
            form = (None, None) if piece.whole else (tuple(p.shape), tuple(p.stride()))
            found.append(HeldPiece(of_optimizer, piece.first, piece.last, state, holders, *form))
        return HeldState(len(self._numbers), found)

    def needs(
        self, manifest: Manifest, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[Ranges]:
        rest = without_optimizer(manifest)
        of_all = {name: [(0, spec.nbytes)] for name, spec in rest.specs.items()}
        found: list[defaultdict[str, list[tuple[int, int]]]] = [
            defaultdict(list, {name: [*some] for name, some in of_all.items()})
            for _ in range(world_size)
        ]
        holders = self.holders_of_any(world_size, topology)
        for number, piece, p, of_optimizer in self._optimized():
            entry, specs = manifest.entry(of_optimizer)
            slots = [slot for x in entry.values() if (slot := tensor_slot(x)) is not None]
            for spec in (specs[slot] for slot in slots if specs[slot].name not in of_all):
                part = _part(spec, piece, p)
                for rank in holders[number].ranks:
                    found[rank][spec.name].append(part)
        return [*found]

    def common(self, manifest: Manifest) -> Manifest:
        return without_optimizer(manifest)

    def restore(
        self,
        read: ReadCheckpoint,
        places: Mapping[str, str],
        rank: int,
        world_size: int,
        topology: Sequence[Sequence[int]],
    ) -> None:
        manifest = read.commit.manifest
        holders = self.holders_of_any(world_size, topology)
        held = {n: State() for n in range(len(self.pieces)) if not self._updates.has(n)}
        for number, piece, p, of_optimizer in self._optimized():
            if rank in holders[number].ranks:
                entry, specs = manifest.entry(of_optimizer)
                held[number] = {
                    key: _value(value, piece, p, specs, read, places)
                    for key, value in entry.items()
                }
        self.held = held

    def _optimized(self) -> Iterator[tuple[int, StatePiece, torch.Tensor, int]]:
        """Yields the number of each piece that the optimizer updates, the piece, its parameter, and
        the parameter's number in the order of the optimizer's groups."""
        for number, piece in enumerate(self.pieces):
            p = self._parameters[piece.parameter]
            if id(p) in self._numbers:
                yield number, piece, p, self._numbers[id(p)]


def _value(
    value: Any,
    piece: StatePiece,
    p: torch.Tensor,
    specs: Sequence[TensorSpec],
    read: ReadCheckpoint,
    places: Mapping[str, str],
) -> Any:
    """Returns a value of a piece's state, where it belongs."""
    slot = tensor_slot(value)
    if slot is None:
        return decode(value, ())  # a number; these optimizers keep nothing else
    spec = specs[slot]
    start, end = _part(spec, piece, p)
    content = read.content(spec.name, start, end)
    if (start, end) == (0, spec.nbytes):
        part = part_of(piece, p, spec.view(content))
    else:
        if content.untyped_storage().nbytes() > content.nbytes:
            content = content.clone()
        part = content.view(spec.torch_dtype)
    is_here = places.get(spec.name, "cpu") == "cpu"
    return part if is_here else part.to(p.device)


def _part(spec: TensorSpec, piece: StatePiece, p: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of a tensor in a parameter's state that a piece needs."""
    whole = 0, spec.nbytes
    if piece.whole or not spec.shape:
        return whole
    like = spec.view(torch.empty(spec.nbytes, dtype=torch.uint8, device="meta"))
    if like.shape != p.shape or like.stride() != p.stride():
        return whole  # its elements lie in another order
    return piece.first * spec.itemsize, piece.last * spec.itemsize


def without_optimizer(manifest: Manifest) -> Manifest:
    """Returns the description of the state without that of the optimizer's parameters."""
    step = manifest.common.tree["step"]
    tree = manifest.common.tree | {"step": step | {"optimizer": [{} for _ in step["optimizer"]]}}
    specs, used = manifest.common.specs, set(slots_in(tree))
    unused = TensorSpec("", "uint8", (0,))  # keeps the slots of the others
    kept = tuple(spec if slot in used else unused for slot, spec in enumerate(specs))
    return Manifest(manifest.step, StateTree(tree, kept), ())


def slots_in(encoded: Any) -> Iterator[int]:
    """Yields the slot of each tensor in an encoded tree, also of what is stored as one."""
    if isinstance(encoded, dict):
        slots = encoded.get("v") if "$" in encoded else None, encoded.get("content")
        yield from (slot for slot in slots if type(slot) is int)
        encoded = encoded.values()
    elif not isinstance(encoded, list):
        return
    for value in encoded:
        yield from slots_in(value)


class DividedState(defaultdict[Any, Any]):
    """An empty `optimizer.state`. Code that looks for state there, to change or to keep it, would
    find none and go on, so that is a LoopError, also for `optimizer.state_dict()`. This package
    itself uses `get`, `pop`, `update` and the methods of `dict`."""

    def __init__(self) -> None:
        super().__init__(dict)

    def _refuse(self, *_: Any) -> NoReturn:
        raise LoopError(
            "optimizer.state was read, by optimizer.state_dict() or otherwise, which has nothing: "
            'with sharding="optimizer" each worker holds a part of it. Checkpoints have all of it '
            "(ctx.checkpoint(), Result.load_state, elastic-dp checkpoints export), or leave "
            "sharding out"
        )

    __iter__: Callable[..., Any] = _refuse
    __missing__ = keys = values = items = clear = _refuse
