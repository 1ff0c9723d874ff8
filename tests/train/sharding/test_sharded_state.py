"""The state of a sharded optimizer among workers that are threads of this process: its bits, who
holds what, and what an abort, a loss, a join or a checkpoint leaves of it."""

import itertools
import random
import threading
from collections import Counter

import pytest
import torch

from elastic_dp.distributed import gradient_units
from elastic_dp.distributed.gradient_norm import GradientClipping, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout, in_memory_order
from elastic_dp.errors import LoopError, PiecesLost
from elastic_dp.extensions.sharding import sharded_optimizer
from elastic_dp.extensions.sharding.piece_reduction import GatheredNorm
from elastic_dp.extensions.sharding.pieces import PieceUpdates, part_of
from elastic_dp.extensions.sharding.shardable_optimizers import SHARDABLE_BY_NAME
from elastic_dp.extensions.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.exactness.torch_optimizers import BY_PARAMETER
from elastic_dp.train.master_weights import MasterWeights
from tests.distributed.members import _dropped_here, of_each  # noqa: F401
from tests.distributed.norms import gradient_norm
from tests.train.exactness.test_torch_optimizers import VARIANTS, shapes
from tests.train.optimizers import pytorch_optimizer

STEPS = 3
DEVICE = torch.device("cpu")  # of the members' parameters


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(gradient_units, "UNIT_BYTES", 1024)
    monkeypatch.setattr(sharded_optimizer, "KEPT_BYTES", 0)


@pytest.fixture(params=[0, 2048, 1 << 20], ids=["none", "some", "all"])
def kept(request, monkeypatch):
    """Of how many pieces the next states are kept until the commit."""
    monkeypatch.setattr(sharded_optimizer, "KEPT_BYTES", request.param)
    monkeypatch.setattr(sharded_optimizer, "UPDATED_BYTES", 1024)
    return request.node.callspec.id


class Member:
    """A worker: its parameters, the user's optimizer, and what is sharded of it."""

    def __init__(self, make, kinds, dtype, shard=True, clip_norm=None):
        draw = torch.Generator().manual_seed(0)
        self.device = DEVICE if shard else torch.device("cpu")
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)  # in turn
        self.parameters = {
            str(n): torch.nn.Parameter(torch.randn(shape, generator=draw).to(self.device, one))
            for n, (shape, one) in enumerate(zip(kinds, itertools.cycle(dtypes)))
        }
        self.optimizer = make(list(self.parameters.values()))
        self.step, self.clip_norm = 0, clip_norm
        self.odd = set()  # ranks whose updates differ
        self.sharding = ShardedOptimizer(self.optimizer, self.parameters) if shard else None

    def gradients(self, step):
        """Those of all members. The first parameter has none in each third step."""
        draw = torch.Generator().manual_seed(step)
        values = [
            torch.randn(p.shape, generator=draw).to(self.device, p.dtype)
            for p in self.parameters.values()
        ]
        return [None if not n and step % 3 == 2 else g for n, g in enumerate(values)]

    def plain_step(self):
        self.step += 1
        for p, gradient in zip(self.parameters.values(), self.gradients(self.step), strict=True):
            p.grad = gradient
        self.clip()
        self.optimizer.step()

    def clip(self):
        if self.clip_norm is not None:
            parameters = list(self.parameters.values())
            norm = gradient_norm(UnitLayout.of(parameters), [p.grad for p in parameters])
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)

    @property
    def copied_bytes(self):
        """What it has received in steps of this generation."""
        copies = self.sharding._copies
        return 0 if copies is None else copies.received_bytes

    @property
    def held_bytes(self):
        tensors = [v for state in self.sharding.held.values() for v in state.values()]
        return sum(v.nbytes for v in tensors if isinstance(v, torch.Tensor))

    def attempt(self, *, commits=True, memory=None):
        sharding, step = self.sharding, self.step + 1
        sharding.begin()
        gradients = self.gradients(step)
        if not sharding.all_hold_all:
            given = dict(zip(self.parameters.values(), gradients, strict=True))
            used = {p for p, gradient in given.items() if gradient is not None}
            held = {
                n: in_memory_order(given[p]).clone()[piece.first : piece.last]
                for n, piece in enumerate(sharding.pieces)
                if sharding._group.rank in sharding.holders[n].ranks
                and (p := list(given)[piece.parameter]) in used
            }
            sharding.take_copies()
            squares = squares_of_units(UnitLayout.of(given).pieces(gradients))
            group, wide = sharding._group, any(p.dtype == torch.float64 for p in used)
            mine = torch.zeros_like(squares) if group.rank else squares
            norm = GatheredNorm(group, mine, finite=True, wide=wide)
            for n, piece in enumerate(sharding.pieces):
                if n in held:
                    held[n] = piece.within(held[n], list(given)[piece.parameter])
            GradientClipping(self.clip_norm).clip(held.values(), norm)
            sharding.prepare(step, held, used, memory or {})
            self.odd = sharding.gather(norm, compares=True)
            assert norm.agree_finite(confirms=group.on_device is not None)
        if commits:
            self.step = step
            sharding.step_ends(gradients)
            self.optimizer.step()  # it has no gradients, and counts steps in its groups

    def take_over(self, source, *, joins):
        if joins:
            self.sharding.forget(source.sharding.committed_in)
        else:
            self.sharding.roll_forward(source.step, source.sharding.committed_in)
        with torch.no_grad():
            for mine, given in zip(
                self.parameters.values(), source.parameters.values(), strict=True
            ):
                mine.copy_(given)
        self.step = source.step


