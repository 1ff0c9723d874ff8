"""A new controller takes over the workers of an earlier one."""

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenarios import SIGNATURE, Scenario


def report(worker, generation, step, **more):
    values = {
        "has_state": True,
        "stopped": False,
        "signature": SIGNATURE,
        "can_source": False,
    } | more
    return m.WorkerReported(worker, generation, TrainingPosition(step), **values)


def test_takeover_ends_the_running_generation_and_forms_the_next():
    scenario = Scenario.recovered(["w1", "w2", "w9"], 6, size=2)
    assert [c.worker for c in scenario.ever(m.ReportState)] == ["w1", "w2", "w9"]
    assert scenario.ever(m.ClaimGeneration) == [m.ClaimGeneration(7)]
    assert m.AbortGeneration("w1", 6) in scenario.tell(report("w1", 6, 5))
    scenario.tell(report("w2", 6, 6, stopped=True))
    scenario.stopped("w1", step=5)
    scenario.stopped("w2", step=6)
    assert not scenario.ever(m.FormGeneration), "w9 has not said where it stands"
    scenario.tell(report("w9", 0, 0, has_state=False, signature=None))
    assert scenario.coordinator.generation == 7
    assert scenario.coordinator.membership.source == "w2"


def test_takeover_renews_no_lease_of_an_earlier_generation():
    """A worker that was frozen for long would go on in its old generation, alone."""
    scenario = Scenario.recovered(["w1", "w2"], 7, size=2)
    assert m.RenewLease("w2", 1) in scenario.hear("w2", generation=7)
    scenario.hear("w1", generation=2)
    assert not scenario.of(m.RenewLease)
    scenario.hear("w1", phase="wait", generation=2)
    assert scenario.of(m.RenewLease)


def test_takeover_waits_for_a_lease_that_it_renewed():
    """The worker hung before it could report its state, and may go on."""
    scenario = Scenario.recovered(["w1", "w2"], 1, size=1, lease_s=30.0)
    scenario.tell(report("w2", 0, 0, has_state=False, can_source=True))
    scenario.stopped("w2", has_state=False)
    scenario.wait(10.0, "w1", "w2", phase="form")
    scenario.wait(25.0, "w2", phase="wait")
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w1"]
    assert scenario.members == [], "the lease of w1 runs for 30 s from its last answer"
    scenario.wait(6.0, "w2", phase="wait")
    assert scenario.members == ["w2"]


def test_report_for_an_earlier_request_is_ignored():
    """The worker was building when it was asked first; by now it may be the only one with state."""
    scenario = Scenario.recovered(["w1"], 4, size=1)
    scenario.tell(report("w1", 0, 0, has_state=False, signature=None, asked=3))
    assert m.AbortGeneration("w1", 4) in scenario.tell(report("w1", 4, 12))
    scenario.stopped("w1", step=12, generation=4)
    scenario.wait(0.1, "w1", phase="wait")
    assert scenario.coordinator.membership.source == "w1"
    assert scenario.coordinator.membership.members[0].has_state


@pytest.mark.parametrize("lineage_id", [False, True])
def test_takeover_with_no_state_left_fails_only_an_established_run(lineage_id):
    """Unless a step is known to have been made, the run may start from initial weights."""
    scenario = Scenario(begin=False, size=1)
    scenario.coordinator, commands = scenario.coordinator.recover(
        scenario.config, [], 3, 0.0, lineage_id
    )
    scenario.note(commands)
    assert bool(scenario.ever(m.FailRun)) is lineage_id
    assert scenario.ever(m.StartWorker)


def test_takeover_starts_workers_under_new_names():
    scenario = Scenario.recovered(["w1"], 6, size=2)
    assert [c.worker for c in scenario.ever(m.StartWorker)] == ["w7.2"]


