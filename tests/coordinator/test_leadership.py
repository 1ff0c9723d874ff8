"""Claims, controllers that slept, and the events that are held until a claim confirms who leads."""

from __future__ import annotations

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenes import Scene


def test_a_generation_is_claimed_before_it_is_announced() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    assert scene.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]
    assert not scene.ever(m.FormGeneration)
    scene.tell(m.GenerationClaimed(2))  # not what was asked
    assert not scene.ever(m.FormGeneration)
    scene.tell(m.GenerationClaimed(1))
    assert scene.members == ["w1"]


def test_a_lost_claim_silences_for_good() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    assert scene.tell(m.GenerationClaimLost(1)) == [
        m.StandDown("generation 1 belongs to another controller")
    ]
    for event in (
        m.HeartbeatReceived("w1", 1, 1, "body"),
        m.WorkerLost("w1", ""),
        m.StopRequested(""),
    ):
        assert scene.tell(event) == []
    assert scene.coordinator.deadline is None


def test_a_coordinator_that_slept_confirms_by_a_claim_and_judges_nobody() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.claims = False
    scene.now += 60.0
    assert scene.hear("w1") == [m.ClaimGeneration(2)]
    assert scene.hear("w2") == []
    said = scene.tell(m.GenerationClaimed(2))
    assert {type(c) for c in said} == {m.RenewLease}
    assert len(said) == 2


def test_worker_silent_while_the_coordinator_slept_gets_another_timeout() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.now += 60.0
    scene.hear("w1")
    assert scene.coordinator.phase == "running"
    assert not scene.ever(m.EvictWorker)


def test_a_late_answer_to_a_claim_is_no_proof() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    scene.now += 60.0
    assert m.ClaimGeneration(2) in scene.tell(m.GenerationClaimed(1))
    assert not scene.ever(m.FormGeneration)


def test_claims_are_made_one_after_the_other() -> None:
    scene = Scene(size=1, claims=False)
    scene.ready("w1")
    scene.now += 60.0
    assert scene.hear("w1", phase="wait") == []
    assert scene.ever(m.ClaimGeneration) == [m.ClaimGeneration(1)]


def test_a_superseded_coordinator_finds_out_before_it_acts() -> None:
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.claims = False
    scene.wait(6.0)  # the workers follow another controller
    assert scene.said == [m.ClaimGeneration(2)]
    assert [type(c) for c in scene.tell(m.GenerationClaimLost(2))] == [m.StandDown]


def test_a_controller_that_slept_over_the_search_asks_whether_it_leads() -> None:
    scene = Scene(size=1, begin=False, claims=False)
    scene.coordinator.start(0.0)
    scene.now = 60.0
    assert scene.tell(m.CheckpointFound(None)) == [m.ClaimGeneration(1)]


def held(*facts: m.Event, at_once: int = 2) -> Scene:
    """A coordinator that slept while these came, and has confirmed since that it leads."""
    scene = Scene(size=2)
    scene.running("w1", "w2")
    scene.coordinator._leadership.at_once = at_once
    scene.claims = False
    scene.now += 60.0
    for fact in facts:
        scene.tell(fact)
    (claim,) = scene.ever(m.ClaimGeneration)[-1:]
    scene.tell(m.GenerationClaimed(claim.generation))
    return scene


def test_held_events_are_handled_in_parts_and_in_order() -> None:
    scene = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    assert scene.coordinator.size == 3, "the claim is the first of two"
    assert scene.coordinator.deadline == scene.now
    scene.tell(m.SizeRequested(6))
    assert scene.coordinator.size == 5
    scene.tell(m.DeadlineReached())
    assert scene.coordinator.size == 6
    assert scene.coordinator.deadline != scene.now


def test_coordinator_that_slept_again_before_all_held_events_were_handled_confirms_again() -> None:
    scene = held(*(m.SizeRequested(size) for size in (3, 4, 5)))
    scene.now += 60.0
    claims = len(scene.ever(m.ClaimGeneration))
    scene.tell(m.SizeRequested(6))
    assert scene.coordinator.size == 3
    (claim,) = scene.ever(m.ClaimGeneration)[claims:]
    scene.tell(m.GenerationClaimLost(claim.generation))
    assert (scene.coordinator.phase, scene.coordinator.size) == ("over", 3)


def test_run_ended_by_held_events_knows_which_workers_are_gone() -> None:
    scene = held(
        m.WorkerFailed("w1", "ValueError: no", ""), m.WorkerLost("w1", "x"), m.WorkerLost("w2", "x")
    )
    assert scene.coordinator.phase == "over"
    assert not scene.coordinator.workers
