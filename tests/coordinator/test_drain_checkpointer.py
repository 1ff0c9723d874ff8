"""Scenarios of checkpoints: requested ones, and the last one of workers that drain."""

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenarios import Scenario


def told(scenario, kind):
    return [command.worker for command in scenario.of(kind)]


def falling(step=4, **config):
    """Both of two are needed, and w2 must be gone in ten seconds."""
    config = {"size": 2, "min_workers": 2, "drain_margin_s": 3.0, "checkpointing": True} | config
    scenario = Scenario(**config)
    scenario.running("w1", "w2", step=step)
    scenario.tell(m.DrainNoticed("w2", scenario.now + 10.0))
    return scenario


def stopped(*workers, step=6, **config):
    scenario = falling(**config)
    scenario.wait(7.1, "w1", "w2", step=step)
    assert told(scenario, m.EndGeneration)[:2] == ["w1", "w2"]
    scenario.stopped(*workers or ("w1", "w2"), step=step)
    return scenario


def test_members_that_will_all_leave_are_asked_for_a_checkpoint_at_once():
    scenario = falling()
    assert told(scenario, m.TakeCheckpoint) == ["w1", "w2"]
    assert told(scenario, m.StartWorker) == ["w3"]
    scenario.wait(5.0, "w1", "w2", step=5)
    assert not scenario.of(m.TakeCheckpoint) and not scenario.of(m.EndGeneration), (
        "once for a notice"
    )


def test_the_time_that_is_left_is_for_the_checkpoint_and_not_for_further_steps():
    """Each may take as long as the notice."""
    scenario = falling()
    scenario.wait(7.1, "w1", "w2", step=4)
    assert {command.after_step for command in scenario.of(m.EndGeneration)} == {4}


def test_drain_that_leaves_enough_workers_takes_no_checkpoint():
    scenario = falling(min_workers=1)
    assert not scenario.ever(m.TakeCheckpoint)
    scenario.wait(7.1, "w1", "w2", step=5)
    scenario.stopped("w1", "w2", step=6)
    assert scenario.members == ["w1"] and not scenario.ever(m.WriteDrainCheckpoint)


def test_draining_worker_leaves_when_its_state_is_committed():
    scenario = stopped()
    assert scenario.of(m.WriteDrainCheckpoint) == [
        m.WriteDrainCheckpoint(w, 1, ("w1", "w2")) for w in ("w1", "w2")
    ]
    scenario.tell(m.CheckpointCommitted(4))
    assert not scenario.ever(m.ReleaseWorker), "what is committed is not what they hold"
    scenario.tell(m.CheckpointCommitted(6))
    assert told(scenario, m.ReleaseWorker) == ["w2"]
    assert "1 of at least 2 workers" in scenario.coordinator.reason
    scenario.ready("w3")
    assert scenario.members == ["w1", "w3"] and scenario.coordinator.membership.source == "w1"


def alone_with_a_standby(deadline_s):
    """A job with one virtual worker, so a second member has no place to take the state."""
    config = {"virtual_workers": 1, "size": 1, "standby": 1}
    scenario = Scenario(checkpointing=True, drain_margin_s=3.0, **config)
    scenario.running("w1", step=4)
    scenario.ready("w2")
    deadline = None if deadline_s is None else scenario.now + deadline_s
    scenario.tell(m.DrainNoticed("w1", deadline))
    return scenario


def test_only_worker_that_can_run_a_virtual_worker_goes_on_until_it_must_leave():
    scenario = alone_with_a_standby(None)
    scenario.wait(60.0, "w1", step=9)
    assert not scenario.ever(m.EndGeneration) and scenario.members == ["w1"]
    assert [c.worker for c in scenario.all if isinstance(c, m.TakeCheckpoint)] == ["w1"]


