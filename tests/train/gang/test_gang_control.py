"""What the first process of a worker does with what its others say: no loss of a process is told as
an error of user code, and no process goes another way unnoticed."""

import queue
from multiprocessing import Pipe

import pytest

from elastic_dp.coordinator.messages import WorkerFailed
from elastic_dp.errors import ClusterError, GroupAborted, LoopError
from elastic_dp.extensions.gangs import gang_control
from elastic_dp.extensions.gangs.gang_control import (
    Arrived,
    Faulted,
    LeaderControl,
    Refused,
    Signal,
    Waiting,
)
from tests.patience import PATIENCE_S

FAILED = WorkerFailed("w1", "RuntimeError: Connection closed by peer", "", None)


@pytest.fixture
def leader(monkeypatch):
    """Returns the control, the other ends of its connections, and what it passes on."""
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    told = queue.SimpleQueue()
    control = LeaderControl()
    control.lead(ours, told.put, told.put, lambda *fault: told.put(fault), told.put)
    yield control, theirs, told
    monkeypatch.setattr(gang_control.os, "_exit", lambda code: None)
    control.release("the test has ended")
    for connection in theirs:
        connection.close()


def heard(connection):
    assert connection.poll(PATIENCE_S)
    return connection.recv()


def test_failure_of_one_process_is_passed_on_once_all_have_shown_that_they_live(leader):
    _, theirs, failures = leader
    theirs[0].send(FAILED)
    assert [heard(connection) for connection in theirs] == 2 * [Signal.ARE_YOU_THERE]
    theirs[0].send(Signal.HERE)
    with pytest.raises(queue.Empty):
        failures.get(timeout=0.2)  # the other one may have died, and caused it
    theirs[1].send(Signal.HERE)
    assert failures.get(timeout=PATIENCE_S) == FAILED


def test_fault_of_a_device_is_told_before_its_process_ends(leader):
    _, theirs, told = leader
    theirs[1].send(Faulted("device fault", "CUDA error"))
    assert told.get(timeout=PATIENCE_S) == ("device fault", "CUDA error")


def test_wait_of_a_process_for_the_store_is_told(leader):
    _, theirs, told = leader
    theirs[1].send(Waiting("cannot read"))
    assert told.get(timeout=PATIENCE_S) == "cannot read"


def test_process_at_another_point_is_an_error_that_says_what_to_do(leader):
    control, theirs, _ = leader
    theirs[0].send(Arrived("attempt", None))
    theirs[1].send(Arrived("exchange", b""))
    with pytest.raises(LoopError, match=r"process 2 .* come to 'exchange'.* call ctx\.evaluate on"):
        control.may_attempt(1)


def test_process_that_leaves_sends_the_others_away(leader):
    control, theirs, _ = leader
    theirs[0].send(Arrived("commit", None))
    theirs[1].send(Signal.LEAVING)
    with pytest.raises(GroupAborted, match="process 2 of this worker left"):
        control.commit()
    theirs[0].send(Signal.LEAVING)  # as it does when it is refused
    control.leave()
    said = [heard(theirs[0])]
    while said[-1] is not Signal.ALL_LEFT:
        said.append(heard(theirs[0]))
    (refused,) = (one for one in said if isinstance(one, Refused))
    assert isinstance(refused.error, GroupAborted)


def test_process_that_did_not_start_is_named_with_its_own_traceback(leader):
    control, theirs, _ = leader
    theirs[0].send(Arrived("exchange", b""))
    theirs[1].send("Traceback (most recent call last):\n  in job\nModuleNotFoundError: No module\n")
    theirs[1].close()  # which ends this process only if nobody knows why
    told = r"process 2 of this worker did not start: ModuleNotFoundError: No module\n.*in job"
    with pytest.raises(ClusterError, match=f"(?s){told}"):
        control.exchange(b"")
