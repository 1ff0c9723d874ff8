"""Losing everyone costs the steps since the newest checkpoint, and nothing of the result.

The job keeps an average in the loop's body, draws random numbers there, and evaluates: what a
checkpoint leaves out changes the final weights or a logged value.
"""

import contextlib
import dataclasses
import hashlib
import json
from unittest.mock import MagicMock

import pytest

import elastic_dp as edp
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.layout import canonical
from elastic_dp.config import CheckpointConfig, MapStyleData
from elastic_dp.coordinator.messages import CheckpointRequested, StopRequested, TrainingPosition
from elastic_dp.errors import CheckpointError, RunMismatch
from elastic_dp.storage import Store
from elastic_dp.train.generations import state_transfer
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.state.train_state import StepRecord
from tests.patience import eventually
from tests.runs import (
    ENDLESS,
    Points,
    formed_of,
    goes_on,
    group,
    in_turn,
    lines_of,
    local,
    never_put_off,
    spec_of,
    texts_of,
)
from tests.train.jobs import (
    Kept,
    adamw,
    average_and_plateau,
    classifier,
    cross_entropy,
    hold,
    plain,
)

STEPS = 30
EVERY_5 = CheckpointConfig(every_steps=5)


def job(steps=STEPS, workers=3, body_s=0.02, checkpoint=EVERY_5, least=1, **config):
    config = {"eval": MapStyleData(Points(60), micro_batch_size=8), "body_s": body_s} | config
    scaling = {"workers": workers, "min_workers": least}
    return spec_of(steps=steps, config=config, checkpoint=checkpoint, **scaling)


@pytest.fixture(scope="module")
def calm():
    return local(job(), average_and_plateau)


def steps_of(url):
    return [name.step for name in Catalog(Store(str(url))).names()]


def kill_all(run):
    before = times_lost(run)
    for process in list(run.worker_group.processes.values()):
        process.kill()
    # Up to then some of what they said last may still be on its way.
    eventually(lambda: times_lost(run) > before, run.controller.status)


def when_committed(url, step, action):
    """A script's action: wait for the checkpoint, then do it."""

    def act(run):
        eventually(lambda: max(steps_of(url), default=0) >= step, run.controller.status)
        action(run)

    return act


def times_lost(run):
    return sum("every worker with the training state is lost" in text for text in texts_of(run))


def test_losing_everyone_costs_the_steps_since_the_newest_checkpoint(calm, tmp_path):
    url, gates = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    spec = job(gates={13: str(gates[0]), 23: str(gates[1])})
    script = [
        (1, when_committed(url, 10, kill_all)),
        (1, lambda run: gates[0].touch()),
        (1, when_committed(url, 20, kill_all)),
        (1, lambda run: gates[1].touch()),
    ]
    train = never_put_off(average_and_plateau)
    outcome, run = group(spec, train, script=script, url=str(url))
    assert (outcome.digest, outcome.step) == (calm.digest, STEPS)
    assert times_lost(run) == 2
    logged = {x["step"]: x["eval_loss"] for x in lines_of(run) if "eval_loss" in x}
    assert logged == {x["step"]: x["eval_loss"] for x in calm.logged}
    assert steps_of(url) == [20, 25, 30]


def test_a_run_whose_controller_is_gone_goes_on_in_another(calm, tmp_path):
    """The first one has ended, and given up its lease; for one that has not see
    test_checkpoint_committer."""
    url = str(tmp_path)
    outcome, _ = group(job(steps=20), average_and_plateau, url=url)
    assert (outcome.error, outcome.step) == (None, 20)
    outcome, run = group(job(workers=2), average_and_plateau, url=url)
    assert (outcome.digest, outcome.step) == (calm.digest, STEPS)
    assert len(formed_of(run)) <= 2


def test_journal_says_how_long_each_checkpoint_took_and_a_checkpoint_whose_it_is(tmp_path):
    _, run = group(job(steps=10), average_and_plateau, url=str(tmp_path))
    commits = [line for line in lines_of(run) if line.get("event") == "CheckpointCommitted"]
    first = {line["step"]: line["duration_s"] for line in reversed(commits)}
    assert first.keys() == {5, 10}
    assert all(0 < seconds < 150 for seconds in first.values())
    metadata = Catalog(Store(str(tmp_path))).find().metadata
    assert metadata.job and metadata.data
    assert {"python", "torch", "elastic_dp", "kind"} <= set(metadata.versions)