def test_standby_gets_the_state_of_the_only_worker_from_a_checkpoint():
    scenario = alone_with_a_standby(10.0)
    for _ in range(2):
        scenario.wait(3.45, "w1", step=6)
        assert not scenario.ever(m.EndGeneration)
        scenario.hear("w2", phase="wait")
    scenario.wait(0.2, "w1", step=6)
    scenario.stopped("w1", step=7)
    assert told(scenario, m.WriteDrainCheckpoint) == ["w1"]
    scenario.committed = 7
    scenario.tell(m.CheckpointCommitted(7))
    assert told(scenario, m.ReleaseWorker) == ["w1"]
    scenario.wait(0.1, "w2", phase="wait")
    assert scenario.members == ["w2"] and scenario.coordinator.membership.restore


def test_only_worker_that_is_slow_stays():
    scenario = Scenario.training("w1", virtual_workers=1)
    assert not scenario.tell(m.WorkerSlow("w1", "data takes long"))


def test_the_last_of_all_leave_the_run_to_others():
    scenario = Scenario.training("w1", step=4, checkpointing=True, drain_margin_s=3.0)
    scenario.tell(m.DrainNoticed("w1", scenario.now + 10.0))
    scenario.wait(7.1, "w1", step=5)
    scenario.stopped("w1", step=7)
    scenario.committed = 7
    scenario.tell(m.CheckpointCommitted(7))
    assert told(scenario, m.ReleaseWorker) == ["w1"]
    scenario.ready("w2")
    scenario.wait(0.1, "w2", phase="wait")
    assert scenario.members == ["w2"] and scenario.coordinator.membership.restore
    assert not scenario.ever(m.FailRun)


def test_writers_are_told_again_when_one_of_them_is_lost():
    scenario = stopped()
    scenario.lost("w1")
    assert scenario.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))]
    scenario.wait(0.9, "w2", phase="wait", step=6)
    assert not scenario.of(m.WriteDrainCheckpoint)
    scenario.wait(0.2, "w2", phase="wait", step=6)
    assert scenario.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))], (
        "a word may be lost"
    )


def test_only_those_furthest_keep_their_state():
    scenario = stopped("w1")
    scenario.stopped("w2", step=7)
    assert scenario.of(m.WriteDrainCheckpoint) == [m.WriteDrainCheckpoint("w2", 1, ("w2",))]


def test_joiner_meanwhile_ends_the_wait_for_the_commit():
    scenario = stopped()
    scenario.ready("w3")
    assert scenario.members == ["w1", "w3"]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_second_notice_later_lets_the_worker_with_time_left_go_on(checkpointing):
    """The worker that has time left goes on alone, if one is enough."""
    scenario = Scenario.training(
        "w1", "w2", step=4, checkpointing=checkpointing, drain_margin_s=3.0
    )
    scenario.tell(m.DrainNoticed("w2", scenario.now + 10.0))
    assert not scenario.of(m.TakeCheckpoint)
    scenario.tell(m.DrainNoticed("w1", scenario.now + 60.0))
    assert told(scenario, m.TakeCheckpoint) == (["w1", "w2"] if checkpointing else [])
    scenario.wait(7.1, "w1", "w2", step=5)
    assert told(scenario, m.EndGeneration)[:2] == ["w1", "w2"]
    scenario.stopped("w1", "w2", step=7)
    assert scenario.members == ["w1"] and not scenario.ever(m.WriteDrainCheckpoint)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_drain_without_a_step_or_a_storage_lets_training_go_on(checkpointing):
    scenario = falling(step=0 if checkpointing else 4, checkpointing=checkpointing)
    scenario.wait(9.0, "w1", "w2", step=0 if checkpointing else 4)
    assert not scenario.ever(m.EndGeneration)
    assert bool(scenario.ever(m.TakeCheckpoint)) is checkpointing
    scenario.stopped("w1", "w2", step=0 if checkpointing else 6)
    assert not scenario.ever(m.WriteDrainCheckpoint)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2


