"""Claims, controllers that slept, and the events that are held until a claim confirms who leads."""

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario


def test_a_generation_is_claimed_before_it_is_announced():
    scenario = Scenario(size=1, claims=False)
    scenario.ready("w1")
    assert scenario.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]
    assert not scenario.ever(m.FormGeneration)
    scenario.tell(m.GenerationClaimed(2))  # not what was asked
    assert not scenario.ever(m.FormGeneration)
    scenario.tell(m.GenerationClaimed(1))
    assert scenario.members == ["w1"]


def test_a_lost_claim_silences_for_good():
    scenario = Scenario(size=1, claims=False)
    scenario.ready("w1")
    assert scenario.tell(m.GenerationClaimLost(1)) == [
        m.StandDown("generation 1 belongs to another controller")
    ]
    for event in (
        m.HeartbeatReceived("w1", 1, 1, "body"),
        m.WorkerLost("w1", ""),
        m.StopRequested(""),
    ):
        assert scenario.tell(event) == []
    assert scenario.coordinator.deadline is None


def test_a_coordinator_that_slept_confirms_by_a_claim_and_judges_nobody():
    scenario = Scenario.training("w1", "w2")
    scenario.claims = False
    scenario.now += 60.0
    assert scenario.hear("w1") == [m.ClaimGeneration(2)]
    assert scenario.hear("w2") == []
    said = scenario.tell(m.GenerationClaimed(2))
    assert {type(c) for c in said} == {m.RenewLease}
    assert len(said) == 2


def test_a_late_answer_to_a_claim_is_no_proof():
    scenario = Scenario(size=1, claims=False)
    scenario.ready("w1")
    scenario.now += 60.0
    assert m.ClaimGeneration(2) in scenario.tell(m.GenerationClaimed(1))
    assert not scenario.ever(m.FormGeneration)


def test_claims_are_made_one_after_the_other():
    scenario = Scenario(size=1, claims=False)
    scenario.ready("w1")
    scenario.now += 60.0
    assert scenario.hear("w1", phase="wait") == []
    assert scenario.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]


def test_a_superseded_coordinator_finds_out_before_it_acts():
    scenario = Scenario.training("w1", "w2")
    scenario.claims = False
    scenario.wait(6.0)  # the workers follow another controller
    assert scenario.said == [m.ClaimGeneration(2)]
    assert [type(c) for c in scenario.tell(m.GenerationClaimLost(2))] == [m.StandDown]


def test_a_controller_that_slept_over_the_search_asks_whether_it_leads():
    scenario = Scenario(size=1, begin=False, claims=False)
    scenario.coordinator.start(0.0)
    scenario.now = 60.0
    assert scenario.tell(m.CheckpointFound(None)) == [m.ClaimGeneration(1)]


def held(*facts, at_once=2):
    """A coordinator that slept while these came, and has confirmed since that it leads."""
    scenario = Scenario.training("w1", "w2")
    scenario.coordinator._leadership.at_once = at_once
    scenario.claims = False
    scenario.now += 60.0
    for fact in facts:
        scenario.tell(fact)
    (claim,) = scenario.ever(m.ClaimGeneration)[-1:]
    scenario.tell(m.GenerationClaimed(claim.generation))
    return scenario


def test_held_events_are_handled_in_parts_and_in_order():
    scenario = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    assert scenario.coordinator.size == 3, "the claim is the first of two"
    assert scenario.coordinator.deadline == scenario.now
    scenario.tell(m.SizeRequested(6))
    assert scenario.coordinator.size == 5
    scenario.tell(m.DeadlineReached())
    assert scenario.coordinator.size == 6
    assert scenario.coordinator.deadline != scenario.now


def test_coordinator_that_slept_again_before_all_held_events_were_handled_confirms_again():
    scenario = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    scenario.now += 60.0
    claims = len(scenario.ever(m.ClaimGeneration))
    scenario.tell(m.SizeRequested(6))
    assert scenario.coordinator.size == 3
    (claim,) = scenario.ever(m.ClaimGeneration)[claims:]
    scenario.tell(m.GenerationClaimLost(claim.generation))
    assert (scenario.coordinator.phase, scenario.coordinator.size) == ("over", 3)


def test_run_ended_by_held_events_knows_which_workers_are_gone():
    scenario = held(
        m.WorkerFailed("w1", "ValueError: no", ""), m.WorkerLost("w1", "x"), m.WorkerLost("w2", "x")
    )
    assert scenario.coordinator.phase == "over"
    assert not scenario.coordinator.workers
