"""A reader takes what has gathered, and an urgent item at once."""

import threading

import pytest

from elastic_dp.telemetry.batch_queue import BatchQueue

LONG_S = 60.0


def test_items_that_are_not_urgent_are_taken_together():
    queue = BatchQueue(gather_s=0.0)
    for item in (1, 2, 3):
        queue.put(item, urgent=False)
    assert queue.take() == [1, 2, 3]
    assert len(queue) == 0 and queue.take(timeout_s=0.0) == []


@pytest.mark.timeout(30)
def test_an_urgent_item_is_taken_at_once_with_those_before_it():
    queue = BatchQueue(gather_s=LONG_S)
    taken = []
    reader = threading.Thread(target=lambda: taken.append(queue.take()), daemon=True)
    reader.start()
    queue.put(1, urgent=False)
    queue.put(2, urgent=True)
    reader.join()
    assert taken == [[1, 2]]


@pytest.mark.timeout(30)
def test_an_item_that_is_not_urgent_is_taken_when_others_have_had_time_to_come():
    queue = BatchQueue(gather_s=0.01)
    queue.put(1, urgent=False)
    assert queue.take() == [1]


def test_only_the_first_and_urgent_items_wake_the_reader():
    queue = BatchQueue(gather_s=0.0)
    woken = []
    queue._changed.notify = lambda: woken.append(len(queue))
    for urgent in (False, False, False, True, True):
        queue.put(None, urgent=urgent)
    assert woken == [1, 4]
