"""Units move from whoever has them to whoever needs them: all of them or none, whoever dies."""

import queue
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.errors import GroupAborted
from elastic_dp.train.state.state_moves import Move, StateUnit, plan_rounds, ranks_with, units_of
from tests.patience import PATIENCE_S


class Network:
    """Connects members in memory. Once one has died, all operations that need it fail."""

    def __init__(self, size):
        self.size = size
        self.dead = threading.Event()
        ranks = range(size)
        self.links = [[queue.SimpleQueue() for _ in ranks] for _ in ranks]


class Member:
    """One side of a `Network`, with the methods of a `ProcessGroup` that a move calls. It dies with
    its operation number `last`."""

    on_device = None

    def __init__(self, network, rank, last):
        self.rank, self.world_size = rank, network.size
        self._network, self._last, self._count = network, last, 0
        self._launched = 0
        self._early = {}  # of later operations, by sender and number

    def all_to_all(self, output, input, output_sizes, input_sizes):
        self._operation()
        for link, part in zip(
            self._network.links[self.rank], input.split(list(input_sizes)), strict=True
        ):
            link.put((self._launched, part.clone()))
        self._launched += 1
        number = self._launched - 1

        def receive():
            for sender, part in enumerate(output.split(list(output_sizes))):
                part.copy_(self._from(sender, number))

        return receive

    def wait(self, operation):
        self._operation()
        operation()

    def gather_equal(self, payload):
        self._operation()
        for link in self._network.links[self.rank]:
            link.put((self._launched, payload))
        self._launched += 1
        return [self._from(sender, self._launched - 1) for sender in range(self.world_size)]

    def _operation(self):
        if self._count == self._last:
            self._network.dead.set()
        self._count += 1
        if self._network.dead.is_set():
            raise GroupAborted("a member has died")

    def _from(self, sender, number):
        """What a member has sent in its operation of this number, as the tags of Gloo tell."""
        link = self._network.links[sender][self.rank]
        while (sender, number) not in self._early:
            try:
                told, content = link.get(timeout=0.02)
            except queue.Empty:
                if self._network.dead.is_set():
                    raise GroupAborted("a member has died") from None
            else:
                self._early[sender, told] = content
        return self._early.pop((sender, number))


def of_each(size, dies, does):
    """What `does` returns on each member, or its error. `dies`: a rank, and at which operation."""
    network, found = Network(size), [None] * size

    def run(rank):
        last = dies[1] if dies and dies[0] == rank else None
        try:
            found[rank] = does(Member(network, rank, last))
        except Exception as error:
            network.dead.set()
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


@st.composite
def cases(draw):
    """Who has and who needs each unit, the sizes of the units, if they are known exactly, a budget,
    and who dies when."""
    size = draw(st.integers(1, 5))
    ranks, some = (st.sets(st.integers(0, size - 1), min_size=least) for least in (0, 1))
    count = draw(st.integers(0, 8))
    have = [draw(some) for _ in range(count)]
    need = [draw(ranks) for _ in range(count)]
    sizes = [draw(st.integers(0, 40)) for _ in range(count)]
    dies = draw(st.none() | st.tuples(st.integers(0, size - 1), st.integers(0, 30)))
    exact = [draw(st.booleans()) for _ in range(count)]
    return size, have, need, sizes, exact, draw(st.integers(1, 60)), dies


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from((0, 1, 3)))
def test_all_who_need_a_unit_get_it_or_all_fail(case, rounds):
    """`rounds`: in each step; 0: all at once."""
    size, have, need, sizes, exact, budget, dies = case
    contents = [torch.full((n,), 1 + k, dtype=torch.uint8) for k, n in enumerate(sizes)]

    def take_part(group):
        held = {n: one.clone() for n, one in enumerate(contents) if group.rank in have[n]}
        before, arrived = dict(held), {}

        def unit(number):
            return StateUnit(
                sizes[number] if exact[number] else 7,
                lambda: [(held | arrived)[number]],
                lambda content: arrived.__setitem__(number, content.clone()),
                exact[number],
            )

        ranks = ranks_with(group, held, len(contents))
        assert ranks == [sorted(some) for some in have]
        move = Move(group, [unit(n) for n in range(len(contents))], ranks, need, budget=budget)
        try:
            while rounds and not move.is_done:
                move.begin(rounds)
                move.take()
            nbytes = move.finish()
        finally:
            assert held == before  # nothing that a member holds is written to
            assert all(group.rank in need[n] for n in arrived)
        assert nbytes == sum(map(len, arrived.values()))
        return held | arrived

    found = of_each(size, dies, take_part)
    assert not [
        one for one in found if isinstance(one, Exception) and type(one) is not GroupAborted
    ]
    failed = [isinstance(one, GroupAborted) for one in found]
    if dies is None:
        assert not any(failed)
    for rank, held in enumerate(found):
        if not failed[rank]:  # who succeeds has all that it needs, every bit of it
            wanted = [n for n in range(len(contents)) if rank in have[n] | need[n]]
            assert sorted(held) == wanted
            assert all(held[n].equal(contents[n]) for n in wanted)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_plan_sends_each_unit_once_and_only_from_those_that_have_it(case):
    _, have, need, sizes, _, budget, _ = case
    present = [set(ranks) for ranks in have]
    for some in plan_rounds(have, need, sizes, budget):
        assert all(one.sender in present[one.unit] for one in some)
        assert not any(one.receiver in present[one.unit] for one in some)
        for role in ("sender", "receiver"):
            loads = Counter[int]()
            for one in some:
                loads[getattr(one, role)] += sizes[one.unit]
            assert all(load < budget + max(sizes) for load in loads.values())
        for one in some:
            present[one.unit].add(one.receiver)
    assert present == [set(a) | set(b) for a, b in zip(have, need, strict=True)]


@pytest.mark.parametrize(("senders", "receivers"), [(1, 63), (1, 1), (7, 1), (32, 32)])
def test_nobody_sends_much_more_than_the_state(senders, receivers):
    """One source does not send the whole state to each of many."""
    count, size = 256, 1 << 20
    everyone = range(senders + receivers)
    plan = plan_rounds([range(senders)] * count, [everyone] * count, [size] * count, 4 << 20)
    sent = Counter(one.sender for some in plan for one in some)
    assert sum(sent.values()) == count * receivers
    assert max(sent.values()) <= 1.5 * max(count, count * receivers / len(everyone))


def test_units_of_a_vector_share_its_memory():
    flat = torch.zeros(5 << 20, dtype=torch.uint8)
    units = units_of(flat)
    assert sum(unit.nbytes for unit in units) == len(flat) and len(units) == 3
    for unit in units:
        unit.write(torch.ones(unit.nbytes, dtype=torch.uint8))
    assert flat.all() and units[0].read()[0].data_ptr() == flat.data_ptr()
    assert units_of(flat[:0]) == []
