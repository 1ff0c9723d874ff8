"""One holder at a time, over every interleaving of two claimants' requests; and on real stores.

`World` is the store and the clock; claimants are generators that are advanced one request at a
time, in every order.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.checkpoint.lease import Held, Lease, Record
from elastic_dp.errors import FileDamaged, LeaseLost, RunMismatch
from elastic_dp.storage import Store
from tests.checkpoint.states import memory_store

LEASE_S = 60.0
STORE = memory_store()  # that of claimants in a `World`, who never use it


@dataclass
class World:
    """`kept`: how many old objects are left when a number is created, fewer than in a real
    store."""

    now: float = 0.0
    kept: int = 2
    objects: dict[int, Record] = field(default_factory=dict)

    def newest(self):
        return self.objects[max(self.objects)] if self.objects else None

    def answer(self, asked):
        if asked is None:
            return self.newest(), self.now
        number = asked.number
        if number not in self.objects:
            self.objects[number] = asked
            if number == max(self.objects):
                for old in [n for n in self.objects if n <= number - self.kept]:
                    del self.objects[old]
        return None


class Claimant:
    """Acquires, renews when it is time, and believes; one request per `step`."""

    def __init__(self, world, name, wall_error=0.0):
        self.world, self.wall_error = world, wall_error
        self.lease = Lease(STORE, name, name, LEASE_S, clock=lambda: world.now)
        self.fences = []
        self._steps = self._asked = None

    def step(self):
        """One request, or the decision what to begin; False if there is nothing to do now."""
        if self._steps is None:
            return self._begin()
        try:
            self._asked = self._steps.send(self.world.answer(self._asked))
        except StopIteration as end:
            self._steps = None
            if isinstance(end.value, Record):
                self.fences.append(end.value.number)
            else:
                self.lease.held = None  # as `renew` does
        return True

    def believes(self):
        return self.lease.is_valid()

    def _begin(self):
        now, wall = self.world.now, self.world.now + self.wall_error
        if self.lease.held is None:
            self._steps = self.lease._acquire(now, wall)
        elif now >= self.lease.renew_at_s():
            self._steps = self.lease._create("held", now, wall)
        else:
            return False
        self._asked = next(self._steps)
        return True


def check(claimants):
    assert sum(c.believes() for c in claimants) <= 1, "two hold the run"
    numbers = [n for c in claimants for n in c.fences]
    assert len(numbers) == len(set(numbers)), "a fence was given twice"
    for claimant in claimants:
        assert claimant.fences == sorted(claimant.fences)


def insist(world, claimant):
    """Whatever happened before: one that keeps trying, while the others are gone, gets the
    lease."""
    for _ in range(3):
        world.now += LEASE_S
        for _ in range(8):
            claimant.step()
    assert claimant.believes()


# Each beginning, and each pause.
IN_CI = (("", 30.0), ("aaaa", 61.0), ("aaaabb..", 30.0), ("b.aaaa", 1.0))


@pytest.mark.parametrize(
    ("begun", "pause_s"),
    [
        pytest.param(begun, pause_s, marks=() if (begun, pause_s) in IN_CI else pytest.mark.slow)
        for begun in ("", "aaaa", "aaaabb..", "b.aaaa")
        for pause_s in (1.0, 30.0, 61.0)
    ],
)
def test_every_interleaving_of_two_claimants(pause_s, begun):
    """Eight turns, each of one claimant or of the clock, in every order: at the start, where one
    holds it, and where one had begun to look before."""
    for turns in itertools.product("ab.", repeat=8):
        world = World()
        claimants = {"a": Claimant(world, "a"), "b": Claimant(world, "b")}
        for turn in (*begun, *turns):
            if turn == ".":
                world.now += pause_s
            else:
                claimants[turn].step()
            check(claimants.values())
        insist(world, claimants[turns[0] if turns[0] != "." else "a"])


turns = st.lists(st.one_of(st.integers(0, 2), st.floats(0.1, 90.0)), max_size=200)


@settings(max_examples=60)
@given(turns, st.integers(1, 3))
def test_long_histories_of_three(history, kept):
    world = World(kept=kept)
    claimants = [Claimant(world, name) for name in "abc"]
    for turn in history:
        if isinstance(turn, float):
            world.now += turn
        else:
            claimants[turn].step()
        check(claimants)
    insist(world, claimants[0])


@settings(max_examples=50)
@given(turns, st.floats(-5000, 5000))
def test_a_clock_that_is_wrong_costs_a_lease_and_no_fence(history, wall_error):
    world = World()
    claimants = [Claimant(world, "a"), Claimant(world, "b", wall_error)]
    for turn in history:
        if isinstance(turn, float):
            world.now += turn
        else:
            claimants[turn % 2].step()
        numbers = [n for c in claimants for n in c.fences]
        assert len(numbers) == len(set(numbers))
    insist(world, claimants[0])
    assert claimants[0].fences


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def holder(store, name, clock):
    return Lease(store, name, name, LEASE_S, clock=clock, wall=clock)


def test_waits_takes_over_and_refuses_the_frozen_one():
    store, clock = memory_store(), Clock()
    first, second = holder(store, "first on node-1", clock), holder(store, "second", clock)
    assert first.acquire().number == 1
    clock.now += 20
    assert first.renew().number == 2
    clock.now += 10
    held = second.acquire()
    assert isinstance(held, Held) and held.by.holder == "first on node-1" and held.wait_s == LEASE_S
    clock.now += LEASE_S - 1
    assert second.acquire().wait_s == 1.0 and not first.is_valid()
    clock.now += 1
    assert second.acquire().number == 3
    with pytest.raises(LeaseLost, match="held by second"):
        first.renew()
    assert isinstance(first.acquire(), Held)
    second.release()
    assert first.acquire().number == 5


def test_lease_that_expired_long_ago_is_taken_at_once():
    store, clock = memory_store(), Clock()
    holder(store, "first", clock).acquire()
    clock.now += 11 * LEASE_S
    assert holder(store, "second", clock).acquire().number == 2


def test_old_objects_go_and_the_newest_stays():
    store, clock = memory_store(), Clock()
    mine = holder(store, "first", clock)
    mine.acquire()
    for _ in range(30):
        clock.now += 20
        mine.renew()
    assert mine.fence == 31
    numbers = sorted(int(entry.path[-15:-5]) for entry in store.find(f"{store.path}/lease/"))
    assert numbers == list(range(24, 32))


def test_a_renewal_whose_answer_was_lost_is_ours():
    store, clock = memory_store(), Clock()
    mine = holder(store, "first", clock)
    mine.acquire()
    mine._write(Record(2, "first", "first", "held", clock.now))
    clock.now += 30
    assert mine.renew().number == 3


def test_many_who_want_it_at_once_get_one_winner(tmp_path):
    clock = Clock()
    claimants = [holder(Store(str(tmp_path)), f"claimant {i}", clock) for i in range(8)]
    with ThreadPoolExecutor(8) as executor:
        outcomes = list(executor.map(lambda claimant: claimant.acquire(), claimants))
    assert sum(isinstance(outcome, Record) for outcome in outcomes) == 1


UNREADABLE = [b"", b'{"holder": "x", "tok', b"[]", b"{}", b"\xff" * 90, b"[" * 100_000]
UNREADABLE += [b'{"holder": "x", "token": "x", "state": "held", "at": NaN}']


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_lease_that_cannot_be_read_is_waited_for_and_then_followed(tmp_path, content):
    store, clock = Store(str(tmp_path)), Clock()
    claimant = holder(store, "claimant", clock)
    store.write(claimant._path(7), content)
    held = claimant.acquire()
    assert isinstance(held, Held) and held.wait_s == LEASE_S
    assert "lease/0000000007.json cannot be read" in held.by.holder
    clock.now += LEASE_S - 1
    assert claimant.acquire().wait_s == pytest.approx(1)
    clock.now += 1
    taken = claimant.acquire()
    assert isinstance(taken, Record) and taken.number == 8


def test_a_holder_whose_lease_is_damaged_renews_it_and_whoever_waits_goes_on_waiting(tmp_path):
    store, clock = Store(str(tmp_path)), Clock()
    mine, other = holder(store, "mine", clock), holder(store, "other", clock)
    mine.acquire()
    store.write(mine._path(1), b"")
    assert isinstance(other.acquire(), Held)
    clock.now += LEASE_S / 2
    assert mine.renew().number == 2
    clock.now += LEASE_S / 2
    assert other.acquire().wait_s == LEASE_S


def test_a_number_taken_by_a_lease_that_cannot_be_read_is_lost_to_the_holder(tmp_path):
    """The number may be another's: at most one writes."""
    store, clock = Store(str(tmp_path)), Clock()
    mine = holder(store, "mine", clock)
    mine.acquire()
    store.write(mine._path(2), b"")
    with pytest.raises(LeaseLost, match="an unknown holder"):
        mine.renew()


def test_a_lease_of_a_later_version_is_refused_and_its_added_fields_are_not(tmp_path):
    store, clock = Store(str(tmp_path)), Clock()
    mine = holder(store, "mine", clock)
    told = b'{"holder": "x", "token": "x", "state": "released", "at": 0.0, "color": "red"%s}'
    store.write(mine._path(1), told % b"")
    assert mine.acquire().number == 2
    store.write(mine._path(3), told % b', "format": 2')
    with pytest.raises(RunMismatch, match="newer version of elastic_dp"):
        mine.newest()


def test_a_folder_in_place_of_a_lease_is_named(tmp_path):
    mine = holder(Store(str(tmp_path)), "mine", Clock())
    (tmp_path / "lease" / "0000000001.json").mkdir(parents=True)
    with pytest.raises(FileDamaged, match=r"0000000001.json.*Delete it"):
        mine.acquire()


def test_leases_that_were_deleted_are_followed_by_greater_numbers_than_were_used(tmp_path):
    store, clock = Store(str(tmp_path)), Clock()
    mine = Lease(store, "mine", "mine", LEASE_S, used=lambda: 20, clock=clock, wall=clock)
    assert mine.acquire().number == 21
