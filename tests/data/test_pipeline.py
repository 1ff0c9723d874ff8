"""What is read and dropped, what may wait, and that nobody waits for ever."""

import threading
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from elastic_dp.config import DataConfig
from elastic_dp.data.datasets.opening import stream_of
from elastic_dp.data.pipeline.block_memory import BlockMemory
from elastic_dp.data.pipeline.planner import STEPS_AHEAD, Planner
from elastic_dp.errors import StorageError
from elastic_dp.sampling.order import Order
from tests.data.row_groups import FakeRowGroups
from tests.patience import PATIENCE_S, eventually

ROWS = 10  # of a row group: one micro-batch


def a_memory(fit, keep=False):
    """`fit`: row groups that it has room for."""
    groups = FakeRowGroups([ROWS] * 8)
    return BlockMemory(groups, fit * int(groups.nbytes[0]), keep)


def read(memory):
    """Read all that may be read now."""
    found = []
    while (number := memory.next_to_read()) is not None:
        memory.landed(number, {"x": number}, int(FakeRowGroups([ROWS]).nbytes[0]))
        found.append(number)
    return found


def copy(memory, key, number):
    """Lend a row group and give it back. Return whether it might be kept."""
    content, may_keep = memory.lend(key, number, alone=False)
    assert content == {"x": number}
    memory.give_back(key, number, content)
    return bool(may_keep)


def test_row_groups_are_read_in_the_order_in_which_they_are_needed():
    memory = a_memory(8)
    for key, numbers in (((2, 0), [5, 1]), ((3, 0), [1, 7]), ((1, 0), [3])):
        memory.add(key, numbers)
    assert read(memory) == [3, 1, 5, 7]


def test_what_nobody_needs_is_dropped_or_stays_until_its_room_is_wanted():
    for keep, again in ((False, [0, 1]), (True, [])):
        memory = a_memory(2, keep)
        for key, numbers in (((1, 0), [0, 1]), ((2, 0), [0, 1]), ((3, 0), [2])):
            memory.add(key, numbers)
            assert read(memory) == ([0, 1] if key == (1, 0) else again if key[0] == 2 else [2])
            for number in numbers:
                assert copy(memory, key, number) != keep, "it may be kept by whom it is lent to"
        assert memory.held == (memory.limit if keep else 0) and memory.needed == 0


def test_only_who_needs_a_row_group_alone_may_keep_it():
    memory = a_memory(4)
    memory.add((1, 0), [0])
    memory.add((2, 0), [0])
    read(memory)
    assert not copy(memory, (1, 0), 0)
    content, nbytes = memory.lend((2, 0), 0, alone=False)
    assert content and nbytes == memory.held and memory.content(0) is None
    memory.add((3, 0), [0])  # it is another one now
    assert read(memory) == []
    memory.give_back((2, 0), 0, None)
    assert memory.held == 0 and read(memory) == [0]


def test_what_is_changed_is_lent_to_nobody_else_and_takes_its_place():
    memory = a_memory(4)
    for key in ((1, 0), (2, 0), (3, 0)):
        memory.add(key, [0])
    read(memory)
    memory.lend((1, 0), 0, alone=False)
    assert memory.lend((2, 0), 0, alone=True) is None
    memory.give_back((1, 0), 0, {"x": 0})
    assert memory.lend((2, 0), 0, alone=True)[1] == 0
    assert memory.content(0) is None
    memory.give_back((2, 0), 0, {"x": "changed"})
    assert memory.lend((3, 0), 0, alone=False)[0] == {"x": "changed"}


def test_a_row_group_that_is_waited_for_takes_memory_from_those_needed_later():
    memory = a_memory(2)
    memory.add((9, 0), [0, 1])
    assert read(memory) == [0, 1]
    memory.add((1, 0), [2])
    assert read(memory) == [], "nobody waits for it yet"
    memory.waiting = {(1, 0)}
    assert read(memory) == [2] and memory.evicted == 1
    assert memory.held == memory.limit


def test_one_that_does_not_fit_is_read_if_nothing_can_be_dropped():
    memory = a_memory(0)
    memory.add((1, 0), [0])
    assert read(memory) == []
    memory.waiting = {(1, 0)}
    assert read(memory) == [0]


def a_plan(ahead_bytes):
    """One step of 64 micro-batches, each a chunk of its own."""
    source = SimpleNamespace(
        last_step=1,
        steps_per_epoch=1,
        num_rows=64,
        locate=lambda steps, v: [(None, 1)],
        parts=None,
    )
    plan = Planner(source, micro_batch_size=1, ahead_bytes=ahead_bytes, rows_at_once=0)
    plan.move(1, set(range(64)))
    return plan


def made(plan):
    """Make all chunks for which there is room. Return their virtual workers."""
    found = []
    while (chunk := plan.begin_next()) is not None:
        found += [m.slot[1] for m in chunk.micro_batches]
        plan.end(chunk, 1 << 20)
    return found


def test_what_waits_is_limited_but_for_a_few_of_the_present_step():
    plan = a_plan(ahead_bytes=8 << 20)
    assert made(plan) == [*range(8)]
    plan.taken([(1, 0)])
    assert made(plan) == [8]
    assert made(a_plan(ahead_bytes=0)) == [*range(STEPS_AHEAD)]


def test_a_micro_batch_that_somebody_waits_for_needs_no_room():
    plan = a_plan(ahead_bytes=8 << 20)
    assert len(made(plan)) == 8
    for virtual_worker in (50, 70):  # planned, and not
        plan.want((1, virtual_worker))
        assert made(plan) == [virtual_worker]