GENERATIONS = itertools.count(1)


def copy_rest(member):
    member.sharding.copy_rest()


def enter(members, act=copy_rest, topology=()):
    """All members enter a generation; then `act(member)` of each of them. Returns the bytes that
    each has received of pieces."""
    generation = next(GENERATIONS)

    def entered(group):
        torch.set_num_threads(1)
        member = members[group.rank]
        nbytes = member.sharding.open(group, generation, topology)
        act(member)
        nbytes += member.copied_bytes
        member.sharding.close()
        return nbytes

    return of_each(len(members), entered)


def catch_up(members):
    """Members behind take over what the newest has committed."""
    newest = max(members, key=lambda member: member.step)
    for member in members:
        if member.step < newest.step:
            member.take_over(newest, joins=False)


def same_bits(one, other):
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape:
            return False
        one, other = (x.detach().cpu().reshape(-1).view(torch.uint8) for x in (one, other))
        return torch.equal(one, other)
    return one == other


def check_equal(members, plain):
    """Weights, and the state of all pieces, of which each is on two members, or on the one."""
    copies = Counter(number for member in members for number in member.sharding.held)
    pieces = members[0].sharding.pieces
    assert copies == Counter(dict.fromkeys(range(len(pieces)), min(2, len(members))))
    for member in members:
        check_held(member, plain)


def check_held(member, plain):
    theirs = list(plain.parameters.values())
    assert all(map(same_bits, member.parameters.values(), theirs))
    for number, state in member.sharding.held.items():
        piece = member.sharding.pieces[number]
        p = theirs[piece.parameter]
        given = plain.optimizer.state.get(p, {})
        assert state.keys() == given.keys()
        assert all(same_bits(state[key], part_of(piece, p, given[key])) for key in given)


def of_kind(kind, **options):
    return lambda parameters: kind(parameters, **{"lr": 0.01} | options)


def kinds_and_options():
    return [(kind, options) for kind in VARIANTS for options in VARIANTS[kind]]


def of_others():
    """Optimizers of another package, each with options that it keeps in different places."""
    lars, lamb = pytorch_optimizer().LARS, pytorch_optimizer().Lamb
    of_lars = {}, {"nesterov": True, "maximize": True, "weight_decay": 0.01}, {"foreach": False}
    coupled = {"weight_decay": 0.01, "weight_decouple": False, "maximize": True}
    of_lamb = {}, coupled, {"rectify": True, "degenerated_to_sgd": True}, {"foreach": False}
    return [(lars, options) for options in of_lars] + [(lamb, options) for options in of_lamb]


def test_all_optimizers_that_can_be_sharded_are_tried():
    assert set(VARIANTS) == BY_PARAMETER
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind, _ in of_others()}
    assert names == SHARDABLE_BY_NAME


