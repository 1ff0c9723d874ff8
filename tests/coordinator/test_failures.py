"""Losses and errors of user code: their budgets, what is counted again when the cause is known, and
what fails the run."""

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Cause
from tests.coordinator.scenarios import Scenario, trio


def test_losses_without_a_step_are_bounded():
    scenario = Scenario(size=1, max_losses_without_progress=3, min_workers=1)
    for number in range(1, 9):
        scenario.wait(40.0)
        if scenario.coordinator.phase == "over":
            break
        scenario.tell(m.WorkerStarted(f"w{number}"))
        scenario.lost(f"w{number}")
    assert "losses" in scenario.ever(m.FailRun)[0].error
    assert number == 5


def test_losses_at_once_are_one_incident():
    scenario = Scenario(size=8, max_losses_without_progress=2)
    names = [f"w{n}" for n in range(1, 9)]
    scenario.running(*names)
    scenario.lost(*names[1:])
    assert not scenario.ever(m.FailRun)
    scenario.stopped("w1")
    assert scenario.coordinator.phase == "forming", scenario.coordinator.reason
    assert scenario.members == ["w1"]


def test_user_errors_fail_the_run_once():
    scenario = trio()
    scenario.tell(m.WorkerFailed("w1", "KeyError: 'x'", "tb"))
    scenario.tell(m.WorkerFailed("w2", "KeyError: 'x'", "tb"))
    assert scenario.ever(m.FailRun) == [m.FailRun("KeyError: 'x'", "tb", "w1")]


def test_a_user_error_is_tried_again_by_another_where_the_job_says_so():
    scenario = trio(max_user_errors=1)
    scenario.tell(m.WorkerFailed("w1", "KeyError: 'x'", "tb"))
    scenario.tell(m.WorkerFailed("w2", "KeyError: 'x'", "tb"))  # of the same step
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w1", "w2"]
    assert not scenario.ever(m.FailRun)
    scenario.stopped("w3")
    scenario.lost("w1", "w2")
    scenario.wait(1.0, "w3", phase="wait")
    assert scenario.members == ["w3"]
    scenario.hear("w3", step=1)
    scenario.tell(m.WorkerFailed("w3", "KeyError: 'y'", "tb"))  # after a step
    scenario.lost("w3")
    assert scenario.ever(m.FailRun)[0] == m.FailRun("KeyError: 'y'", "tb", "w3"), "nobody is left"


def test_user_errors_have_a_budget_of_their_own():
    scenario = Scenario.training("w1", "w2", max_user_errors=2, max_losses_without_progress=1)
    for number in (2, 3, 4):
        assert not scenario.ever(m.FailRun)
        scenario.tell(m.WorkerFailed(f"w{number}", f"KeyError: {number}", "tb"))
        if number < 4:
            scenario.stopped("w1")
            scenario.lost(f"w{number}")
            scenario.wait(2.0, "w1", phase="wait")
            scenario.ready(f"w{number + 1}")
            scenario.wait(0.1)
            scenario.hear(*scenario.members)
    assert scenario.ever(m.FailRun) == [m.FailRun("KeyError: 4", "tb", "w4")]


def test_an_error_of_ours_is_never_tried_again():
    scenario = trio(max_user_errors=5)
    scenario.tell(m.WorkerFailed("w1", "LossError: it is NaN", "tb", ("it is NaN",)))
    assert scenario.ever(m.FailRun)[0].facts == ("it is NaN",)


def die_one_by_one(scenario, times, *how, step=0):
    """A worker after the other beside w1, which survives; returns how many died before the run
    failed."""
    scenario.running("w1", "w2", step=step)
    for died in range(1, times + 1):
        scenario.tell(m.WorkerLost(f"w{died + 1}", "killed", *how))
        if scenario.ever(m.FailRun):
            return died
        scenario.stopped("w1", step=step)
        scenario.wait(40.0, "w1", phase="wait", step=step)
        scenario.ready(f"w{died + 2}")
        scenario.wait(0.1)
        scenario.hear(*scenario.members, step=step)
    return times


BLAMED = "4 workers died one after another while running virtual worker 5 of step 8"


@pytest.mark.parametrize(
    ("limits", "times", "how", "step", "died", "said"),
    [
        ({"max_losses_without_progress": 1}, 5, [Cause.PREEMPTED], 0, 5, None),
        ({"max_out_of_memory": 2}, 9, [Cause.OUT_OF_MEMORY], 0, 3, "out of memory 3 times"),
        ({"max_losses_of_micro_batch": 3}, 9, [Cause.UNKNOWN, (8, 5)], 7, 4, BLAMED),
        ({"max_losses_of_micro_batch": 1}, 4, [Cause.UNKNOWN, (7, 5)], 7, 4, None),
    ],
    ids=["preemptions count nowhere", "memory", "a micro-batch", "one that was passed once"],
)
def test_budgets_of_losses_one_by_one(limits, times, how, step, died, said):
    scenario = Scenario(size=2, **limits)
    assert die_one_by_one(scenario, times, *how, step=step) == died
    assert said in scenario.ever(m.FailRun)[0].error if said else not scenario.ever(m.FailRun)


