"""Workers that hold a part of a sharded state: two hold each part, so one leaves at a time; if both
are lost, the run goes back to its newest checkpoint."""

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from elastic_dp.coordinator.planning.member_selection import select_members
from elastic_dp.coordinator.workers.worker_state import Stage, WorkerState
from tests.coordinator.scenarios import Scenario

FOUR = ("w1", "w2", "w3", "w4")


def training(**config):
    scenario = Scenario.training(*FOUR, size=4, min_workers=1, **config)
    scenario.hear(*FOUR, step=3)
    return scenario


def sizes_until(scenario, size, *, partial):
    """The sizes of the generations that follow, as each ends after its next step."""
    sizes, step = [], 3
    while len(scenario.members) != size and len(sizes) < 5:
        step += 1
        scenario.stopped(*scenario.members, step=step, partial=partial)
        scenario.wait(0.2)
        sizes.append(len(scenario.members))
        scenario.hear(*scenario.members, step=step)
    return sizes


@pytest.mark.parametrize(("partial", "sizes"), [(True, [3, 2, 1]), (False, [1])])
def test_workers_with_a_part_of_the_state_leave_one_at_a_time(partial, sizes):
    scenario = training()
    scenario.tell(m.SizeRequested(1))
    assert sizes_until(scenario, 1, partial=partial) == sizes
    assert not scenario.ever(m.FindCheckpoint)[1:], "no state was lost"


def test_workers_that_drain_with_a_part_of_the_state_leave_one_at_a_time():
    scenario = training()
    for worker in ("w2", "w3"):
        scenario.tell(m.DrainNoticed(worker, scenario.now + 60.0))
    scenario.ready("w5", "w6")
    for step in (4, 5):
        for worker in scenario.members:
            has_state = worker in FOUR
            scenario.stopped(worker, step=step, has_state=has_state, partial=has_state)
        scenario.wait(0.2)
        assert len({"w2", "w3"} & set(scenario.members)) == 5 - step
        scenario.hear(*scenario.members, step=step)


def test_no_more_become_members_than_there_are_virtual_workers():
    """Others that have left are recalled where workers are short."""
    stopped = [WorkerState(f"w{n}", n, Stage.MEMBER, 0.0) for n in range(6)]
    for worker in stopped:
        worker.stopped(m.WorkerStopped(worker.id, 1, TrainingPosition(3), True, "", partial=True))
    limits = {"size": 3, "least": 1, "virtual_workers": 4, "now": 0.0, "initial_source": None}
    selection = select_members(stopped, [], **limits)
    assert len(selection.members) == 4 and selection.source in selection.members


def lost_both(committed):
    scenario = training()
    scenario.committed = committed
    scenario.lost("w1", "w2")
    scenario.stopped("w3", "w4", step=3, partial=True)
    scenario.wait(0.2)
    assert set(scenario.members) == {"w3", "w4"}
    scenario.stopped("w3", "w4", step=3, partial=True, pieces_lost=True)
    return scenario


def test_run_goes_back_to_its_newest_checkpoint_when_both_holders_are_lost():
    scenario = lost_both(committed=2)
    assert {c.worker for c in scenario.ever(m.ReleaseWorker)} >= {"w3", "w4"}
    said = " ".join(c.text for c in scenario.ever(m.Explain))
    assert "both workers that held some part of the optimizer's state are lost" in said
    new = [c.worker for c in scenario.ever(m.StartWorker)][-2:]
    scenario.ready(*new)
    scenario.wait(0.2)
    membership = scenario.coordinator.membership
    assert membership is not None and membership.restore
    assert not {"w3", "w4"} & set(scenario.members)


def test_run_without_a_checkpoint_fails_when_both_holders_are_lost():
    (failed,) = lost_both(committed=None).ever(m.FailRun)
    assert "there is no checkpoint" in failed.error


def test_workers_with_a_part_of_the_state_write_it_together_before_one_leaves():
    """All of three are needed, and one must be gone in ten seconds."""
    config = {"min_workers": 3, "drain_margin_s": 3.0, "checkpointing": True}
    scenario = Scenario.training("w1", "w2", "w3", step=4, **config)
    scenario.tell(m.DrainNoticed("w2", scenario.now + 10.0))
    assert scenario.ever(m.TakeCheckpoint), "one of the next steps is to have a checkpoint"
    scenario.wait(7.1, "w1", "w2", "w3", step=6)
    scenario.stopped("w1", "w2", "w3", step=6, partial=True)
    told = scenario.ever(m.WriteDrainCheckpoint)
    assert {one.worker for one in told} == {"w1", "w2", "w3"}
    assert {one.writers for one in told} == {("w1", "w2", "w3")}
    assert not scenario.ever(m.ReleaseWorker)
    scenario.tell(m.CheckpointCommitted(6, 0.1))
    assert {one.worker for one in scenario.ever(m.ReleaseWorker)} == {"w2"}


def test_worker_leaves_once_each_part_has_two_holders_again():
    """Behind a loss, copies are made in the first steps. Where the generation ends before that, who
    is to leave remains for the copies, which are made at once."""
    scenario = training()
    scenario.tell(m.DrainNoticed("w2", scenario.now + 60.0))
    scenario.ready("w5")
    for step, lacks, stays in ((4, True, True), (5, False, False)):
        for worker in scenario.members:
            state = {"has_state": worker in FOUR, "partial": worker in FOUR}
            scenario.stopped(worker, step=step, lacks_copies=lacks, **state)
        scenario.wait(0.2)
        assert ("w2" in scenario.members) is stays
        assert scenario.coordinator.membership.copies_first is stays
        scenario.hear(*scenario.members, step=step)


def test_worker_does_not_leave_with_one_that_is_lost():
    scenario = training()
    scenario.tell(m.DrainNoticed("w2", scenario.now + 60.0))
    scenario.ready("w5", "w6")
    scenario.lost("w1")
    scenario.stopped("w2", "w3", "w4", step=3, partial=True)
    scenario.wait(0.2)
    assert {"w2", "w3", "w4"} <= set(scenario.members)
    assert scenario.coordinator.membership.copies_first
