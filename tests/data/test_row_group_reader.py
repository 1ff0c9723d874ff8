"""The budget, the order of reading, and that nobody waits for ever."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from elastic_dp.data.pipeline.row_group_reader import READ_THREADS, PlanChanged, RowGroupReader
from elastic_dp.errors import BadShard, StorageError
from tests.data.row_groups import FakeRowGroups
from tests.patience import PATIENCE_S, eventually


def opened(groups: FakeRowGroups, memory_bytes: int, **options) -> RowGroupReader:
    return RowGroupReader(groups, memory_bytes, **({"threads": 4} | options))


def take_all(reader: RowGroupReader, key, groups) -> dict:
    """Take row groups that are needed at one time; they are released, and stay alive here."""
    found: dict = {}
    while len(found) < len(groups):
        here = reader.take(key, [group for group in groups if group not in found])
        reader.release(key, here)
        found |= here
    return found


def read_all(reader: RowGroupReader, key, groups) -> None:
    """Read row groups, copy rows from each and drop it: nothing stays alive here."""
    todo = set(groups)
    while todo:
        numbers = list(reader.take(key, sorted(todo)))
        reader.release(key, numbers)
        todo -= set(numbers)


def test_row_groups_are_read_in_the_order_in_which_they_are_needed():
    groups = FakeRowGroups([10] * 8)
    reader = opened(groups, 1 << 20, threads=1)
    reader.plan([((2, 0), [5, 1]), ((3, 0), [1, 7]), ((1, 0), [3])])
    take_all(reader, (3, 0), [1, 7])
    assert groups.reads == [3, 5, 1, 7] or groups.reads == [3, 1, 5, 7]
    reader.close()


@pytest.mark.parametrize(("fit", "at_once"), [(80, READ_THREADS), (5, 5)])
def test_reads_in_flight_are_limited_by_threads_and_memory(fit, at_once):
    groups, lock, opens = FakeRowGroups([10] * 80), threading.Lock(), threading.Event()
    inside = most = 0

    def before(number: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        assert opens.wait(PATIENCE_S)
        with lock:
            inside -= 1

    groups.before = before
    reader = opened(groups, fit * int(groups.nbytes[0]), threads=READ_THREADS)
    reader.plan([((step, 0), [step]) for step in range(80)])
    eventually(lambda: inside == at_once)
    opens.set()
    for step in range(80):
        read_all(reader, (step, 0), [step])
    reader.close()
    assert most == at_once


def test_reads_at_once_follow_a_limit_that_changes():
    groups, goes = FakeRowGroups([10] * 60), threading.Semaphore(0)
    inside, limit = set[int](), 2

    def before(number: int) -> None:
        inside.add(number)
        assert goes.acquire(timeout=PATIENCE_S)
        inside.discard(number)

    groups.before = before
    reader = opened(groups, 1 << 20, threads=8, at_once=lambda: limit)
    reader.plan([((step, 0), [step]) for step in range(60)])
    eventually(lambda: len(inside) == 2)
    limit = 8  # it is looked at when a read ends
    goes.release()
    eventually(lambda: len(inside) == 8)
    limit = 1

    def ends_another() -> None:
        if not goes._value:  # the one before has gone
            goes.release()

    eventually(lambda: len(inside) == 1 or ends_another())  # the others end, and begin no more
    goes.release(60)
    for step in range(60):
        read_all(reader, (step, 0), [step])
    reader.close()


def test_row_group_that_no_plan_needs_is_dropped_and_a_needed_one_stays():
    groups = FakeRowGroups([10] * 4)
    reader = opened(groups, 1 << 20)
    reader.plan([((1, 0), [0, 1]), ((2, 0), [1])])
    for key, needed in (((1, 0), [0, 1]), ((2, 0), [1])):
        contents = take_all(reader, key, needed)
        assert [contents[g]["id"][0] for g in needed] == [10 * g for g in needed]
        del contents
        assert reader.budget.held == (groups.nbytes[1] if key == (1, 0) else 0)
    assert groups.live_bytes == 0
    assert sorted(groups.reads) == [0, 1]
    reader.close()


def test_a_row_group_is_its_takers_own_if_nobody_else_needs_it():
    groups = FakeRowGroups([10] * 4)
    reader = opened(groups, 1 << 20)
    reader.plan([((1, 0), [0, 1]), ((2, 0), [1])])
    here = reader.take((1, 0), [0, 1])
    while len(here) < 2:
        here |= reader.take((1, 0), [number for number in (0, 1) if number not in here])
    assert reader.own((1, 0), 1) is None, "somebody else needs it"
    assert reader.own((1, 0), 0) == groups.nbytes[0]
    assert reader.budget.held == groups.nbytes[1]
    reader.release((1, 0), [1])
    again = take_all(reader, (3, 0), [0])  # it is another one now
    assert again[0]["id"] is not here[0]["id"] and groups.reads.count(0) == 2
    reader.close()


def test_a_row_group_that_two_hold_is_neithers_own():
    groups = FakeRowGroups([10])
    reader = opened(groups, 1 << 20)
    reader.plan([((1, 0), [0]), ((2, 0), [0])])
    for key in ((1, 0), (2, 0)):
        reader.take(key, [0])
    reader.forget([(1, 0)])  # its need is gone, while it copies rows
    assert reader.own((2, 0), 0) is None
    for key in ((1, 0), (2, 0)):
        reader.release(key, [0])
    assert reader.budget.held == 0
    reader.close()


def test_row_group_that_is_kept_for_later_has_no_owner():
    groups = FakeRowGroups([10])
    reader = opened(groups, 1 << 20, keep=True)
    reader.take((1, 0), [0])
    assert reader.own((1, 0), 0) is None
    reader.release((1, 0), [0])
    reader.close()


def test_kept_ones_give_way_when_memory_is_wanted():
    groups = FakeRowGroups([10] * 4)
    reader = opened(groups, int(groups.nbytes[0]) * 2, keep=True)
    for number in (0, 1, 0, 1, 2, 1):
        reader.take((1, number), [number])
        reader.release((1, number), [number])
    assert groups.reads == [0, 1, 2]
    assert groups.live_bytes <= reader.budget.limit
    reader.close()


def test_urgent_row_group_takes_memory_from_those_needed_later():
    groups = FakeRowGroups([10] * 4)
    reader = opened(groups, int(groups.nbytes[0]) * 2)
    reader.plan([((9, 0), [0, 1])])
    read_all(reader, (9, 0), [0, 1])
    reader.plan([((8, 0), [0, 1])])
    read_all(reader, (1, 0), [2, 3])  # not planned, and needed at once
    read_all(reader, (8, 0), [0, 1])
    assert groups.peak_bytes <= reader.budget.limit
    reader.close()


def test_more_is_planned_while_there_is_room_so_that_what_is_needed_again_stays():
    """The reader does not wait until all that is planned is here: until then the first ones are
    done with, and dropped."""
    planned, done = threading.Event(), threading.Event()
    groups = FakeRowGroups([10] * 3, before=lambda number: number == 0 or done.wait(PATIENCE_S))

    def more() -> bool:
        reader.plan([((9, 0), [0])])
        planned.set()
        return False

    reader = opened(groups, 1 << 20, threads=1, more=more)
    reader.plan([((1, 0), [0]), ((2, 0), [1])])
    assert planned.wait(PATIENCE_S)
    take_all(reader, (1, 0), [0])
    done.set()
    take_all(reader, (2, 0), [1])
    take_all(reader, (9, 0), [0])
    assert groups.reads == [0, 1]
    reader.close()


@given(st.data())
@settings(max_examples=25)
def test_the_budget_is_kept_and_nobody_waits_for_ever(data):
    """Several threads take what they need, with memory for the largest row group only."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=12))
    groups = FakeRowGroups(sizes)
    needs = data.draw(
        st.lists(
            st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=30,
        )
    )
    memory = int(groups.nbytes.max())
    reader = opened(groups, memory)
    reader.plan([((step + 1, 0), needed) for step, needed in enumerate(needs)])
    keys = iter(enumerate(needs))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                item = next(keys, None)
            if item is None:
                return
            key, todo = (item[0] + 1, 0), list(item[1])
            while todo:
                here = reader.take(key, todo)
                assert all(len(content["id"]) == sizes[g] for g, content in here.items())
                taken = list(here)
                del here
                reader.release(key, taken)
                todo = [group for group in todo if group not in taken]

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "nobody gets on"
    assert groups.peak_bytes <= memory
    assert reader.budget.held == 0
    reader.close()
    assert groups.live_bytes == 0


