"""How generations form, end and follow each other."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.workers.worker_state import Stage
from tests.coordinator.scenarios import Scenario, trio

# Of the first preparation by a controller that has claimed generation 1, and generation 2.
NUMBER, LATER = (1 << 20) + 1, (2 << 20) + 1


def test_a_loss_aborts_the_rest_and_the_most_advanced_is_the_source():
    scenario = trio(min_workers=2)
    scenario.lost("w2")
    assert [c.worker for c in scenario.of(m.AbortGeneration)] == ["w1", "w3"]
    assert [c.worker for c in scenario.of(m.StartWorker)] == ["w4"]
    scenario.stopped("w1", step=4)
    assert scenario.coordinator.phase == "ending"
    scenario.stopped("w3", step=5)
    assert scenario.members == ["w1", "w3"]
    assert scenario.coordinator.membership.source == "w3"


def ranges_of(scenario):
    return [member.ranges for member in scenario.coordinator.membership.members]


def test_planned_end_that_cuts_a_step_leaves_what_is_finished_where_it_is():
    """The size is 2 now, and w2 and w3 were past the last step when they heard of it."""
    scenario = trio(min_workers=2, virtual_workers=12, steps_ahead=0)
    scenario.hear("w1", "w2", "w3", step=4)
    scenario.tell(m.SizeRequested(2))
    assert scenario.of(m.EndGeneration) and not scenario.of(m.AbortGeneration)
    for worker, finished in (("w1", ((0, 4),)), ("w2", ((4, 8),)), ("w3", ())):
        scenario.stopped(worker, step=4, finished=finished)
    assert scenario.members == ["w1", "w2"]
    assert ranges_of(scenario) == [((0, 4), (8, 10)), ((4, 8), (10, 12))]


def test_next_generation_is_claimed_while_members_leave():
    scenario = trio(min_workers=2)
    scenario.claims = False
    scenario.lost("w2")
    assert scenario.of(m.ClaimGeneration) == [m.ClaimGeneration(2)]
    scenario.stopped("w1", step=4)
    assert not scenario.of(m.ClaimGeneration)
    scenario.tell(m.GenerationClaimed(2))
    scenario.stopped("w3", step=4)
    assert [c.membership.generation for c in scenario.of(m.FormGeneration)] == [2]
    assert scenario.ever(m.ClaimGeneration) == [m.ClaimGeneration(1), m.ClaimGeneration(2)]


def test_claim_that_was_sent_while_members_left_is_waited_for():
    scenario = trio(min_workers=2)
    scenario.claims = False
    scenario.lost("w2")
    scenario.stopped("w1", "w3", step=4)
    assert scenario.coordinator.phase == "claiming" and not scenario.of(m.ClaimGeneration)
    scenario.tell(m.GenerationClaimed(2))
    assert scenario.members == ["w1", "w3"]


def test_likely_members_connect_while_members_leave():
    """At once: they do not wait for the claim."""
    scenario = trio(min_workers=2, forming_timeout_s=30.0)
    scenario.claims = False
    scenario.lost("w2")
    assert scenario.of(m.PrepareGroup) == [m.PrepareGroup(2, NUMBER, ("w1", "w3"), 30.0)]
    scenario.tell(m.GenerationClaimed(2))
    assert not scenario.of(m.PrepareGroup)
    scenario.stopped("w1", step=4)
    scenario.stopped("w3", step=5)
    membership = scenario.coordinator.membership
    assert (membership.source, membership.prepared) == ("w3", NUMBER)


def test_likely_members_that_change_connect_again():
    scenario = trio(min_workers=1, forming_timeout_s=30.0)
    scenario.lost("w2")
    scenario.ready("w4")
    assert scenario.of(m.PrepareGroup) == [m.PrepareGroup(2, LATER, ("w1", "w3", "w4"), 30.0)]
    scenario.lost("w3")
    assert scenario.of(m.PrepareGroup) == [m.PrepareGroup(2, LATER + 1, ("w1", "w4"), 30.0)]
    scenario.stopped("w1", step=4)
    assert (
        scenario.members == ["w1", "w4"] and scenario.coordinator.membership.prepared == LATER + 1
    )


def test_members_who_are_others_than_was_likely_connect_when_the_generation_forms():
    """w1 stopped within a body, so the joiner waits outside."""
    scenario = trio(min_workers=1)
    scenario.lost("w2")
    scenario.ready("w4")
    scenario.stopped("w1", "w3", step=4, at_head=False)
    assert scenario.members == ["w1", "w3"] and scenario.coordinator.membership.prepared == 0


def test_preparation_of_an_earlier_generation_does_not_count():
    """The same two form another one: the first failed before it was formed."""
    scenario = trio(min_workers=2)
    scenario.lost("w2")
    scenario.stopped("w1", "w3", "w1", "w3", step=4)
    membership = scenario.coordinator.membership
    assert (membership.generation, scenario.members) == (3, ["w1", "w3"])
    assert membership.prepared == 0


def test_members_connect_only_when_it_is_known_who_stays():
    """At a planned end nobody is told before one has left; and one of these three must go."""
    scenario = trio(steps_ahead=0)
    scenario.tell(m.SizeRequested(2))
    scenario.stopped("w1", step=0)
    assert not scenario.ever(m.PrepareGroup)


def test_joiner_connects_when_the_first_member_has_left():
    scenario = Scenario.training("w1", "w2", size=3)
    scenario.ready("w3")
    assert scenario.of(m.EndGeneration) and not scenario.ever(m.PrepareGroup)
    scenario.stopped("w1", step=scenario.ever(m.EndGeneration)[-1].after_step)
    assert [c.workers for c in scenario.of(m.PrepareGroup)] == [("w1", "w2", "w3")]


def test_joins_end_a_generation_at_a_step_ahead_and_repeat_it():
    scenario = Scenario.training("w1", step=4, size=2, steps_ahead=2)
    scenario.ready("w2")
    ends = [c for c in scenario.said if isinstance(c, m.EndGeneration)]
    assert ends and ends[0].after_step >= 6
    assert scenario.hear("w1", step=5)[1:] == [ends[0]]  # the same again
    scenario.stopped("w1", step=6)
    members = scenario.coordinator.membership.members
    assert [(member.worker, member.has_state) for member in members] == [
        ("w1", True),
        ("w2", False),
    ]


def test_command_that_is_not_acted_on_is_repeated_at_growing_intervals():
    """A loop body may last minutes, in which its worker is heard, and need not be told every
    second."""
    scenario = Scenario.training("w1", size=2)
    scenario.ready("w2")
    told = len(scenario.ever(m.EndGeneration))
    scenario.wait(100.0, "w1", "w2", phase="body", step=1)
    assert len(scenario.ever(m.EndGeneration)) - told == 8, "at heartbeats 1, 2, 4, …, 32, 64, 96"
    scenario.stopped("w1", step=9)
    scenario.hear("w1", "w2", step=10)
    scenario.tell(m.StopRequested("enough"))
    told = len(scenario.ever(m.StopTraining))
    scenario.wait(10.0, "w1", "w2", phase="body", step=10)
    assert len(scenario.ever(m.StopTraining)) - told == 2 * 4


def test_an_abort_is_told_at_once_however_seldom_the_end_was():
    scenario = Scenario.training("w1", "w2", size=3)
    scenario.ready("w3")
    scenario.wait(40.0, "w1", "w2", "w3", phase="body", step=1)
    scenario.lost("w2")
    assert m.AbortGeneration("w1", 1) in scenario.said
    assert m.AbortGeneration("w1", 1) in scenario.hear("w1", phase="body", step=1)


def test_a_planned_end_that_fails_or_lasts_becomes_an_abort():
    scenario = Scenario.training("w1", "w2", size=3, gather_timeout_s=4.0)
    scenario.ready("w3")
    after = scenario.ever(m.EndGeneration)[-1].after_step
    scenario.stopped("w1", step=after)
    assert not scenario.ever(m.AbortGeneration)
    scenario.wait(5.0, "w1", "w2", "w3", phase="collective")
    assert [c.worker for c in scenario.ever(m.AbortGeneration)][:1] == ["w2"]
    early = Scenario.training("w1", "w2", size=3)
    early.ready("w3")
    early.stopped("w1", step=0)
    assert [c.worker for c in early.of(m.AbortGeneration)] == ["w2"]


def test_joiner_that_fails_twice_is_replaced():
    scenario = Scenario(size=2, min_workers=2)
    scenario.ready("w1")
    scenario.ready("w2")
    for _ in range(2):
        scenario.stopped("w1", step=0)
        scenario.stopped("w2", has_state=False, unreachable=("w1",))
        scenario.wait(8.0, "w1", "w2", phase="wait")
    evicted = scenario.ever(m.EvictWorker)
    assert {c.worker for c in evicted} == {"w2"}
    assert "join" in evicted[0].reason


def test_unreachable_joiner_waits_and_unreachable_member_with_state_gets_a_second_try():
    scenario = Scenario.training("w1", size=2, min_workers=1)
    scenario.ready("w2")
    scenario.stopped("w1", step=3)
    assert scenario.members == ["w1", "w2"]
    scenario.stopped("w2", has_state=False, unreachable=("w1",))
    scenario.stopped("w1", step=3)
    assert scenario.members == ["w1"], "void and out of reach: without it for now"
    both = Scenario.training("w1", "w2")
    for expected in (["w1", "w2"], ["w1", "w2"], ["w1"]):
        both.stopped("w1", step=3, unreachable=("w2",))
        both.stopped("w2", step=3)
        assert both.members == expected


def test_a_membership_that_failed_is_tried_again_after_another_one_was():
    """The other one fails, and is followed, by facts that were held until it was clear who
    leads."""
    scenario = Scenario.training("w1", "w2", size=3, min_workers=1)
    scenario.ready("w3")
    scenario.stopped("w1", "w2", step=3)
    all_three = scenario.members
    scenario.stopped("w3", has_state=False, unreachable=("w1",))
    scenario.stopped("w1", "w2", step=3)
    assert all_three == ["w1", "w2", "w3"] and scenario.members == ["w1", "w2"]
    scenario.wait(5.5, "w1", "w2", "w3", phase="form", step=3)  # w3 may join again
    scenario.claims = False
    scenario.wait(3.0)
    scenario.stopped("w1", "w2", step=3)
    assert not scenario.said and scenario.coordinator.phase == "forming"
    scenario.tell(m.GenerationClaimed(4))
    assert scenario.of(m.AbortGeneration) and scenario.members == all_three
    scenario.claims = True
    for evicted in ([], ["w3"]):
        assert scenario.members == all_three
        scenario.stopped("w1", "w2", step=3)
        scenario.stopped("w3", has_state=False)
        assert [c.worker for c in scenario.ever(m.EvictWorker)] == evicted


def test_member_that_never_enters_is_left_out_of_the_next_generation():
    scenario = Scenario.training("w1", size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scenario.ready("w2")
    scenario.stopped("w1", step=3)
    assert scenario.members == ["w1", "w2"]
    while not scenario.of(m.AbortGeneration):
        scenario.wait(1.0, "w1", phase="form", step=3)
        scenario.hear("w2", phase="wait", generation=0)
    scenario.stopped("w1", step=3)
    scenario.stopped("w2", has_state=False)
    assert scenario.members == ["w1"]


def test_a_large_state_may_take_long_to_arrive():
    scenario = Scenario.training("w1", size=2, forming_timeout_s=5.0, gather_timeout_s=5.0)
    scenario.ready("w2")
    scenario.stopped("w1", step=3)
    scenario.wait(60.0, "w1", "w2", phase="receive", step=3)
    assert scenario.coordinator.phase == "forming"


def test_a_death_while_forming_is_no_failure_of_the_others():
    scenario = Scenario.training("w1", size=3, min_workers=1)
    scenario.ready("w2", "w3")
    scenario.stopped("w1", step=3)
    assert scenario.members == ["w1", "w2", "w3"]
    scenario.stopped("w1", step=3)
    scenario.lost("w3")
    scenario.stopped("w2", has_state=False)
    assert scenario.members == ["w1", "w2"]
    scenario.stopped("w2", has_state=False, unreachable=("w1",))
    scenario.stopped("w1", step=3)
    assert scenario.members == ["w1"]
    assert not scenario.ever(m.EvictWorker), "it failed to join once, and may try again"


def test_a_lost_report_ends_the_generation():
    scenario = Scenario.training("w1", "w2")
    assert m.AbortGeneration("w2", 1) in scenario.hear("w1", phase="wait")


def test_member_two_steps_behind_is_evicted():
    scenario = Scenario.training("w1", "w2")
    scenario.stopped("w1", step=9)
    scenario.stopped("w2", step=7)
    assert [c.worker for c in scenario.ever(m.EvictWorker)] == ["w2"]
    assert scenario.members == ["w1"]


def test_workers_may_be_listed_while_one_comes():
    scenario = trio()
    workers = scenario.coordinator._registry.workers

    class First:
        stage = Stage.MEMBER

        @property
        def id(self):
            workers["w99"] = workers[
                "w2"
            ]  # as the controller's thread may, after the first is listed
            return "w1"

    workers["w1"] = First()
    assert {"w1", "w2", "w3"} <= set(scenario.coordinator.workers)


def evaluated(scenario, worker, *evaluations, generation=1):
    """Whether the run fails with this heartbeat of (body, calls of ctx.evaluate, it has ended)."""
    body, count, ended = evaluations
    told = (body, count, bool(ended))
    heard = m.HeartbeatReceived(worker, generation, 5, "compute", evaluations=told)
    scenario.tell(heard)
    return bool(scenario.of(m.FailRun))


def test_members_that_evaluate_in_different_bodies_or_one_after_another_are_not_accused():
    scenario = trio()
    assert not evaluated(scenario, "w1", 10, 2, False)  # the second evaluation after step 5
    assert not evaluated(scenario, "w2", 10, 1, False)  # a late heartbeat, of the first one
    assert not evaluated(scenario, "w3", 8, 0, True)  # one that has not run the body of step 5
    assert not evaluated(scenario, "w2", 10, 2, True)
    assert not evaluated(scenario, "w2", 11, 3, False)  # behind the loop
    assert not evaluated(scenario, "w1", 10, 3, False)  # an older body
    assert not evaluated(scenario, "w1", 11, 1, True, generation=0)
    assert evaluated(scenario, "w1", 11, 2, True)
    (failed,) = scenario.of(m.FailRun)
    assert failed.error.startswith("LoopError: ctx.evaluate was called 3 times after step 5 by w2,")
    assert failed.facts == (failed.error.removeprefix("LoopError: "),)