def test_state_and_weights_equal_those_of_the_optimizer_alone(monkeypatch):
    """One group for all optimizers."""
    cases = [
        (of_kind(kind, **options), shapes(kind), dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for kind, options in [*kinds_and_options(), *of_others()]
    ]
    with_masters = [
        (of_kind(MasterWeights, optimizer_class=kind, **options), shapes(kind), torch.bfloat16)
        for kind, (*_, options) in VARIANTS.items()
    ]
    cases += with_masters

    def train(group):
        torch.set_num_threads(1)
        for make, kinds, dtype in cases:
            member = Member(make, kinds, dtype)
            if group.rank:
                member.sharding.forget(0)
            member.sharding.open(group, 1, ())
            for _ in range(STEPS):
                member.attempt()
            check_held(member, plain_after(STEPS, Member(make, kinds, dtype, shard=False)))
            assert member.sharding.held
            assert not member.optimizer.state
            if len(member.sharding.pieces) > 8:
                assert len(member.sharding.held) < len(member.sharding.pieces)

    of_each(3, train)


ADAM = of_kind(torch.optim.AdamW, weight_decay=0.1)
SHAPES = [(70, 33), (129,), (64, 2), (1,), ()]


def new_member(**options):
    return Member(ADAM, SHAPES, torch.float32, **options)


def joined(count, make=new_member):
    """The first of them, and those who have joined it."""
    members = [make() for _ in range(count)]
    for joiner in members[1:]:
        joiner.take_over(members[0], joins=True)
    return members


def plain_after(steps, plain=None):
    plain = plain or new_member(shard=False)
    for _ in range(steps):
        plain.plain_step()
    return plain


def four():
    return joined(4)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 6))]
)
def test_state_survives_losses_joins_and_aborts_at_any_instant(seed):
    """Members are lost one at a time, so some member has each piece. What is aborted on some
    members is committed on the others, or on nobody."""
    rng = random.Random(seed)
    members, lost = [new_member()], False
    for _ in range(12):
        catch_up(members)
        if len(members) > 2 and not lost and rng.random() < 0.5:
            members.pop(rng.randrange(len(members)))
        while len(members) < 3 or (len(members) < 6 and rng.random() < 0.3):
            members.append(new_member())
            members[-1].take_over(members[rng.randrange(len(members) - 1)], joins=True)
        topology = rng.choice([(), ((1, len(members) - 1),), ((2,) * (len(members) // 2),)])
        if topology and sum(topology[0]) != len(members):
            topology = ()
        aborted = [rng.random() < 0.5 for _ in members]
        number = {id(member): index for index, member in enumerate(members)}

        def train(member, aborted=aborted, number=number):
            member.attempt()
            member.attempt(commits=not aborted[number[id(member)]])

        enter(members, train, topology)
        # One of those that have committed is lost, with what only it knew.
        ahead = max(member.step for member in members)
        lost = len(members) > 1 and rng.random() < 0.5
        if lost:
            members.remove(rng.choice([m for m in members if m.step == ahead]))
    catch_up(members)
    enter(members)
    check_equal(members, plain_after(members[0].step))


def check_pieces_are_lost(members):
    def fails(group):
        with pytest.raises(PiecesLost, match="were on lost workers alone"):
            members[group.rank].sharding.open(group, next(GENERATIONS), ())

    of_each(len(members), fails)


def test_losing_both_holders_of_a_piece_is_an_error_on_all_members():
    members = four()
    enter(members, Member.attempt)
    mine = set(members[0].sharding.held)
    other = next(m for m in members[1:] if mine & set(m.sharding.held))
    check_pieces_are_lost([member for member in members[1:] if member is not other])


def test_loss_moves_little_more_than_the_copies_that_went_with_the_worker(monkeypatch):
    monkeypatch.setattr(gradient_units, "UNIT_BYTES", 16384)
    members = joined(4, lambda: Member(ADAM, [(256, 300), (4096,)], torch.float32))
    enter(members, Member.attempt)
    lost = members.pop().held_bytes
    assert sum(enter(members)) <= 1.1 * lost


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Copies for backups are sent in several steps."""
    monkeypatch.setattr(sharded_optimizer, "STEP_BYTES", 1024)
    monkeypatch.setitem(globals(), "SHAPES", [(600, 33), (129,), (64, 2), (1,), ()])


def trained():
    """Four members, after a step."""
    members = four()
    enter(members)
    enter(members, Member.attempt)
    return members


def holders_of(members):
    """Returns how many members hold each piece."""
    numbers = range(len(members[0].sharding.pieces))
    return [sum(number in one.sharding.held for one in members) for number in numbers]


@pytest.mark.usefixtures("few_at_a_time")
def test_backups_are_copied_while_training_goes_on():
    members = trained()
    lost = members.pop()
    meet, found = threading.Barrier(len(members)), []

    def look():
        if meet.wait() == 0:
            found.append(holders_of(members))
        meet.wait()

    def train(member):
        look()
        while not member.sharding.backups_are_made:
            member.attempt()
            look()
        assert member.copied_bytes

    enter(members, train)
    alone = [counts.count(1) for counts in found]
    # The others moved before the first step, or some member would send more than its part.
    assert 0 < alone[0] <= len(lost.sharding.held)
    assert len(alone) > 3 and alone == sorted(alone, reverse=True) and not alone[-1]
    assert all(min(counts) >= 1 for counts in found)
    check_equal(members, plain_after(1 + len(found) - 1))


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("commits", [True, False])
def test_generation_ends_while_backups_are_copied(steps, commits):
    """After so many of its steps. Where another one was aborted, its copies may have arrived."""
    members = trained()
    members.pop()

    def train(member):
        for _ in range(steps):
            member.attempt()
        if not commits:
            member.attempt(commits=False)
        assert not member.sharding.backups_are_made

    enter(members, train)
    counts = holders_of(members)
    assert 1 in counts and 0 not in counts
    first, *others = members
    assert any(counts[number] == 1 for number in first.sharding.held)
    check_pieces_are_lost(others)
    enter([*others, first], Member.attempt)
    enter(members)
    check_equal(members, plain_after(1 + steps + 1))


@pytest.mark.usefixtures("few_at_a_time")
def test_missing_copies_are_made_before_a_member_leaves():
    members = trained()
    members.pop()

    def train(member):
        member.attempt()
        assert not member.sharding.backups_are_made
        member.sharding.copy_rest()
        assert member.sharding.backups_are_made

    enter(members, train)
    check_equal(members, plain_after(2))
    members.pop()
    enter(members, Member.attempt)
    check_equal(members, plain_after(3))


@pytest.mark.usefixtures("few_at_a_time")
def test_member_that_leaves_is_told_whether_copies_are_missing():
    """A worker remains for one more generation, in which they are made before the first step."""
    members = trained()
    members.pop()
    generation = next(GENERATIONS)

    def enters(group, at_once):
        sharding = members[group.rank].sharding
        assert sharding.lacks_copies(generation + at_once), "it has not been in it"
        sharding.open(group, generation + at_once, (), at_once=at_once)
        assert sharding.backups_are_made == at_once
        members[group.rank].attempt()
        sharding.close()
        sharding.close()
        assert sharding.lacks_copies(generation + at_once) == (not at_once)

    of_each(len(members), lambda group: enters(group, at_once=False))
    next(GENERATIONS)
    of_each(len(members), lambda group: enters(group, at_once=True))
    check_equal(members, plain_after(3))
    members.pop()
    enter(members, Member.attempt)
    check_equal(members, plain_after(4))


def test_no_member_has_most_of_the_small_pieces():
    """Each takes calls, which a member with fewer bytes would make for the others."""
    member = Member(ADAM, [(256,), (256,), (128,), *[(4,)] * 24], torch.float32)
    holders = member.sharding.holders_of_any(3, ())
    numbers = Counter(one.primary for one in holders)
    assert sum(numbers.values()) == 27 and max(numbers.values()) <= 13


@pytest.fixture
def updated(monkeypatch):
    """The bytes of the pieces of each update."""
    found, run = [], PieceUpdates.run

    def counts(updates, tensors, *given, **options):
        found.append([x.nbytes for x in tensors.values()])
        run(updates, tensors, *given, **options)

    monkeypatch.setattr(PieceUpdates, "run", counts)
    return found


def test_few_pieces_are_copied_and_updated_together(updated, monkeypatch):
    """There are copies of them before the commit. A step that is not committed needs no second
    state."""
    monkeypatch.setattr(sharded_optimizer, "UPDATED_BYTES", 2048)
    members = four()
    enter(members, lambda member: member.attempt(commits=False))
    assert len(updated) > 4 * 2
    assert max(map(sum, updated)) < 2048 + gradient_units.UNIT_BYTES
    enter(members, Member.attempt)
    check_equal(members, plain_after(1))


def test_pieces_whose_next_states_are_kept_are_updated_once(kept, updated):
    """Others are updated before the commit and after it: they are sent, or compared."""
    members = four()
    enter(members, Member.attempt)
    held = sum(len(member.sharding.held) for member in members)
    again = sum(map(len, updated)) - held
    assert {"none": again == held, "some": 0 < again < held, "all": again == 0}[kept]
    enter(members, Member.attempt)
    check_equal(members, plain_after(2))


@pytest.mark.usefixtures("kept")
def test_aborted_step_leaves_state_as_it_was_and_is_done_again_with_the_same_bits():
    members = four()

    def train(member):
        member.attempt()
        before = {n: dict(state) for n, state in member.sharding.held.items()}
        values = {n: {k: v.clone() for k, v in s.items()} for n, s in before.items()}
        weights = [p.detach().clone() for p in member.parameters.values()]
        member.attempt(commits=False)
        assert all(
            same_bits(member.sharding.held[n][k], v)
            for n, s in values.items()
            for k, v in s.items()
        )
        assert all(map(same_bits, member.parameters.values(), weights))
        member.attempt()

    enter(members, train)
    check_equal(members, plain_after(2))


@pytest.mark.usefixtures("kept")
def test_member_behind_holds_what_it_prepared_when_another_has_committed():
    members = four()
    enter(members, lambda member: member.attempt(commits=member is members[2]))
    for member in members:
        if member is not members[2]:
            member.take_over(members[2], joins=False)
    held = [set(member.sharding.held) for member in members]
    assert all(held)
    # The one that has committed is lost: the others have everything.
    del members[2]
    enter(members)
    check_equal(members, plain_after(1))


def test_state_that_was_prepared_in_another_generation_does_not_count():
    """Another attempt may have left out other rows."""
    members = four()
    enter(members, Member.attempt)
    enter(members, lambda member: member.attempt(commits=False))
    held = dict(members[0].sharding.held)
    enter(members[1:], Member.attempt)
    assert members[0].sharding.held == held  # it was not there
    members[0].take_over(members[1], joins=False)
    assert not members[0].sharding.held
    enter(members)
    check_equal(members, plain_after(2))


def test_backup_with_other_bits_than_its_primary_is_found_before_the_commit():
    members = four()
    enter(members, Member.attempt)
    holders = members[0].sharding.holders
    pieces = members[0].sharding.pieces
    # The parameter has a gradient in the second step.
    piece = next(n for n, one in enumerate(pieces) if one.parameter)
    primary, backup = holders[piece]
    found = {}

    def damages(member):
        rank = members.index(member)
        if rank == backup:
            member.sharding.held[piece]["exp_avg"].view(-1)[0] += 1.0
        member.attempt(commits=False)
        found[rank] = member.odd

    enter(members, damages)
    assert found == {rank: {backup, primary} if rank == backup else set() for rank in range(4)}


def test_gradients_that_arrive_in_other_memory_are_gathered_there():
    """The batch grows within a generation, and buckets are laid out anew."""
    members = four()

    def train(member):
        sizes = {torch.float32: sum(p.numel() for p in member.parameters.values()) * 2}
        for _ in range(2):
            memory = {dtype: torch.full((n,), torch.nan) for dtype, n in sizes.items()}
            member.attempt(memory=memory)
            assert sharing(member.sharding._gather._flats[0], memory[torch.float32])

    enter(members, train)
    enter(members)
    check_equal(members, plain_after(2))


def sharing(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_state_that_user_code_writes_or_reads_is_an_error():
    member = new_member()
    (p, *_) = member.parameters.values()
    with pytest.raises(LoopError, match=r"optimizer\.state was read.*load_state"):
        _ = member.optimizer.state[p]
    enter([member], Member.attempt)
    with pytest.raises(LoopError, match=r"optimizer\.state_dict\(\).*load_state"):
        member.optimizer.state_dict()
    member.optimizer.state[p] = {"exp_avg": torch.zeros_like(p)}
    with pytest.raises(LoopError, match=r"state was written to.*before the loop"):
        member.sharding.begin()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_state_is_absorbed_from_a_checkpoint_by_any_number_of_members(world_size):
    plain = plain_after(3)
    members = [new_member() for _ in range(world_size)]
    for member in members:
        for p, given in zip(member.parameters.values(), plain.parameters.values(), strict=True):
            with torch.no_grad():
                p.copy_(given)
            member.optimizer.state[p] = {
                key: value.clone() for key, value in plain.optimizer.state[given].items()
            }
        member.step = 3
        member.sharding.absorb()
    received = enter(members, Member.attempt)
    assert received == [0] * world_size  # all have read it
    check_equal(members, plain_after(4))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_members_hold_equal_parts_of_the_state(world_size):
    members = joined(world_size)
    enter(members, Member.attempt)
    held = [member.held_bytes for member in members]
    state = plain_after(1).optimizer.state
    total = sum(v.numel() * v.element_size() for s in state.values() for v in s.values())
    scalars = 4 * len(members[0].sharding.pieces)  # `step` of each piece
    copies = min(2, world_size)
    largest_piece = 2 * gradient_units.UNIT_BYTES
    for one in held:
        assert abs(one - total * copies / world_size) <= largest_piece + scalars
