"""Slow workers that the job wants to be replaced."""

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario

SLOW = "data takes 3.0 times as long as with the others, which costs the run 22 %"


def test_slow_worker_leaves_once_it_is_replaced_elsewhere() -> None:
    scenario = Scenario.training("w1", "w2", min_workers=2)
    said = scenario.tell(m.WorkerSlow("w2", SLOW))
    assert [c for c in said if not isinstance(c, m.Explain)] == [
        m.AvoidNode("w2"),
        m.StartWorker("w3"),
    ]
    assert f"w2 is to be replaced: {SLOW}" in [c.text for c in scenario.of(m.Explain)]
    scenario.wait(60.0, "w1", "w2")
    assert not scenario.ever(m.EndGeneration), "nobody came"
    scenario.ready("w3")
    scenario.stopped("w1", "w2", step=2)
    assert scenario.members == ["w1", "w3"]
    scenario.hear("w1", step=3)
    assert [c.worker for c in scenario.of(m.ReleaseWorker)] == ["w2"]


def test_one_slow_worker_is_replaced_at_a_time() -> None:
    scenario = Scenario.training("w1", "w2", "w3", min_workers=1)
    scenario.tell(m.WorkerSlow("w2", SLOW))
    assert not scenario.tell(m.WorkerSlow("w3", SLOW))
    assert not scenario.tell(m.WorkerSlow("w2", SLOW))


def test_replacements_that_are_slow_as_well_stay_in_the_end() -> None:
    scenario = Scenario.training("w1", "w2", max_rejections=3)
    for number in range(2, 5):
        scenario.tell(m.WorkerSlow(f"w{number}", SLOW))
        scenario.ready(f"w{number + 1}")
        scenario.stopped("w1", f"w{number}", step=number)
        scenario.hear("w1", f"w{number + 1}", step=number + 1)
    assert scenario.members == ["w1", "w5"]
    [told] = scenario.tell(m.WorkerSlow("w5", SLOW))
    assert told == m.Explain("w5 stays: 3 slow workers were replaced before it")
    assert not scenario.tell(m.WorkerSlow("w5", SLOW))


def test_worker_that_is_no_member_or_whose_run_ends_is_not_replaced() -> None:
    scenario = Scenario.training("w1", size=2)
    assert not scenario.tell(m.WorkerSlow("w2", SLOW))
    scenario.tell(m.StopRequested("enough"))
    assert not scenario.tell(m.WorkerSlow("w1", SLOW))