def test_local_runs_go_on_from_a_groups_checkpoint_and_the_other_way_round(calm, tmp_path):
    spec = job(steps=15)
    group(spec, average_and_plateau, url=str(tmp_path))
    one = local(job(steps=20), average_and_plateau, url=str(tmp_path))
    assert [x["step"] for x in one.logged] == [16, 20]
    outcome, _ = group(job(), average_and_plateau, url=str(tmp_path))
    assert (outcome.error, outcome.digest) == (None, calm.digest)


def test_killed_as_the_state_is_copied(tmp_path):
    """The survivors write what the killed worker should have written. Each rank once, the group
    back at full size in between."""
    url, last = tmp_path / "run", tmp_path / "fault-2"
    faults = in_turn([{"rank": n} for n in range(3)], tmp_path, point="keeping", world_size=3)
    script = [
        (1, lambda run: eventually(lambda: run.controller.ended.is_set() or last.exists())),
        (1, goes_on),
        (1, StopRequested("enough")),
    ]
    train = never_put_off(average_and_plateau)
    outcome, run = group(job(ENDLESS), train, faults=faults, script=script, url=str(url))
    assert outcome.workers_lost == 3
    assert outcome.digest == local(job(outcome.step), average_and_plateau).digest
    committed = [int(text.split()[3]) for text in texts_of(run) if "is committed" in text]
    assert committed == sorted({*range(5, outcome.step, 5), outcome.step})  # as any run's end


def test_requested_checkpoint_is_taken_at_one_step_by_all(tmp_path):
    spec = job(ENDLESS, checkpoint=CheckpointConfig())
    script = [
        (3, CheckpointRequested()),
        (4, when_committed(tmp_path, 1, kill_all)),
        (4, goes_on),
        (4, StopRequested("enough")),
    ]
    outcome, _ = group(spec, average_and_plateau, script=script, url=str(tmp_path))
    assert outcome.digest == local(job(outcome.step), average_and_plateau).digest
    # All members are told, as any may be about to go; who hears it after the others kept one asks
    # once more.
    assert 1 <= len(steps_of(tmp_path)) <= 3


def test_run_with_checkpoints_of_an_earlier_version_is_refused_with_the_way_out(tmp_path):
    local(job(steps=5), average_and_plateau, url=str(tmp_path))
    for path in tmp_path.glob("checkpoints/seals/step-*"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"elastic_dp_checkpoint": 6}))
    files = {path: path.read_bytes() for path in tmp_path.glob("checkpoints/**/*step*/*")}
    with pytest.raises(CheckpointError, match=r"format 6: .* Export it with the version"):
        local(job(steps=10), average_and_plateau, url=str(tmp_path))
    with pytest.raises(CheckpointError, match="load the file into the model"):
        edp.load_state(str(tmp_path))
    assert {path: path.read_bytes() for path in files} == files != {}


@pytest.mark.parametrize(("kept", "has_state"), [(True, True), (False, True), (True, False)])
def test_a_wish_ends_with_the_step_that_is_kept_also_where_it_is_taken_over(kept, has_state):
    """A worker that joins keeps nothing of this step: its wish stays."""
    record = StepRecord(5, 0, False, 0.5, 8.0, {}, 0.1, kept=kept)
    tree = dict(
        position=[5, 0, 0], of_finished_bodies=(0, None), agreed=4, evaluations=[], ended=None
    )
    progress, control = WorkerProgress(TrainingPosition(4), has_state=has_state), WorkerControl()
    control._generation, control._inside = 1, True
    control.request_checkpoint()
    session = MagicMock(progress=progress, control=control)
    session.state.record = record
    transfer = state_transfer.StateTransfer(session)
    transfer._adopt(MagicMock(tree=lambda: tree), lineage_id=1)
    assert progress.position == TrainingPosition(5) and progress.has_state
    assert control.checkpoint_wanted is not (kept and has_state)