def test_few_epochs_of_few_rows_are_planned_at_once():
    asked = []

    def locate(steps, _):
        asked.append(steps)
        return [(None, 1)] * len(steps)

    source = SimpleNamespace(
        last_step=None, steps_per_epoch=100, num_rows=100, locate=locate, parts=None
    )
    plan = Planner(source, micro_batch_size=1, ahead_bytes=0, rows_at_once=0)
    plan.move(1, {0})
    assert asked == [range(1, 201)]
    while plan.may_grow:
        plan.extend()
    assert asked[-1] == range(601, 801)


def opened(groups, transform=None):
    config = DataConfig(
        "fake://", micro_batch_size=ROWS, shuffle="none", epochs=1, transform=transform
    )
    order = Order(group_rows=groups.rows, virtual_workers=1, micro_batch_size=ROWS, shuffle="none")
    return stream_of(config, groups, order)


def take_all(data):
    for step in range(1, data.steps_per_epoch + 1):
        assert data.batch(step, 0)["id"][0] == ROWS * (step - 1)


@pytest.mark.parametrize("fit", [80, 5])
def test_reads_in_flight_are_limited_by_threads_and_memory(fit):
    groups, opens, inside = FakeRowGroups([ROWS] * 80, threads=16), threading.Event(), set[int]()
    most = 0

    def before(number):
        nonlocal most
        inside.add(number)
        most = max(most, len(inside))
        assert opens.wait(PATIENCE_S)
        inside.discard(number)

    groups.before = before
    data = opened(groups)
    data._pipeline.memory.limit = fit * int(groups.nbytes[0])
    data.read_ahead(1, [0])
    eventually(lambda: len(inside) == min(fit, 16))
    opens.set()
    take_all(data)
    assert most <= min(fit, 16)
    assert groups.peak_bytes <= 80 * int(groups.nbytes[0])


def test_reading_threads_follow_a_limit_that_changes():
    groups, goes = FakeRowGroups([ROWS] * 60), threading.Semaphore(0)
    inside, limit = set[int](), 2

    def before(number):
        inside.add(number)
        assert goes.acquire(timeout=PATIENCE_S)
        inside.discard(number)

    groups.before = before
    data = opened(groups)
    pipeline = data._pipeline
    groups.threads = lambda: limit
    data.read_ahead(1, [0])
    eventually(lambda: len(inside) == 2)
    for limit in (8, 1):  # it is looked at when a read ends
        goes.release(10)
        eventually(lambda wanted=limit: len(inside) == wanted)
    goes.release(60)
    take_all(data)
    assert max(pipeline._readers, 1) == 1


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_the_budget_is_kept_and_nobody_waits_for_ever(data):
    """Micro-batches of several row groups, with memory for the largest of these only."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=12))
    groups = FakeRowGroups(sizes)
    shuffle = data.draw(st.sampled_from(["none", "rows", "full"]))
    order = Order(
        group_rows=sizes, virtual_workers=3, micro_batch_size=4, shuffle=shuffle, tail="short"
    )
    config = DataConfig("fake://", micro_batch_size=4, shuffle=shuffle, tail="short")
    opened = stream_of(config, groups, order)
    opened._pipeline.memory.limit = int(groups.nbytes.max())
    opened.read_ahead(1, [0, 1, 2])
    seen = []
    for step in range(1, order.steps_per_epoch + 1):
        for v in data.draw(st.permutations(range(3))):
            if opened.rows(step, v):
                seen += opened.batch(step, v)["id"].tolist()
    assert sorted(seen) == [*range(sum(sizes))]
    opened.close()
    assert groups.peak_bytes <= int(groups.nbytes.max()) and groups.live_bytes == 0


def test_a_store_error_is_raised_and_the_read_is_tried_again_next_time():
    refused = [StorageError("403 AccessDenied")]

    def before(number):
        if number == 1 and refused:
            raise refused.pop()

    data = opened(FakeRowGroups([ROWS] * 3, before=before))
    with pytest.raises(StorageError, match="403"):
        data.batch(2, 0)
    take_all(data)


def test_row_groups_that_came_before_a_store_error_are_there_next_time():
    """All of a micro-batch are in memory when it is begun, and the read of the last one failed."""
    go, refused = threading.Event(), [StorageError("403 AccessDenied")]

    def before(number):
        if number in (0, 2):  # the two micro-batches that are made first
            assert go.wait(PATIENCE_S)
        if number == 5 and refused:
            raise refused.pop()

    groups = FakeRowGroups([ROWS // 2] * 6, before=before, threads=6)
    data = opened(groups, transform=lambda batch, rng: batch)  # one by one
    data.read_ahead(1, [0])
    eventually(lambda: data.counts["row_groups_read"] == 4)
    go.set()
    for step in (1, 2):
        data.batch(step, 0)
    with pytest.raises(StorageError, match="403"):
        data.batch(3, 0)
    assert data.batch(3, 0)["id"].tolist() == [*range(2 * ROWS, 3 * ROWS)]


def test_closing_wakes_who_waits_and_ends_all_threads():
    go, reading = threading.Event(), threading.Event()

    def before(number):
        reading.set()
        go.wait(PATIENCE_S)

    data = opened(FakeRowGroups([ROWS] * 3, before=before))
    woken = []

    def wait():
        with pytest.raises(AssertionError, match="was closed"):
            data.batch(1, 0)
        woken.append("yes")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert reading.wait(PATIENCE_S)
    closing = threading.Thread(target=data.close)
    closing.start()
    waiting.join(PATIENCE_S)
    go.set()
    closing.join(PATIENCE_S)
    assert woken
    assert not any(thread.is_alive() for thread in data._pipeline._threads)
