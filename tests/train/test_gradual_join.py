"""A worker that joins takes a large state over in parts while the others train: with the bits of
the undisturbed run, whoever dies at whatever instant of it."""

import functools
import itertools
import os
import signal

import pytest
import torch

from elastic_dp.config import MapStyleData
from elastic_dp.coordinator.messages import SizeRequested, StopRequested
from elastic_dp.train.generations import gradual_join
from elastic_dp.train.generations.gradual_join import GradualJoin
from elastic_dp.train.generations.state_transfer import StateTransfer
from tests.cluster.test_budgets import is_first
from tests.patience import eventually
from tests.runs import ENDLESS, Points, group, lines_of, local, losses_of, spec_of
from tests.train.jobs import (
    ZOO,
    adamw,
    average_and_plateau,
    classifier,
    cross_entropy,
    hold,
)

SLOW = pytest.mark.slow
PARTS = 6  # at least so many steps does it take
WHOLE = ("optimizer_with_a_state_of_its_own",)  # state that cannot be moved in parts
CLASSIC = ("plain", "batch_norm", "frozen_and_unused", "groups", "channels_last", "fused")


def job(steps=ENDLESS, virtual=4, **options):
    config = {"eval": MapStyleData(Points(60), micro_batch_size=8), "body_s": 0.02, "hold": {}}
    least = {"min_workers": 2}  # they begin together
    return spec_of(steps=steps, workers=2, virtual=virtual, config=config, **least, **options)


def gradually(train, folder, instant=None, role=None):
    """Joins take `PARTS` steps and more. The first worker in this role dies at this instant of the
    third step of a join. Files in `folder` say which workers have joined."""

    def joins(ctx):
        session, steps = ctx._session, []
        gradual_join.LARGE_BYTES, gradual_join.LEAST_BYTES = 0, 1
        gradual_join.UNIT_BYTES = 512
        gradual_join.OF_A_STEP = 12  # parts of some 3 kB of parameters
        role_of = {
            "joiner": lambda one: one.joins_here,
            "source": lambda one: one._shares.rank == one._source,
            "other": lambda one: not one.joins_here and one._shares.rank != one._source,
        }

        def dies(at):
            one = session._joining
            is_late = len(steps) >= 3 or at in ("complete", "completed")
            is_now = instant is not None and instant == at and one._move is not None and is_late
            if is_now and role_of[role](one) and is_first(folder / "dead"):
                os.kill(os.getpid(), signal.SIGKILL)

        def passing(method, before=None, after=None):
            @functools.wraps(method)
            def passes(one, *given, **named):
                if before == "begin" and one._move is not None:
                    steps.append(session.generation)
                    del steps[: len(steps) - steps.count(session.generation)]
                dies(before)
                result = method(one, *given, **named)
                dies(after)
                return result

            return passes

        for name in ("begin", "agree", "prepare"):
            after = f"{name} ended"
            setattr(GradualJoin, name, passing(getattr(GradualJoin, name), name, after))
        GradualJoin.commit = passing(GradualJoin.commit, "commit")
        StateTransfer._move = passing(StateTransfer._move, "complete", "completed")
        complete, adopt = StateTransfer.complete_join, StateTransfer._adopt

        def completes(transfer, group, plan, payload, lineage_id):
            complete(transfer, group, plan, payload, lineage_id)
            if payload is None:
                (folder / f"{session.worker} gradually").write_text(str(len(steps)), "utf-8")

        def adopts(transfer, payload, lineage_id):
            adopt(transfer, payload, lineage_id)
            (folder / f"{session.worker} joined").touch()

        StateTransfer._adopt = adopts
        begin = StateTransfer.begin_join

        def begins(transfer, group, plan, payload, kept):
            possible, keeps = begin(transfer, group, plan, payload, kept)
            if keeps:
                (folder / "kept").touch()
            return possible, keeps

        StateTransfer.begin_join, StateTransfer.complete_join = begins, completes
        train(ctx)

    return joins


def wait_for_joins(folder, count=1, dead=False):
    def joined(run):
        status, over = run.controller.status, run.controller.ended.is_set

        def is_there():
            files = [*folder.glob("w* joined")]
            is_dead = not dead or (folder / "dead").exists()
            return over() or (len(files) > count and is_dead)  # one more where it all began

        eventually(is_there, status)
        at = status()["step"]
        eventually(lambda: over() or status()["step"] > at + 2, status)

    return joined


def check(spec, train, outcome, run, kills=0):
    assert outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    assert outcome.workers_lost == kills, losses_of(run)
    undisturbed = local(job(outcome.step, **spec), train)
    assert outcome.digest == undisturbed.digest
    logged = {x["step"]: x["eval_loss"] for x in lines_of(run) if "eval_loss" in x}
    assert logged == {x["step"]: x["eval_loss"] for x in undisturbed.logged if "eval_loss" in x}