def test_an_estimate_that_was_too_low_stops_nobody():
    groups = FakeRowGroups([10, 10])
    honest = groups.nbytes.copy()
    groups.nbytes = honest // 4
    reader = opened(groups, int(groups.nbytes.sum()))
    read = groups.read
    groups.read = lambda number: (read(number)[0], int(honest[number]))
    assert len(take_all(reader, (1, 0), [0, 1])) == 2
    reader.close()


def test_undecodable_row_group_is_handed_out_as_bad_and_not_read_again():
    groups = FakeRowGroups([10] * 3, bad=[1])
    reader = opened(groups, 1 << 20)
    reader.plan([((1, 0), [0, 1]), ((2, 0), [1, 2])])
    for key, needed in (((1, 0), [0, 1]), ((2, 0), [1, 2])):
        assert isinstance(take_all(reader, key, needed)[1], BadShard)
    assert sorted(groups.reads) == [0, 1, 2]
    reader.close()


def test_store_error_is_raised_and_the_read_is_tried_again_next_time():
    refused = [StorageError("403 AccessDenied")]

    def before(number: int) -> None:
        if number == 1 and refused:
            raise refused.pop()

    groups = FakeRowGroups([10] * 3, before=before)
    reader = opened(groups, 1 << 20)
    with pytest.raises(StorageError, match="403"):
        take_all(reader, (1, 0), [0, 1])
    assert np.array_equal(take_all(reader, (1, 0), [0, 1])[1]["id"], np.arange(10, 20))
    reader.close()


