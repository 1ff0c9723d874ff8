"""A node that will go in 30 seconds: it costs what a planned leave costs, and its replacement is asked for at once."""

import time

from elastic_dp.protocol.messages import DrainNoticed, SizeRequested
from tests.patience import eventually
from tests.runs import group, lines_of, local, spec_of
from tests.train.jobs import plain

# The bodies of these steps wait for a group of that size, so three have trained together after 21.
HOLD = {20: 3, 60: 2}


def kinds(lines):
    return [line.get("event") or line.get("command") for line in lines]


def change(lines, generation):
    """How a generation ended: (steps at which its members stopped and why, what was told to end it)."""
    ours = [line for line in lines if line.get("generation") == generation]
    stopped = [line for line in ours if line.get("event") == "WorkerStopped"]
    # Whoever is reminded once more says it once more.
    stops = {line["worker"]: line for line in reversed(stopped)}.values()
    told = {kind for kind in kinds(ours) if kind in ("EndGeneration", "AbortGeneration")}
    return {line["place"].step for line in stops}, {line["reason"] for line in stops}, told


def test_no_step_is_made_again_and_it_is_one_planned_end_as_a_leave_is():
    seen = {}

    def take_away(run):
        membership = run.controller.coordinator.membership
        seen["victim"], seen["noticed in"] = membership.seats[-1].worker, membership.generation
        run.controller.post(DrainNoticed(seen["victim"], time.monotonic() + 30.0))

    def leave(run):
        """When the replacement is there and trains: who waits in a new group can end at once."""
        eventually(lambda: seen["victim"] not in run.controller.status()["workers"])
        stopped_at = max(change(lines_of(run), seen["noticed in"])[0])
        eventually(lambda: run.controller.status()["step"] > stopped_at)
        seen["left in"] = run.controller.status()["generation"]
        run.controller.post(SizeRequested(2))

    spec = spec_of(steps=70, config={"hold": HOLD, "body_s": 0.01})
    outcome, run = group(spec, plain, script=[(22, take_away), (22, leave)])
    assert outcome.error is None, outcome.traceback
    assert (outcome.digest, outcome.workers_lost) == (local(spec, plain).digest, 0)
    noticed = kinds(lines_of(run)).index("DrainNoticed")
    assert kinds(lines_of(run))[noticed + 1] == "StartWorker", "nothing was waited for"
    first = change(lines_of(run), seen["noticed in"])
    second = change(lines_of(run), seen["left in"])
    assert first[1:] == second[1:] == ({"planned end"}, {"EndGeneration"})
    assert len(first[0]) == len(second[0]) == 1, "nobody was ahead"
    # Whoever comes and whoever goes do so in one change of the group.
    assert seen["left in"] == seen["noticed in"] + 1