def test_takeover_asks_an_unreported_worker_until_it_answers_or_is_silent():
    scenario = Scenario.recovered(["w1", "w2"], 1, size=2, lease_s=4.0)
    scenario.wait(3.0, "w1", "w2")
    assert {c.worker for c in scenario.of(m.ReportState)} == {"w1", "w2"}
    scenario.tell(report("w1", 1, 3))
    scenario.stopped("w1", step=3)
    scenario.wait(9.0, "w1", phase="wait", step=3)
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w2"]
    assert scenario.members == ["w1"]


def test_takeover_counts_steps_heard_meanwhile():
    """The group goes on in the body it is in, so the one that is cut off lives."""
    scenario = Scenario.recovered(["w1", "w2"], 1, size=2, heartbeat_timeout_s=5.0)
    scenario.tell(report("w1", 1, 3))
    for step in (4, 5, 6):
        scenario.wait(1.0, "w1", step=step)
    scenario.wait(4.0, "w1", step=6)
    assert not scenario.ever(m.EvictWorker)
    scenario.wait(3.0, "w1", step=6)
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w2"]


def test_takeover_waits_for_a_lease_when_no_member_of_the_newest_generation_reports():
    scenario = Scenario.recovered(["w1"], 4, size=1, lease_s=30.0)
    scenario.tell(report("w1", 3, 3))  # generation 4 was claimed; whoever is in it, w1 is not
    scenario.stopped("w1", step=3)
    scenario.wait(20.0, "w1", phase="wait")
    assert scenario.members == []
    scenario.wait(15.0, "w1", phase="wait")
    assert scenario.members == ["w1"]


def test_takeover_lets_a_worker_without_state_be_the_source_of_a_run_without_state():
    scenario = Scenario.recovered(["w1"], 3, size=1, lease_s=8.0)
    scenario.tell(report("w1", 0, 0, has_state=False, can_source=True))
    scenario.stopped("w1", has_state=False)
    scenario.wait(10.0, "w1", phase="wait")
    assert scenario.members == ["w1"]
    assert scenario.coordinator.membership.source == "w1"


def test_takeover_releases_a_worker_that_does_not_fit():
    scenario = Scenario.recovered(["w1", "w2"], 3, size=2)
    other = SIGNATURE._replace(kind="other")
    scenario.tell(report("w2", 0, 0, has_state=False, signature=other))
    scenario.tell(report("w1", 3, 5))
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w2"]


def test_takeover_asks_a_building_worker_until_it_is_ready():
    scenario = Scenario.recovered(["w1", "w2"], 3, size=2)
    scenario.tell(report("w1", 3, 5))
    scenario.stopped("w1", step=5)
    scenario.tell(report("w2", 0, 0, has_state=False, signature=None))
    assert scenario.members == ["w1"]
    scenario.hear("w1", step=6)
    assert "w2" in [
        c.worker
        for c in scenario.hear("w2", phase="wait", generation=0)
        if isinstance(c, m.ReportState)
    ]
    scenario.tell(report("w2", 0, 0, has_state=False))
    scenario.wait(0.1)
    assert scenario.ever(m.EndGeneration), "it joins"


def test_takeover_rejects_the_state_of_an_earlier_lineage():
    scenario = Scenario.recovered(["w1", "w2"], 5, size=2)
    scenario.tell(report("w1", 2, 9, lineage_id=1))
    scenario.tell(report("w2", 5, 3, lineage_id=4))
    scenario.stopped("w1", step=9, lineage_id=1)
    scenario.stopped("w2", step=3, lineage_id=4)
    assert scenario.members == ["w2"]


def test_takeover_keeps_the_lineage_of_a_worker_that_finished_after_its_report():
    scenario = Scenario.recovered(["w1", "w2"], 5, size=2)
    scenario.tell(report("w1", 5, 0, has_state=False))
    scenario.tell(report("w2", 0, 0, has_state=False))
    scenario.stopped("w2", step=0, has_state=False)
    scenario.tell(m.WorkerFinished("w1", 5, TrainingPosition(9, 1), "digest", lineage_id=4))
    membership = scenario.coordinator.membership
    assert membership.generation == 6
    assert membership.source == "w1"
    assert membership.lineage_id == 4
