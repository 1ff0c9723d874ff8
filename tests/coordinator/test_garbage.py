"""What the coordinator drops is freed at once: none of it waits for the garbage collector."""

import gc
import subprocess
import sys
from pathlib import Path

from elastic_dp.coordinator import messages as m
from tests.coordinator.scenarios import Scenario

WORKERS = 50


def test_no_event_leaves_a_cycle():
    """A process of its own runs it: threads that other tests have left free cycles meanwhile."""
    code = f"from {__name__} import garbage_of, live; print(garbage_of(live))"
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ran.stdout == "0\n", ran.stderr


def garbage_of(run):
    while gc.collect():
        pass
    gc.disable()
    try:
        run()
        return gc.collect()
    finally:
        gc.enable()


def live():
    """Losses, a drain, fewer workers, more, and the end of the run."""
    scenario = Scenario.training(
        *(f"w{n}" for n in range(1, WORKERS + 1)),
        size=WORKERS,
        virtual_workers=2 * WORKERS,
        standby=1,
    )
    for round_ in range(1, 9):
        members = scenario.members
        scenario.hear(*members, step=4 * round_)
        match round_ % 4:
            case 1:
                scenario.lost(members[round_])
            case 2:
                scenario.tell(m.DrainNoticed(members[-1], None))
            case 3:
                scenario.tell(m.SizeRequested(WORKERS // 2))
            case _:
                scenario.tell(m.SizeRequested(WORKERS))
        again(scenario, 4 * round_)
    scenario.tell(m.WorkerFailed(scenario.members[0], "ValueError", ""))
    assert scenario.coordinator.phase == "over"
    assert len(scenario.ever(m.FormGeneration)) > 8


def again(scenario, step):
    """Everybody obeys, until the next generation runs."""
    scenario.ready(*(w for w, stage in scenario.coordinator.workers.items() if stage == "starting"))
    generation = scenario.coordinator.generation
    for worker in scenario.members:
        if scenario.coordinator.phase == "ending":
            scenario.stopped(worker, step=step, generation=generation)
    scenario.wait(0.1)
    scenario.hear(*scenario.members, step=step)
    assert scenario.coordinator.phase == "running", scenario.coordinator.reason
