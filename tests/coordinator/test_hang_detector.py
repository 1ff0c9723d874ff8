"""Who lives and does not go on: scenarios of hangs in each phase, and of waits that are none."""

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from elastic_dp.coordinator.workers.hang_detector import MIN_LIMIT_S, SLOW_FACTOR, STEPS
from elastic_dp.coordinator.workers.worker_state import HeartbeatProgress
from tests.coordinator.scenarios import Scenario

LIMIT_S = 30.0


def training(*workers, step=5, **config):
    """These have made some steps."""
    scenario = Scenario.training(*workers, hang_timeout_s=LIMIT_S, **config)
    scenario.hear(*workers, step=step)
    return scenario


def stay(scenario, seconds, cpu_s=0.0, **at):
    """Heartbeats each second, that say the same. Returns who was evicted meanwhile; `cpu_s` is used
    in a second."""
    all_said = len(scenario.all)
    for _ in range(int(seconds)):
        scenario.now += 1.0
        for worker, (phase, step) in at.items():
            scenario.beats += 1
            generation = scenario.coordinator.generation
            scenario.tell(
                m.HeartbeatReceived(
                    worker,
                    generation,
                    step,
                    phase,
                    scenario.beats,
                    scenario.beats * cpu_s / len(at),
                )
            )
    evicted = [c for c in scenario.all[all_said:] if isinstance(c, m.EvictWorker)]
    return list(dict.fromkeys(c.worker for c in evicted))


def test_worker_that_has_not_entered_the_collective_is_the_suspect():
    scenario = training("w1", "w2", "w3")
    at = {"w1": ("collective", 5), "w2": ("compute", 5), "w3": ("collective", 5)}
    assert stay(scenario, LIMIT_S - 1, **at) == []
    assert stay(scenario, 3, **at) == ["w2"]
    evicted = scenario.ever(m.EvictWorker)[0]
    assert evicted.stuck
    assert evicted.reason == "stuck: makes no progress for 31 s, in phase 'compute' after step 5"
    scenario.stopped("w1", "w3", step=5)
    assert scenario.members == ["w1", "w3"]


def test_worker_a_step_behind_is_the_suspect():
    """That worker did not notice that the collective has ended."""
    scenario = training("w1", "w2")
    assert stay(scenario, LIMIT_S + 5, w1=("collective", 6), w2=("collective", 5)) == ["w2"]


def test_worker_that_hangs_in_apply_is_the_suspect():
    scenario = training("w1", "w2")
    assert stay(scenario, LIMIT_S + 5, w1=("apply", 5), w2=("collective", 6)) == ["w1"]


def test_workers_that_move_in_time_are_no_suspects():
    scenario = training("w1", "w2")
    for step in range(5, 9):
        assert stay(scenario, LIMIT_S - 2, w1=("collective", step), w2=("compute", step)) == []


def test_collective_in_which_all_wait_is_aborted_without_an_eviction():
    scenario = training("w1", "w2")
    at = {"w1": ("collective", 5), "w2": ("collective", 5)}
    assert stay(scenario, LIMIT_S + 2, **at) == []
    assert (
        scenario.coordinator.reason
        == "generation 1 ends: no member makes progress in phase 'collective'"
    )
    assert len(scenario.ever(m.AbortGeneration)) >= 2
    scenario.stopped("w1", step=5)
    assert stay(scenario, LIMIT_S - 2, w2=("collective", 5), w1=("wait", 5)) == []
    assert stay(scenario, 3, w2=("collective", 5), w1=("wait", 5)) == ["w2"]  # nor can it leave


def test_worker_that_waited_for_a_late_member_has_time_to_go_on():
    """No member can have waited for long in a collective that begins only now."""
    for phase, waited_s in (("data", 2 * LIMIT_S), ("compute", LIMIT_S - 2)):
        scenario = training("w1", "w2", "w3")
        at = {"w1": ("collective", 5), "w3": ("collective", 5)}
        assert stay(scenario, waited_s, w2=(phase, 5), **at) == []
        assert stay(scenario, LIMIT_S - 2, w2=("collective", 5), **at) == []
        assert scenario.coordinator.phase == "running"
        at["w3"] = ("compute", 6)  # its word that they go on comes first
        assert stay(scenario, LIMIT_S - 2, w2=("collective", 5), **at) == []
        assert stay(scenario, 6, w2=("collective", 5), **at) == ["w1"], "which does not"


def test_the_body_an_evaluation_and_waits_for_data_are_said_and_last_as_long_as_they_last():
    for phase, words in (
        ("body", "w2 is in the loop's body"),
        ("evaluate", "w2 evaluates"),
        ("data", "w2 waits for data"),
        ("keep", "w2 copies the state for a checkpoint"),
    ):
        scenario = training("w1", "w2")
        step = 5 if phase == "data" else 6
        waits = ("collective", 5) if phase == "data" else ("collective", 6)
        assert stay(scenario, 10 * LIMIT_S, w1=waits, w2=(phase, step)) == []
        said = [c.text for c in scenario.ever(m.Explain) if words in c.text]
        assert 5 < len(said) <= 10, said
        assert scenario.coordinator.phase == "running"


def test_worker_inside_a_loop_body_may_finish_it_after_an_abort():
    scenario = training("w1", "w2", "w3")
    scenario.lost("w3")
    scenario.stopped("w1", step=5)
    assert stay(scenario, 10 * LIMIT_S, w1=("wait", 5), w2=("body", 5)) == []
    assert scenario.coordinator.phase == "ending"
    assert stay(scenario, LIMIT_S + 1, w1=("wait", 5), w2=("compute", 5)) == ["w2"]


