"""Silence, eviction, and the leases that the next generation waits for."""

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario


def test_silence_is_judged_unless_the_group_makes_steps():
    scenario = Scenario.training("w1", "w2", heartbeat_timeout_s=5.0)
    for step in range(1, 20):  # w2 is silent, and yet the steps go on
        scenario.wait(1.0, "w1", step=step)
    assert not scenario.ever(m.EvictWorker)
    scenario.wait(7.0, "w1", step=19)
    assert [c.worker for c in scenario.of(m.EvictWorker)] == ["w2"]


def test_the_evicted_get_no_answer_but_an_end():
    scenario = Scenario.training("w1", "w2")
    scenario.wait(9.0, "w1")
    assert [type(c) for c in scenario.hear("w2")] == [m.EvictWorker]
    assert [type(c) for c in scenario.hear("w77")] == [m.EvictWorker]
    assert m.RenewLease("w1", scenario.beats + 1) in scenario.hear("w1")


def alone_and_silent(**config):
    """The source was announced, never sent a heartbeat, and is evicted but not dead; another worker
    is ready."""
    scenario = Scenario(size=1, lease_s=30.0, **config)
    scenario.ready("w1")
    scenario.hear("w1", phase="form")
    scenario.wait(9.0)
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w1"]
    scenario.ready("w2")
    return scenario


def test_next_generation_waits_for_the_lease_of_a_member_that_may_live():
    scenario = alone_and_silent()
    scenario.wait(15.0, "w2", phase="wait")
    assert scenario.members == ["w1"], "the lease of w1 runs for 30 s"
    scenario.wait(10.0, "w2", phase="wait")
    assert scenario.members == ["w2"]


def test_next_generation_forms_at_once_when_the_evicted_member_is_dead():
    scenario = alone_and_silent()
    scenario.lost("w1")
    assert scenario.members == ["w2"]


def test_a_member_that_was_answered_long_ago_still_has_its_lease():
    """Announced right after an answer: the lease counts from that answer, heard again or not."""
    scenario = Scenario(size=1, lease_s=30.0)
    scenario.ready("w1")
    scenario.wait(9.0)
    scenario.ready("w2")
    scenario.wait(10.0, "w2", phase="wait")
    assert scenario.members == ["w1"]


def test_silence_is_not_judged_while_more_waits_to_be_read():
    scenario = Scenario.training("w1", "w2", heartbeat_timeout_s=5.0)
    for _ in range(5):
        scenario.now += 1.0
        scenario.hear("w1")
    scenario.now += 0.5
    scenario.hear("w1")  # overdue, but its heartbeat is the next to be read
    scenario.hear("w2")
    scenario.tell(m.DeadlineReached())
    assert not scenario.ever(m.EvictWorker)


def test_a_lease_counts_from_the_last_answer_inside():
    scenario = Scenario(size=1, lease_s=30.0)
    scenario.ready("w1")
    scenario.wait(4.0, "w1", phase="form")
    scenario.wait(10.0)
    scenario.ready("w2")
    scenario.wait(18.0, "w2", phase="wait")
    assert scenario.members == ["w1"], "answered last at 4 s"
    scenario.wait(4.0, "w2", phase="wait")
    assert scenario.members == ["w2"]