def test_only_who_waits_for_a_row_group_is_woken_when_it_arrives():
    go = threading.Event()
    groups = FakeRowGroups([10] * 8, before=lambda number: number == 0 and go.wait(PATIENCE_S))
    reader = opened(groups, 1 << 20)
    wait, waits, found = reader._arrived.wait, list[int](), dict[int, object]()

    def counted() -> None:
        waits.append(1)
        wait()

    reader._arrived.wait = counted
    waiting = threading.Thread(target=lambda: found.update(reader.take((1, 0), [0])))
    waiting.start()
    eventually(lambda: waits)
    reader.plan([((step, 0), [step]) for step in range(2, 8)])
    eventually(lambda: reader.groups_read == 6)
    assert len(waits) == 1 and not found
    go.set()
    waiting.join(PATIENCE_S)
    assert list(found) == [0]
    reader.close()


def test_thread_beyond_the_limit_leaves_the_memory_that_it_frees_to_another():
    goes = [threading.Event() for _ in range(3)]
    goes[2].set()
    readers: dict[str, int] = {}

    def before(number: int) -> None:
        readers[threading.current_thread().name] = number
        assert goes[number].wait(PATIENCE_S)

    class GrowingWhileRead(FakeRowGroups):
        reading_bytes = property(lambda self: 2 * self.nbytes)

    groups, limit = GrowingWhileRead([10] * 3, before=before), 2
    room_for_two = 4 * int(groups.nbytes[0])
    reader = opened(groups, room_for_two, threads=2, at_once=lambda: limit)
    reader.plan([((1, 0), [0]), ((2, 0), [1])])
    eventually(lambda: len(readers) == 2)
    found: dict[int, object] = {}
    waiting = threading.Thread(target=lambda: found.update(reader.take((3, 0), [2])))
    waiting.start()
    eventually(lambda: (3, 0) in reader._resident.waiting)
    limit = 1
    stays, ends = (readers[f"elastic-dp-read-{number}"] for number in (0, 1))
    goes[stays].set()
    eventually(lambda: reader.groups_read == 1)
    goes[ends].set()
    waiting.join(PATIENCE_S)
    assert list(found) == [2]
    reader.close()


def test_a_changed_plan_wakes_who_waits_and_so_does_closing():
    go, reading = threading.Event(), threading.Event()

    def before(number: int) -> None:
        reading.set()
        go.wait(PATIENCE_S)

    reader = opened(FakeRowGroups([10] * 3, before=before), 1 << 20)
    woken: list[str] = []

    def wait(key):
        with pytest.raises(PlanChanged):
            reader.take(key, [0])
        woken.append(str(key))

    reader.plan([((1, 0), [0])])
    first = threading.Thread(target=wait, args=((1, 0),))
    first.start()
    assert reading.wait(PATIENCE_S)
    while (1, 0) not in reader._resident.waiting:
        pass
    reader.forget([(9, 9)])
    first.join(PATIENCE_S)
    second = threading.Thread(target=wait, args=((2, 0),))
    second.start()
    while (2, 0) not in reader._resident.waiting:
        pass
    closing = threading.Thread(target=reader.close)
    closing.start()
    second.join(PATIENCE_S)
    go.set()
    closing.join(PATIENCE_S)
    assert woken == ["(1, 0)", "(2, 0)"]
    assert not any(thread.is_alive() for thread in reader._threads)