@pytest.mark.parametrize(
    "name", [*CLASSIC, *(pytest.param(n, marks=SLOW) for n in ZOO if n not in CLASSIC)]
)
def test_two_join_one_after_the_other_with_the_local_digest(name, tmp_path):
    script = [(4, SizeRequested(3)), (4, wait_for_joins(tmp_path)), (1, SizeRequested(4))]
    script += [(1, wait_for_joins(tmp_path, 2)), (1, StopRequested("enough"))]
    shape = {"shape": (3, 8, 8)} if name == "channels_last" else {}
    outcome, run = group(job(**shape), gradually(ZOO[name], tmp_path), script=script)
    check(shape, ZOO[name], outcome, run)
    steps = [int(file.read_text("utf-8")) for file in tmp_path.glob("w* gradually")]
    assert len(steps) == (2 if name not in WHOLE else 0) and min(steps, default=PARTS) >= PARTS


INSTANTS = [
    *(f"{name}{when}" for name in ("begin", "agree", "prepare") for when in ("", " ended")),
    *("commit", "complete", "completed"),
]


IN_CI = [
    *(("joiner", "prepare ended"), ("source", "begin ended"), ("other", "commit")),
    *(("joiner", "completed"), ("source", "complete")),
]


@pytest.mark.parametrize(
    ("role", "instant"),
    [
        pytest.param(*where, marks=() if where in IN_CI else SLOW)
        for where in itertools.product(("joiner", "source", "other"), INSTANTS)
    ],
)
def test_killed_while_somebody_joins(role, instant, tmp_path):
    train = average_and_plateau
    kills = functools.partial(gradually, instant=instant, role=role)
    script = [(4, SizeRequested(3)), (4, wait_for_joins(tmp_path, dead=True))]
    script += [(1, StopRequested("enough"))]
    outcome, run = group(job(), kills(train, tmp_path), script=script)
    check({}, train, outcome, run, kills=1)


def changes_what_is_trained(ctx):
    """Every eighth body freezes a layer, or thaws it."""
    model = classifier()
    first = next(model.parameters())
    for step in ctx.steps(model, adamw(model), cross_entropy):
        first.requires_grad_(step.number % 16 < 8)
        hold(ctx, step)


def test_body_that_freezes_a_layer_meanwhile(tmp_path):
    script = [(4, SizeRequested(3)), (4, wait_for_joins(tmp_path)), (1, StopRequested("enough"))]
    outcome, run = group(job(), gradually(changes_what_is_trained, tmp_path), script=script)
    check({}, changes_what_is_trained, outcome, run)
    lines = [x for x in lines_of(run) if x.get("event") == "WorkerStopped"]
    assert any("requires_grad has changed" in x["reason"] for x in lines)


def test_what_has_arrived_is_kept_when_another_one_joins(tmp_path):
    script = [(4, SizeRequested(3)), (4, two_train_and(1)), (1, SizeRequested(4))]
    script += [(1, wait_for_joins(tmp_path, 2)), (1, StopRequested("enough"))]
    outcome, run = group(job(), gradually(average_and_plateau, tmp_path), script=script)
    check({}, average_and_plateau, outcome, run)
    assert (tmp_path / "kept").exists()


def two_train_and(joining):
    def wait(run):
        status, over = run.controller.status, run.controller.ended.is_set
        eventually(lambda: status()["world_size"] == 2 + joining or over(), status)
        at = status()["step"]
        eventually(lambda: status()["step"] > at + 1 or over(), status)

    return wait


@pytest.mark.parametrize("how", ["steps", "stop", "smaller"])
def test_run_ends_or_shrinks_before_the_worker_has_joined(how, tmp_path):
    def ends(run):
        two_train_and(1)(run)
        if how != "steps":
            run.controller.post(StopRequested("enough") if how == "stop" else SizeRequested(2))

    steps = 10 if how == "steps" else ENDLESS
    script = [(4, SizeRequested(3)), (4, ends)]
    if how == "smaller":
        script += [(20, StopRequested("enough"))]
    slow = gradually(average_and_plateau, tmp_path)
    outcome, run = group(job(steps), slow, script=script)
    check({}, average_and_plateau, outcome, run)


def with_muon(ctx):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    model[0].bias.requires_grad_(False), model[1].bias.requires_grad_(False)
    for step in ctx.steps(model, optimizer, cross_entropy):
        hold(ctx, step)


def test_state_that_must_be_whole_is_copied_at_once(tmp_path):
    script = [(4, SizeRequested(3)), (12, StopRequested("enough"))]
    outcome, run = group(job(), gradually(with_muon, tmp_path), script=script)
    check({}, with_muon, outcome, run)
    assert not [*tmp_path.glob("w* gradually")]


def test_small_state_is_copied_at_once():
    model = classifier()
    assert sum(p.nbytes for p in model.parameters()) < gradual_join.LARGE_BYTES