def test_loss_that_turns_out_to_be_a_device_fault_counts_once():
    scenario = Scenario.training("w1", "w2", "w3", max_losses_without_progress=1)
    scenario.tell(m.WorkerLost("w2", "its process ended with 70"))
    scenario.tell(m.WorkerLost("w2", "its device failed", m.Cause.DEVICE_FAULT))
    assert not scenario.ever(m.FailRun)
    scenario.stopped("w1")
    scenario.wait(40.0, "w1", phase="wait")
    scenario.ready("w4")
    scenario.wait(0.1)
    scenario.hear(*scenario.members)
    scenario.tell(m.WorkerLost("w4", "its device failed", m.Cause.DEVICE_FAULT))
    assert scenario.ever(m.FailRun)


def test_loss_out_of_memory_delays_the_replacement():
    scenario = Scenario.training("w1", "w2", max_out_of_memory=2)
    scenario.tell(m.WorkerLost("w2", "killed", m.Cause.OUT_OF_MEMORY))
    assert not scenario.of(m.StartWorker)
    scenario.stopped("w1")
    scenario.wait(1.0, "w1", phase="wait")
    assert [c.worker for c in scenario.ever(m.StartWorker)][-1] == "w3"


def test_going_back_is_no_progress_until_the_run_is_further_than_before():
    """A step that kills everyone, again and again, though a few steps lie between it and the
    checkpoint."""
    scenario = Scenario.training("w1", max_losses_without_progress=4)
    scenario.committed = 5
    scenario.hear("w1", step=9)
    for number in range(1, 6):
        assert not scenario.ever(m.FailRun)
        scenario.lost(f"w{number}")
        scenario.wait(60.0)
        scenario.ready(f"w{number + 1}")
        scenario.wait(0.1)
        for step in range(5, 10):
            scenario.hear(f"w{number + 1}", step=step)
    assert scenario.ever(m.FailRun)


def test_a_loss_that_costs_no_pause_ends_none():
    scenario = Scenario.training("w1", "w2", "w3", max_out_of_memory=5)
    scenario.tell(m.WorkerLost("w2", "killed", m.Cause.OUT_OF_MEMORY))
    scenario.lost("w3")
    assert not scenario.of(m.StartWorker)


def test_progress_that_was_heard_of_late_forgives_no_later_micro_batch():
    scenario = Scenario.training("w1", "w2", "w3", max_losses_of_micro_batch=1)
    scenario.tell(m.WorkerLost("w2", "killed", micro_batch=(8, 5)))
    scenario.hear("w1", "w3", step=7)
    scenario.tell(m.WorkerLost("w3", "killed", micro_batch=(8, 5)))
    assert "of step 8" in scenario.ever(m.FailRun)[0].error


def test_worker_whose_code_fails_before_it_joins_is_replaced_and_harms_no_healthy_run():
    """A mount may be missing on its node. One that has failed again and again is not replaced."""
    scenario = Scenario.training("w1", step=3, size=2, min_workers=1)
    for number in range(2, 7):
        worker = f"w{number}"
        scenario.tell(m.WorkerStarted(worker))
        scenario.tell(m.WorkerFailed(worker, "OSError: no such file", "traceback of " + worker))
        assert [c.worker for c in scenario.of(m.EvictWorker)] == [worker]
        assert any("traceback of " + worker in c.text for c in scenario.of(m.Explain))
        scenario.hear("w1", step=3 + number)
        scenario.tell(m.WorkerLost(worker, "killed"))
        if f"w{number + 1}" not in [c.worker for c in scenario.ever(m.StartWorker)]:
            break
    assert number == 5, "three are replaced"
    assert scenario.coordinator.phase == "running" and not scenario.ever(m.FailRun)
    scenario.tell(m.SizeRequested(2))
    assert scenario.of(m.StartWorker)


def test_worker_whose_code_fails_before_anybody_trains_fails_the_run():
    scenario = Scenario(size=2)
    scenario.tell(m.WorkerStarted("w1"))
    scenario.tell(m.WorkerFailed("w1", "OSError: no such file", "traceback"))
    assert [c.error for c in scenario.of(m.FailRun)] == ["OSError: no such file"]


def counted(scenario):
    failures = scenario.coordinator._failures
    return failures.losses.incidents, failures.memory.incidents


@pytest.mark.parametrize(
    ("cause", "then"), [(Cause.PREEMPTED, (1, 0)), (Cause.OUT_OF_MEMORY, (1, 1))]
)
def test_loss_is_counted_again_when_its_cause_is_known(cause, then):
    scenario = Scenario.training("w1", "w2")
    scenario.lost("w1")
    assert counted(scenario) == (1, 0)
    scenario.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scenario) == then
    scenario.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scenario) == then, "once"


def test_micro_batch_reported_after_the_death_counts_once():
    """A worker's pipe may end before its last heartbeat arrives, or after; the loss counts once."""
    scenario = Scenario.training("w1", "w2", max_losses_of_micro_batch=1)
    for worker, reports in (("w1", [None, (1, 3), (1, 3)]), ("w2", [(1, 3), None])):
        assert "died while" not in scenario.coordinator.reason
        for at in reports:
            scenario.tell(m.WorkerLost(worker, "reset", micro_batch=at))
    assert (
        "2 workers died one after another while running virtual worker 3 of step 1"
        in scenario.coordinator.reason
    )


def test_a_step_ends_the_pause_after_losses():
    scenario = Scenario.training("w1", "w2")
    scenario.coordinator._failures.retry_at = scenario.now + 20.0
    scenario.hear("w1", step=1)
    scenario.lost("w1")
    assert scenario.of(m.StartWorker)
