"""Scenes of losses: what is counted, what is taken back when the cause is known, and what a step
forgives."""

from __future__ import annotations

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Cause
from tests.coordinator.scenes import Scene


def running(**rules: object) -> Scene:
    scene = Scene(**({"size": 2} | rules))
    scene.running("w1", "w2")
    return scene


def counted(scene: Scene) -> tuple[int, int]:
    budgets = scene.coordinator._failures.budgets
    return budgets.losses.incidents, budgets.memory.incidents


@pytest.mark.parametrize(
    ("cause", "then"), [(Cause.PREEMPTED, (0, 0)), (Cause.OUT_OF_MEMORY, (0, 1))]
)
def test_a_loss_is_judged_anew_when_its_cause_is_known(cause: Cause, then: tuple[int, int]) -> None:
    scene = running()
    scene.lost("w1")
    assert counted(scene) == (1, 0)
    scene.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scene) == then
    scene.tell(m.WorkerLost("w1", "node gone", cause))
    assert counted(scene) == then, "once"


@pytest.mark.parametrize("twice", [True, False])
def test_stop_of_another_member_belongs_to_the_same_incident(twice: bool) -> None:
    scene = running()
    scene.stopped("w2")
    assert counted(scene) == (1, 0)
    if twice:
        scene.lost("w1")
    scene.tell(m.WorkerLost("w1", "node gone", Cause.PREEMPTED))
    assert counted(scene) == (0, 0)


def test_loss_of_another_worker_stays_counted() -> None:
    scene = running(size=3)
    scene.lost("w2")
    scene.tell(m.WorkerLost("w1", "node gone", Cause.PREEMPTED))
    assert counted(scene) == (1, 0)


def test_micro_batch_of_a_preempted_worker_is_not_blamed() -> None:
    scene = running(max_losses_of_micro_batch=1)
    for worker in ("w1", "w2"):
        scene.tell(m.WorkerLost(worker, "reset", micro_batch=(1, 3)))
        scene.tell(m.WorkerLost(worker, "node gone", Cause.PREEMPTED))
    assert "died while" not in scene.coordinator.reason


def test_micro_batch_reported_after_the_death_counts_once() -> None:
    """A worker's pipe may end before its last heartbeat arrives, or after; the loss counts once."""
    scene = running(max_losses_of_micro_batch=1)
    for worker, reports in (("w1", [None, (1, 3), (1, 3)]), ("w2", [(1, 3), None])):
        assert "died while" not in scene.coordinator.reason
        for at in reports:
            scene.tell(m.WorkerLost(worker, "reset", micro_batch=at))
    assert (
        "2 workers died one after another while running virtual worker 3 of step 1"
        in scene.coordinator.reason
    )


def test_micro_batch_of_a_worker_preempted_later_is_not_blamed() -> None:
    scene = running(max_losses_of_micro_batch=1)
    for worker in ("w1", "w2"):
        for at in (None, (1, 3)):
            scene.tell(m.WorkerLost(worker, "reset", micro_batch=at))
        scene.tell(m.WorkerLost(worker, "node gone", Cause.PREEMPTED))
    assert "died while" not in scene.coordinator.reason


def test_a_step_ends_the_pause_after_losses() -> None:
    scene = running()
    scene.coordinator._failures.retry_at = scene.now + 20.0
    scene.hear("w1", step=1)
    scene.lost("w1")
    assert scene.of(m.StartWorker)