def test_drain_checkpoint_waits_for_a_worker_inside_a_loop_body():
    scenario = stopped("w1")
    scenario.stopped("w2", position=TrainingPosition(7), at_head=False)
    assert not scenario.ever(m.WriteDrainCheckpoint)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2


def test_the_end_of_the_run_is_not_held_up():
    scenario = stopped("w1", step=6)
    scenario.stopped("w2", position=TrainingPosition(6, 1))
    assert not scenario.ever(m.WriteDrainCheckpoint)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2


def test_commit_before_a_restore_does_not_count():
    """The newest one was damaged: the run goes on from the one before it, and makes the same steps
    again."""
    scenario = Scenario.training("w1", step=4, checkpointing=True, drain_margin_s=3.0)
    scenario.committed = 9
    scenario.tell(m.CheckpointCommitted(9))
    scenario.lost("w1")
    scenario.ready("w2")
    scenario.wait(0.1)
    scenario.hear("w2", step=5)
    scenario.tell(m.DrainNoticed("w2", scenario.now + 10.0))
    scenario.wait(7.1, "w2", step=5)
    scenario.stopped("w2", step=7, lineage_id=2)
    assert told(scenario, m.WriteDrainCheckpoint) == ["w2"]
    assert not scenario.ever(m.ReleaseWorker)


def test_a_storage_that_is_away_holds_nobody_up_for_longer_than_the_notice():
    scenario = stopped()
    scenario.wait(2.0, "w1", "w2", phase="wait", step=6)
    scenario.wait(0.95)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2
    assert not scenario.ever(m.ReleaseWorker)
    scenario.wait(3.0, "w1", "w2", step=6)
    assert scenario.coordinator.phase == "running", scenario.coordinator.reason
    assert "are needed" in scenario.coordinator.reason


def test_checkpoint_requested_while_no_worker_trains_is_taken_later():
    scenario = Scenario(size=1)
    scenario.tell(m.CheckpointRequested())
    assert not scenario.of(m.TakeCheckpoint)
    scenario.running("w1")
    assert [c.worker for c in scenario.ever(m.TakeCheckpoint)] == ["w1"]
    scenario.tell(m.CheckpointRequested())
    assert told(scenario, m.TakeCheckpoint) == ["w1"]


def test_draining_worker_that_alone_holds_the_state_leaves_when_it_is_committed():
    """All who were to go on without it are lost before they made a step."""
    scenario = Scenario.training("w1", "w2", step=4, min_workers=2, checkpointing=True)
    for worker in ("w1", "w2"):
        scenario.tell(m.DrainNoticed(worker, scenario.now + 30.0))
    scenario.ready("w3", "w4")
    scenario.stopped("w1", "w2", step=6)
    assert scenario.members == ["w1", "w3", "w4"]
    scenario.lost(*scenario.members)
    scenario.wait(26.0, "w2", phase="wait", step=6)
    assert told(scenario, m.WriteDrainCheckpoint)[:1] == ["w2"]
    assert not scenario.ever(m.ReleaseWorker)
    scenario.committed = 6
    scenario.tell(m.CheckpointCommitted(6))
    assert told(scenario, m.ReleaseWorker) == ["w2"]


def test_many_notices_at_once_ask_the_members_once():
    workers = [f"w{n}" for n in range(1, 9)]
    scenario = Scenario.training(*workers, step=4, size=8, min_workers=8, checkpointing=True)
    for worker in workers[:6]:
        scenario.tell(m.DrainNoticed(worker, scenario.now + 30.0))
    assert [command.worker for command in scenario.ever(m.TakeCheckpoint)] == workers
    scenario.wait(1.1, *workers, step=5)
    assert told(scenario, m.TakeCheckpoint) == workers, "the later notices may need a later one"
    scenario.wait(3.0, *workers, step=5)
    assert not scenario.of(m.TakeCheckpoint)


