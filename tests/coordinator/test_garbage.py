"""What the coordinator drops is freed at once: none of it waits for the garbage collector."""

import gc

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenes import Scene

WORKERS = 50


def test_no_event_leaves_a_cycle() -> None:
    while gc.collect():  # of other tests, some of which frees more as it goes
        pass
    gc.disable()
    try:
        live()
        assert gc.collect() == 0
    finally:
        gc.enable()


def live() -> None:
    """Losses, a drain, fewer workers, more, and the end of the run."""
    scene = Scene(size=WORKERS, virtual_workers=2 * WORKERS, standby=1)
    scene.running(*(f"w{n}" for n in range(1, WORKERS + 1)))
    for round_ in range(1, 9):
        members = scene.members
        scene.hear(*members, step=4 * round_)
        match round_ % 4:
            case 1:
                scene.lost(members[round_])
            case 2:
                scene.tell(m.DrainNoticed(members[-1], None))
            case 3:
                scene.tell(m.SizeRequested(WORKERS // 2))
            case _:
                scene.tell(m.SizeRequested(WORKERS))
        again(scene, 4 * round_)
    scene.tell(m.WorkerFailed(scene.members[0], "ValueError", ""))
    assert scene.coordinator.phase == "over"
    assert len(scene.ever(m.FormGeneration)) > 8


def again(scene: Scene, step: int) -> None:
    """Everybody obeys, until the next generation runs."""
    scene.ready(*(w for w, stage in scene.coordinator.workers.items() if stage == "starting"))
    generation = scene.coordinator.generation
    for worker in scene.members:
        if scene.coordinator.phase == "ending":
            scene.stopped(worker, step=step, generation=generation)
    scene.wait(0.1)
    scene.hear(*scene.members, step=step)
    assert scene.coordinator.phase == "running", scene.coordinator.reason
