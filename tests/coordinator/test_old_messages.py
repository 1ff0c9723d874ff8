"""Messages of earlier generations and dead workers change nothing."""

import copy

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import TrainingPosition
from tests.coordinator.scenarios import SIGNATURE, facts, trio

OLD = [
    m.WorkerStopped("w1", 1, TrainingPosition(99), True, "old"),
    m.WorkerStopped("w2", 1, TrainingPosition(0), False, "old", ("w1",)),
    m.WorkerFinished("w1", 1, TrainingPosition(99, 1), "old"),
    m.HeartbeatReceived("w1", 1, 99, "done"),
    m.HeartbeatReceived("w2", 1, 99, "wait"),
    m.GenerationClaimed(1),
    m.GenerationClaimed(2),
    m.WorkerStarted("w1"),
    m.WorkerReady("w1", SIGNATURE, True),
    m.WorkerReported("w1", 1, TrainingPosition(99), True, True, SIGNATURE, True),
    m.WorkerLost("w3", "again"),
    m.WorkerFailed("w3", "error of the dead", ""),
    m.WorkerStarted("w3"),
    m.WorkerReady("w3", SIGNATURE, True),
    m.WorkerStopped("w3", 2, TrainingPosition(99), True, "dead"),
    m.WorkerFinished("w3", 2, TrainingPosition(99, 1), "dead"),
    m.DrainNoticed("w3", 1.0),
    m.WorkerSlow("w3", "slow"),
    m.DeadlineReached(),
]


@pytest.mark.parametrize("event", OLD, ids=repr)
@pytest.mark.parametrize("phase", ["forming", "running", "ending"])
def test_old_messages_change_nothing(event, phase):
    scenario = trio(min_workers=2)
    scenario.lost("w3")
    scenario.stopped("w1", "w2", step=4)
    assert scenario.coordinator.generation == 2
    if phase != "forming":
        scenario.hear("w1", "w2", step=5)
    if phase == "ending":
        scenario.stopped("w1", step=5)
    assert scenario.coordinator.phase == phase

    def known():
        state = facts(scenario.coordinator)
        fence = state.pop("_generation.fence")  # but for the lease, which a heartbeat renews
        state["fence"] = fence.exit_confirmed, sorted(fence.unconfirmed_dead)
        workers = {
            w.id: (w.stage, w.position, w.has_state, w.finished)
            for w in state.pop("_registry.workers").values()
        }
        alarms = vars(state.pop("_run.timers"))
        words = {k: str(v) for k, v in (state | alarms).items()}
        return copy.deepcopy(words | {"workers": workers})

    before = known()
    answers = scenario.tell(event)
    allowed = (m.RenewLease, m.AbortGeneration) if isinstance(event, m.HeartbeatReceived) else ()
    assert [c for c in answers if not isinstance(c, allowed)] == []
    after = known()
    if isinstance(event, m.HeartbeatReceived):
        for key in ("_generation.steps", "workers"):
            before.pop(key), after.pop(key)
    assert after == before