def test_checkpoints_by_time_keep_their_interval(tmp_path):
    every_s = 0.3
    spec = job(ENDLESS, checkpoint=CheckpointConfig(every_s=every_s, num_to_keep=None))
    script = [
        (1, lambda run: eventually(lambda: len(steps_of(tmp_path)) >= 3)),
        (1, StopRequested("enough")),
    ]
    outcome, _ = group(spec, average_and_plateau, script=script, url=str(tmp_path))
    assert outcome.digest == local(job(outcome.step), average_and_plateau).digest
    assert len(steps_of(tmp_path)) <= 2 + outcome.wall_s / every_s


def test_a_state_that_cannot_be_stored_is_an_error_before_the_first_step(tmp_path):
    def train(ctx):
        model = classifier()
        odd = Kept(lambda step: step)
        for _ in ctx.steps(model, adamw(model), cross_entropy, state={"odd": odd}):
            raise AssertionError("a step was made")

    outcome, _ = group(job(workers=1), train, url=str(tmp_path), fails=True)
    assert outcome.error.startswith("SpecError: ")
    assert "state['odd'].state_dict()" in outcome.error and "value is a " in outcome.error


def test_an_operator_who_asks_for_one_that_cannot_be_made_does_no_harm(tmp_path):
    def train(ctx):
        model = classifier()
        odd = Kept(None)
        for step in ctx.steps(model, adamw(model), cross_entropy, state={"odd": odd}):
            odd.value = lambda step: step
            hold(ctx, step)

    def refused(run):
        return [text for text in texts_of(run) if "body.user.odd.value" in text]

    spec = job(ENDLESS, workers=1, checkpoint=CheckpointConfig())
    script = [
        (2, CheckpointRequested()),
        (2, lambda run: eventually(lambda: refused(run))),
        (2, StopRequested("enough")),
    ]
    outcome, run = group(spec, train, script=script, url=str(tmp_path))
    assert (outcome.error, outcome.reason) == (None, "enough")
    asked, *last = refused(run)  # the last step, unless that is the one which was asked for
    assert f"step {outcome.step}:" in (last or [asked])[-1], texts_of(run)


# Paths in a commit record, and what is written there; None: nothing.
STEP = ("manifest", "trees", 0, 0, "step")
ENTRY = (*STEP, "optimizer", 0)
CHANGES_BY_OTHERS = {
    "no record of the step": (("manifest", "trees", 0, 0, "step", "record"), None),
    "no groups of the optimizer": (("manifest", "trees", 0, 0, "step", "optimizer_rest"), None),
    "a name that is a list": (("about", "naming", "parameters", 0), []),
    "names that are no list": (("about", "naming", "parameters"), {"$": 1}),
    "settings of another kind": (("about", "naming", "job", "growth"), {"$": "a"}),
    "a count of steps that is a number": ((*ENTRY, "step"), 3.0),
    "an average that is text": ((*ENTRY, "exp_avg"), "x"),
    "a rate that is text": ((*STEP, "held", "optimizers", 0, "groups", 0, "values", "lr"), "x"),
}


@pytest.mark.parametrize("change", CHANGES_BY_OTHERS)
def test_a_commit_record_that_something_else_has_written_is_an_error_of_this_package(
    change, tmp_path
):
    url, path = str(tmp_path / "run"), CHANGES_BY_OTHERS[change][0]
    spec = spec_of(steps=2, checkpoint=CheckpointConfig(every_steps=2))
    local(spec, plain, url=url)
    *others, seal = sorted((tmp_path / "run" / "checkpoints" / "seals").glob("step-*"))
    assert not others
    record = json.loads(seal.read_bytes())
    node = record["body"]
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    if CHANGES_BY_OTHERS[change][1] is not None:
        if isinstance(node, list):
            node.insert(path[-1], CHANGES_BY_OTHERS[change][1])
        else:
            node[path[-1]] = CHANGES_BY_OTHERS[change][1]
    record["digest"] = hashlib.sha256(canonical(record["body"])).hexdigest()
    seal.write_bytes(canonical(record))
    (tmp_path / "run" / "result.json").unlink(missing_ok=True)
    with pytest.raises((CheckpointError, RunMismatch)):
        local(dataclasses.replace(spec, max_steps=4), plain, url=url)
    with contextlib.suppress(CheckpointError):  # some of this it does not need
        edp.load_state(url)