def test_a_notice_that_comes_nearer_counts():
    scenario = falling()
    scenario.wait(1.0, "w1", "w2", step=5)
    scenario.tell(m.DrainNoticed("w2", scenario.now + 4.0))
    scenario.wait(1.1, "w1", "w2", step=5)
    assert set(told(scenario, m.EndGeneration)) == {"w1", "w2"}


def test_the_first_stop_counts():
    scenario = Scenario.training("w1", step=1)
    scenario.tell(m.StopRequested("enough"))
    assert scenario.of(m.StopTraining) == [m.StopTraining("w1", "enough")]
    scenario.tell(m.StopRequested("once more"))
    assert not scenario.of(m.StopTraining)


def head_leaves(within_s=40.0, **config):
    """Two members train, and the head node is told to go."""
    config = {"size": 2, "drain_margin_s": 5.0, "checkpointing": True} | config
    scenario = Scenario(**config)
    scenario.running("w1", "w2", step=4)
    deadline = None if within_s is None else scenario.now + within_s
    scenario.tell(m.HeadDrainNoticed(deadline))
    return scenario


def test_head_that_goes_away_takes_no_step_with_it():
    scenario = head_leaves()
    assert told(scenario, m.TakeCheckpoint) == ["w1", "w2"], "in case it goes earlier"
    scenario.tell(m.CheckpointCommitted(5, 2.0))
    scenario.wait(30.9, "w1", "w2", step=900)
    assert not scenario.ever(m.EndGeneration), "there is time to train on"
    scenario.wait(0.2, "w1", "w2", step=900)
    assert set(told(scenario, m.EndGeneration)) == {"w1", "w2"}, "twice a commit, and the margin"
    scenario.stopped("w1", "w2", step=901)
    assert scenario.of(m.WriteDrainCheckpoint) == [
        m.WriteDrainCheckpoint(w, 1, ("w1", "w2")) for w in ("w1", "w2")
    ]
    scenario.tell(m.CheckpointCommitted(901, 0.5))
    assert "the head node goes away, and the state after step 901 is committed" in (
        scenario.coordinator.reason
    )
    scenario.ready("w3")
    scenario.wait(38.0, "w1", "w2", phase="wait", step=901)
    assert scenario.coordinator.generation == 1 and not scenario.ever(m.ReleaseWorker)


def test_head_that_stays_after_its_deadline_lets_training_go_on():
    scenario = head_leaves()
    scenario.wait(36.0, "w1", "w2", step=9)
    scenario.stopped("w1", "w2", step=9)
    scenario.wait(33.0, "w1", "w2", phase="wait", step=9)
    assert scenario.coordinator.generation == 1
    scenario.wait(1.1)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2
    scenario.hear("w1", "w2", step=9)
    scenario.tell(m.CheckpointCommitted(10, 500.0))
    scenario.wait(9.0, "w1", "w2", step=10)
    assert scenario.coordinator.phase == "running", scenario.coordinator.reason


def test_head_with_no_deadline_or_one_too_near():
    scenario = head_leaves(None)
    assert told(scenario, m.TakeCheckpoint) == ["w1", "w2"]
    scenario.wait(100.0, "w1", "w2", step=5)
    assert not scenario.ever(m.EndGeneration)
    scenario = head_leaves(4.0)
    assert not scenario.ever(m.TakeCheckpoint) and {
        command.after_step for command in scenario.ever(m.EndGeneration)
    } == {4}
    scenario = head_leaves(4.0, checkpointing=False)
    assert not scenario.ever(m.EndGeneration)


def test_run_that_is_stopped_ends_although_the_head_goes_away():
    scenario = head_leaves(4.0)
    scenario.stopped("w1", "w2", step=4)
    scenario.tell(m.StopRequested("enough"))
    scenario.wait(0.1)
    assert scenario.members == ["w1", "w2"] and scenario.coordinator.generation == 2
