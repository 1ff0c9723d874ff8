"""No thread ends unseen."""

import queue

from elastic_dp.errors import FileDamaged
from elastic_dp.threads import background, take_all
from tests.patience import PATIENCE_S


def _run(error, failed):
    def run():
        if error is not None:
            raise error

    thread = background("tester", run, failed)
    assert thread.daemon
    thread.start()
    thread.join(PATIENCE_S)


def test_a_thread_that_fails_is_printed_and_told_to_its_owner(capsys):
    told, error = [], ZeroDivisionError("by nothing")
    _run(error, told.append)
    assert told == [error]
    said = capsys.readouterr().err
    assert "the thread 'tester' ended" in said and "ZeroDivisionError: by nothing" in said


def test_a_thread_that_would_exit_is_told_to_its_owner(capsys):
    told = []
    _run(SystemExit(3), told.append)
    assert [str(error) for error in told] == ["SystemExit(3)"]
    assert "SystemExit: 3" in capsys.readouterr().err


def test_an_error_of_ours_is_left_to_its_owner(capsys):
    told, error = [], FileDamaged("x.json", "it is empty", "Delete it")
    _run(error, told.append)
    assert told == [error] and capsys.readouterr().err == ""
    _run(error, None)
    assert "x.json is damaged: it is empty. Delete it" in capsys.readouterr().err


def test_a_thread_that_ends_tells_nothing():
    told = []
    _run(None, told.append)
    assert told == []


def test_items_that_come_while_the_reader_gathers_are_taken_together():
    waiting = queue.SimpleQueue()
    assert take_all(waiting, 0.0) == []
    waiting.put(1)
    assert take_all(waiting, None, lambda: waiting.put(2)) == [1, 2]
    assert waiting.empty()
