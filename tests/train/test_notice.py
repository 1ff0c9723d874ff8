"""A node that will go in 30 seconds: it costs what a planned leave costs, and its replacement is
asked for at once. A head node that will go costs no step."""

import dataclasses
import functools
import time

from elastic_dp.coordinator.messages import (
    DrainNoticed,
    HeadDrainNoticed,
    SizeRequested,
    StopRequested,
)
from elastic_dp.errors import ClusterError
from tests.patience import eventually
from tests.runs import ENDLESS, at_size, formed_of, group, lines_of, local, spec_of, texts_of
from tests.train.checkpointing.test_worker_checkpointer import steps_of
from tests.train.jobs import plain


def kinds(lines):
    return [line.get("event") or line.get("command") for line in lines]


# A controller that has heard no worker for a second first confirms that it leads.
CONFIRMS = {"ClaimGeneration", "GenerationClaimed", "TimesReported", "Explain"}


def waited_for(told):
    """What the journal has between the notice and the request for a replacement."""
    noticed = told.index("DrainNoticed")
    return set(told[noticed + 1 : told.index("StartWorker", noticed)]) - CONFIRMS


def change(lines, generation):
    """How a generation ended: (steps at which its members stopped and why, what was told to end
    it)."""
    ours = [line for line in lines if line.get("generation") == generation]
    stopped = [line for line in ours if line.get("event") == "WorkerStopped"]
    # Whoever is reminded once more says it once more.
    stops = {line["worker"]: line for line in reversed(stopped)}.values()
    told = {kind for kind in kinds(ours) if kind in ("EndGeneration", "AbortGeneration")}
    return {line["position"].step for line in stops}, {line["reason"] for line in stops}, told


def test_no_step_is_made_again_and_it_is_one_planned_end_as_a_leave_is(tmp_path):
    """Bodies wait until they have heard of the planned end: who hears of it late would go a step
    further."""
    seen, pause = {}, tmp_path / "pause"

    def ends(run, size, event):
        """The present generation, by this; and the next one, of that size, trains."""
        status = run.controller.status
        generation = status()["generation"]
        pause.touch()
        run.controller.post(event)
        eventually(lambda: status()["generation"] > generation, status)
        pause.unlink()
        at_size(size)(run)
        return generation

    def take_away(run):
        at_size(3)(run)
        seen["victim"] = run.controller.coordinator.membership.members[-1].worker
        notice = DrainNoticed(seen["victim"], time.monotonic() + 30.0)
        seen["noticed in"] = ends(run, 3, notice)

    def leave(run):
        eventually(lambda: seen["victim"] not in run.controller.status()["workers"])
        seen["left in"] = ends(run, 2, SizeRequested(2))

    spec = spec_of(steps=ENDLESS, config={"pause": str(pause), "body_s": 0.01})
    script = [(1, take_away), (1, leave), (1, StopRequested("enough"))]
    outcome, run = group(spec, plain, script=script)
    undisturbed = local(spec_of(steps=outcome.step), plain)
    assert (outcome.digest, outcome.workers_lost) == (undisturbed.digest, 0)
    assert not waited_for(kinds(lines_of(run))), "the replacement is asked for at once"
    first = change(lines_of(run), seen["noticed in"])
    second = change(lines_of(run), seen["left in"])
    assert first[1:] == second[1:] == ({"planned end"}, {"EndGeneration"})
    assert len(first[0]) == len(second[0]) == 1, "nobody was ahead"
    # Whoever comes and whoever goes do so in one change of the group.
    formed = formed_of(run)
    assert formed.index(seen["left in"]) == formed.index(seen["noticed in"]) + 1


def test_head_that_goes_away_at_three_instants_takes_no_step_with_it(tmp_path):
    """Each time all workers and the controller end at the deadline; the next start knows nothing
    of them but the run's folder."""
    url, made, told = str(tmp_path), 0, "suspended: the head node goes away, and the state after"

    def head_goes(within_s, run):
        run.controller.post(HeadDrainNoticed(time.monotonic() + within_s))
        eventually(lambda: any(told in text for text in texts_of(run)), run.controller.status)
        run.controller.fail(ClusterError("the head node is gone"))

    spec = spec_of(workers=2, steps=ENDLESS, config={"body_s": 0.01})
    for instant in range(3):
        goes = functools.partial(head_goes, 5.0 + 0.15 * instant)
        _, run = group(spec, plain, script=[(made + 1, goes)], url=url, fails=True)
        stops = [line for line in lines_of(run) if line.get("event") == "WorkerStopped"]
        kept = steps_of(url)[-1]
        assert kept == max(line["position"].step for line in stops) > made, texts_of(run)
        made = kept
    outcome, run = group(dataclasses.replace(spec, max_steps=made + 3), plain, url=url)
    assert outcome.digest == local(spec_of(steps=made + 3), plain).digest