def test_a_process_that_computes_has_longer():
    scenario = training("w1", "w2")
    at = {"w1": ("collective", 5), "w2": ("compute", 5)}
    assert stay(scenario, SLOW_FACTOR * LIMIT_S - 1, cpu_s=0.5, **at) == []
    assert stay(scenario, LIMIT_S, cpu_s=0.5, **at) == ["w2"]


def test_the_first_step_of_a_process_has_longer():
    """The first step may compile, in processes of its own. A joiner's first step is not the
    run's."""
    scenario = Scenario.training("w1", "w2", hang_timeout_s=LIMIT_S)
    at = {"w1": ("collective", 0), "w2": ("compute", 0)}
    assert stay(scenario, SLOW_FACTOR * LIMIT_S - 2, **at) == []
    scenario.hear("w1", "w2", step=7)
    scenario.lost("w2")
    scenario.stopped("w1", step=7)
    scenario.ready("w3")
    scenario.wait(0.1)
    scenario.stopped("w1", step=7)
    assert scenario.members == ["w1", "w3"]
    at = {"w1": ("collective", 7), "w3": ("compute", 7)}
    assert stay(scenario, SLOW_FACTOR * LIMIT_S - 2, **at) == []
    assert stay(scenario, LIMIT_S / 4, **at) == ["w3"]


def test_a_hand_over_in_which_nothing_moves_is_left():
    scenario = training("w1", "w2")
    scenario.lost("w2")
    scenario.stopped("w1", step=5)
    scenario.ready("w3")
    scenario.wait(0.1)
    scenario.stopped("w1", step=5)
    assert scenario.members == ["w1", "w3"]
    at = {"w1": ("give", 5), "w3": ("receive", 0)}
    assert stay(scenario, LIMIT_S + 5, **at) == []
    assert "no member makes progress in" in scenario.coordinator.reason
    scenario.stopped("w3", has_state=False, position=TrainingPosition(0))
    assert stay(scenario, LIMIT_S + 1, w1=("give", 5), w3=("wait", 0)) == ["w1"]


def test_worker_that_hangs_at_takeover_is_evicted():
    scenario = Scenario.recovered(["w1", "w2"], 3, hang_timeout_s=LIMIT_S)
    scenario.tell(m.WorkerReported("w1", 3, TrainingPosition(4), True, False, None, True))
    assert stay(scenario, LIMIT_S + 2, w2=("compute", 4), w1=("collective", 4)) == ["w2"]
    assert scenario.coordinator.phase != "taking over"


def test_heartbeats_that_are_late_or_doubled_make_nobody_older():
    scenario = training("w1", "w2")
    for _ in range(200):
        for worker in ("w1", "w2"):
            scenario.tell(m.HeartbeatReceived(worker, 1, 5, "compute", 1))
    assert not scenario.ever(m.EvictWorker)


def test_a_controller_that_slept_judges_nobody_by_what_waits_to_be_read():
    """The last of it says that they go on."""
    scenario = training("w1", "w2")
    hangs = {"w1": ("collective", 5), "w2": ("compute", 5)}
    assert stay(scenario, 5, **hangs | {"w2": ("data", 5)}) == []
    assert stay(scenario, LIMIT_S - 2, **hangs) == []
    scenario.claims = False
    scenario.now += 10.0  # it sleeps
    for step in (5, 5, 5, 5, 6):
        scenario.hear("w2", phase="compute", step=step)
    scenario.hear("w1", phase="collective", step=6)
    (claim,) = scenario.ever(m.ClaimGeneration)[-1:]
    scenario.tell(m.GenerationClaimed(claim.generation))
    assert not scenario.ever(m.EvictWorker)
    scenario.claims = True
    assert stay(scenario, LIMIT_S + 5, w1=("collective", 6), w2=("compute", 6)) == ["w2"]


def test_hang_limit_without_a_setting_grows_with_the_step_time():
    scenario = Scenario.training("w1", "w2")
    progress = scenario.coordinator._hang_detector
    assert progress.limit_s == MIN_LIMIT_S
    for step in range(1, 20):
        scenario.wait(40.0, "w1", "w2", step=step - 1)
        scenario.hear("w1", "w2", step=step)
    assert progress.limit_s == STEPS * 40.0


def test_cpu_time_before_an_abort_does_not_count_after_it():
    progress = HeartbeatProgress()
    for beat, cpu_s in enumerate([10.0, 20.0]):
        progress.record(m.HeartbeatReceived("w1", 0, 0, "start", beat, cpu_s))
    progress.restart()
    progress.record(m.HeartbeatReceived("w1", 0, 0, "start", 2, 20.5))
    assert (progress.beats, progress.cpu_s) == (1, 0.5)


SLOW = "data takes 3.0 times as long as with the others, which costs the run 22 %"


def test_slow_worker_leaves_once_it_is_replaced_elsewhere():
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


def test_one_slow_worker_is_replaced_at_a_time():
    scenario = Scenario.training("w1", "w2", "w3", min_workers=1)
    scenario.tell(m.WorkerSlow("w2", SLOW))
    assert not scenario.tell(m.WorkerSlow("w3", SLOW))
    assert not scenario.tell(m.WorkerSlow("w2", SLOW))


def test_replacements_that_are_slow_as_well_stay_in_the_end():
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


def test_worker_that_is_no_member_or_whose_run_ends_is_not_replaced():
    scenario = Scenario.training("w1", size=2)
    assert not scenario.tell(m.WorkerSlow("w2", SLOW))
    scenario.tell(m.StopRequested("enough"))
    assert not scenario.tell(m.WorkerSlow("w1", SLOW))
