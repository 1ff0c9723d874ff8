"""A worker that joins takes a large state over in parts while the others train: with the bits of
the undisturbed run, whoever dies at whatever instant of it."""

import functools
import inspect
import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from elastic_dp.config import CheckpointConfig, MapStyleData
from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested, StopRequested
from elastic_dp.errors import GroupAborted
from elastic_dp.train import log_sender
from elastic_dp.train.exactness.torch_optimizers import ELEMENTWISE
from elastic_dp.train.fault_injection import POINTS, WorkerFault
from elastic_dp.train.generations import gradual_join, state_transfer
from elastic_dp.train.generations.gradual_join import GradualJoin
from elastic_dp.train.generations.state_transfer import StateTransfer, plan_state_transfer
from tests.cluster.test_budgets import is_first
from tests.patience import eventually
from tests.runs import (
    ENDLESS,
    Points,
    formed_of,
    goes_on,
    group,
    lines_of,
    local,
    losses_of,
    spec_of,
)
from tests.train.exactness.test_torch_optimizers import LR, VARIANTS
from tests.train.jobs import (
    ZOO,
    adamw,
    average_and_plateau,
    batch_norm,
    classifier,
    cross_entropy,
    hold,
    loop,
)
from tests.train.test_equals_plain_run import STRATEGIES, alone_of, with_options
from tests.train.test_kills import WHERE_SHARDED

SLOW = pytest.mark.slow
PARTS = 5  # at least so many steps does it take
WHOLE = ("optimizer_with_a_state_of_its_own",)  # state that cannot be moved in parts
CLASSIC = ("plain", "batch_norm", "frozen_and_unused", "groups", "channels_last", "fused")
# What a worker passes on its way: what the classes do in a join, and the named points of a run.
DONE = {
    f"{kind.__name__}.{name}": kind
    for kind, names in ((GradualJoin, vars(GradualJoin)), (StateTransfer, ("begin_join",)))
    for name in names
    if not name.startswith("_") and inspect.isfunction(vars(kind)[name])
} | {"StateTransfer.complete_join": StateTransfer}
ASKED = ("GradualJoin.ranks", "GradualJoin.kept_of")  # also where nobody joins
INSTANTS = [
    *(f"{name}{when}" for name in DONE if name not in ASKED for when in ("", " ended")),
    *(p for p in POINTS if p not in (*WHERE_SHARDED, "restoring", "sharing")),
]
EARLY = ("forming", "sending_state", "receiving_state", "begin_join", "start", "forget")


def job(steps=ENDLESS, virtual=4, workers=2, **options):
    config = {"eval": MapStyleData(Points(60), micro_batch_size=8), "body_s": 0.02, "hold": {}}
    least = {"min_workers": workers}  # they begin together
    return spec_of(steps=steps, workers=workers, virtual=virtual, config=config, **least, **options)


def role_of(session):
    """Returns "joiner", "source" or "other" in a generation in which somebody joins, else None."""
    if session.membership is None:
        return None
    plan = plan_state_transfer(session.membership)
    joining, rank = session._joining.ranks(session.membership, plan), session.groups.rank
    if rank in joining:
        return "joiner"
    return ("source" if rank == plan.source else "other") if joining else None


def gradually(train, folder, instant=None, role=None):
    """Joins take `PARTS` steps and more. The first worker in this role ("member": in each but that
    of a joiner) dies at this instant of the third step of a join, or before it. Files in `folder`
    say which workers have joined."""

    def joins(ctx):
        session, steps = ctx._session, []
        gradual_join.LARGE_BYTES, gradual_join.LEAST_BYTES, state_transfer.SHORT_S = 0, 1, 0.0
        log_sender.GATHER_S = 60.0  # what somebody has not sent when it dies, another one must have
        gradual_join.UNIT_BYTES = 512
        gradual_join.OF_A_ROUND, gradual_join.MOST_ROUNDS = 12, 2  # of some 3 kB of parameters

        def dies(at, moving):
            if instant != at or not session.loop.opened:
                return
            mine = role_of(session)
            if mine != role and (role != "member" or mine not in ("source", "other")):
                return
            is_now = (moving and len(steps) >= 3) or any(word in at for word in EARLY)
            if is_now and is_first(folder / f"dead {mine}"):
                os.kill(os.getpid(), signal.SIGKILL)

        def moves():
            return session.loop.opened and session._joining._move is not None

        def passing(called, method):
            @functools.wraps(method)
            def passes(one, *given, **named):
                moving = moves()
                if called == "GradualJoin.begin" and moving:
                    steps.append(session.generation)
                    del steps[: len(steps) - steps.count(session.generation)]
                dies(called, moving)
                result = method(one, *given, **named)
                dies(f"{called} ended", moving)
                return result

            return passes

        for called, kind in DONE.items():
            name = called.partition(".")[2]
            setattr(kind, name, passing(called, getattr(kind, name)))
        session.faults.plan = (WorkerFault("forming", worker="nobody"),)  # so points are passed
        session.faults.point = lambda name, *given: dies(name, moves())
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
            is_dead = not dead or any(folder.glob("dead *"))
            return over() or (len(files) > count and is_dead)  # one more where it all began

        eventually(is_there, status)
        goes_on(run, steps=3)

    return joined


def check(spec, train, outcome, run, kills=0, alone=local):
    assert outcome.workers_lost == kills, losses_of(run)
    undisturbed = alone(with_options(job(outcome.step), **spec), train)
    assert outcome.digest == undisturbed.digest
    logged = {x["step"]: x["eval_loss"] for x in lines_of(run) if "eval_loss" in x}
    assert logged == {x["step"]: x["eval_loss"] for x in undisturbed.logged if "eval_loss" in x}


ENOUGH = (1, StopRequested("enough"))


def join_and_check(train, folder, *script, how=(), kills=0, steps=ENDLESS, **spec):
    """A third worker joins, then all of the script happens. `how`: the instant and the role in
    which one dies."""
    url = str(folder / "run") if "checkpoint" in spec else None
    cut, script = gradually(train, folder, *how), [(4, SizeRequested(3)), *script]
    outcome, run = group(with_options(job(steps), **spec), cut, script=script, url=url)
    check({}, train, outcome, run, kills)
    return run


def join_twice(train, folder, spec, alone=local):
    """Returns in how many steps each has joined that has done so gradually."""
    script = [(4, SizeRequested(3)), (4, wait_for_joins(folder)), (1, SizeRequested(4))]
    script += [(1, wait_for_joins(folder, 2)), ENOUGH]
    outcome, run = group(with_options(job(), **spec), gradually(train, folder), script=script)
    check(spec, train, outcome, run, alone=alone)
    steps = [int(file.read_text("utf-8")) for file in folder.glob("w* gradually")]
    assert min(steps, default=PARTS) >= PARTS
    return steps


@pytest.mark.parametrize(
    "name", [*CLASSIC, *(pytest.param(n, marks=SLOW) for n in ZOO if n not in CLASSIC)]
)
def test_two_join_one_after_the_other_with_the_local_digest(name, tmp_path):
    data = MapStyleData(Points(192, shape=(3, 8, 8)), micro_batch_size=4)
    spec = {"data": data} if name == "channels_last" else {}
    assert len(join_twice(ZOO[name], tmp_path, spec)) == (2 if name not in WHOLE else 0)


WIRES = {f"wire {wire}": (ZOO["plain"], {"wire": wire}, {}) for wire in ("bf16", "int8")}
JOBS = STRATEGIES | WIRES
IN_PARTS = ("replicated", "masters", "products in fp8", *WIRES)
IN_PARTS += ("grows to step 6", "grows after step 6")


@pytest.mark.parametrize(
    "strategy", [pytest.param(x, marks=() if x == "wire int8" else SLOW) for x in JOBS]
)
def test_two_join_with_each_strategy(strategy, tmp_path, monkeypatch):
    train, spec, config = JOBS[strategy]
    spec = spec | {"config": job().config | config}
    in_units, alone = alone_of(with_options(job(), **spec), monkeypatch)
    steps = join_twice(in_units(train), tmp_path, spec, alone)
    assert len(steps) == (2 if strategy in IN_PARTS else 0)


NEVER = {  # a worker that joins runs no micro-batch and no body
    "joiner": (
        *("before_forward", "forward", "backward", "body", "keeping"),
        *("evaluate", "evaluate_exchange", "sending_state"),
    ),
    "source": ("receiving_state",),
    "other": ("receiving_state",),
}
IN_CI = [
    *(("joiner", "GradualJoin.prepare ended"), ("source", "GradualJoin.begin ended")),
    *(("joiner", "StateTransfer.complete_join ended"), ("source", "GradualJoin.finish")),
    *(("source", "sending_state"), ("other", "after_commit")),
]


@pytest.mark.parametrize(
    ("role", "instant"),
    [
        pytest.param(*where, marks=() if where in IN_CI else SLOW)
        for where in itertools.product(NEVER, INSTANTS)
        if where[1] not in NEVER[where[0]]
    ],
)
def test_killed_while_somebody_joins(role, instant, tmp_path):
    train = batch_norm if instant == "buffers" else average_and_plateau
    spec = {"checkpoint": CheckpointConfig(every_steps=1)} if instant == "keeping" else {}
    died = (4, wait_for_joins(tmp_path, dead=True))
    join_and_check(train, tmp_path, died, ENOUGH, how=(instant, role), kills=1, **spec)


def test_metrics_of_members_that_die_as_soon_as_another_is_one_are_recorded(tmp_path):
    died, how = (4, wait_for_joins(tmp_path, dead=True)), ("GradualJoin.close ended", "member")
    join_and_check(average_and_plateau, tmp_path, died, ENOUGH, how=how, kills=2)


@pytest.mark.parametrize("joining", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("role", ["joiner", "source", "other", None])
def test_several_join_at_the_same_time(joining, role, tmp_path):
    kills = gradually(average_and_plateau, tmp_path, "GradualJoin.prepare ended", role)
    script = [(4, SizeRequested(2 * joining))]
    script += [(4, wait_for_joins(tmp_path, 2 * joining - 2, dead=role is not None))]
    script += [ENOUGH]
    spec = job(virtual=8, workers=joining)
    outcome, run = group(spec, kills, script=script)
    check({"virtual": 8}, average_and_plateau, outcome, run, kills=int(role is not None))


@pytest.mark.parametrize("role", ["joiner", "source", "other"])
def test_worker_gets_notice_while_somebody_joins(role, tmp_path):
    """Its replacement joins."""

    def drains(run):
        two_train_and(1)(run)
        members = run.controller.coordinator.membership
        plan, new = plan_state_transfer(members), [m for m in members.members if not m.has_state]
        others = [one for one in members.members if one.has_state]
        others.remove(members.members[plan.source])
        found = {"joiner": new[0], "source": members.members[plan.source], "other": others[0]}
        worker = found[role].worker
        run.controller.post(DrainNoticed(worker, time.monotonic() + 20.0))
        eventually(lambda: worker not in run.controller.status()["workers"])
        eventually(lambda: run.controller.status()["world_size"] == 3)
        goes_on(run)

    script = (4, drains), (1, wait_for_joins(tmp_path)), ENOUGH
    join_and_check(average_and_plateau, tmp_path, *script)


def changes_what_is_trained(ctx):
    """Every eighth body freezes a layer, or thaws it."""
    model = classifier()
    first = next(model.parameters())
    for step in ctx.steps(model, adamw(model), cross_entropy):
        first.requires_grad_(step.number % 16 < 8)
        hold(ctx, step)


def test_body_that_freezes_a_layer_meanwhile(tmp_path):
    script = (4, wait_for_joins(tmp_path)), ENOUGH
    run = join_and_check(changes_what_is_trained, tmp_path, *script)
    lines = [x for x in lines_of(run) if x.get("event") == "WorkerStopped"]
    assert any("requires_grad has changed" in x["reason"] for x in lines)


def test_what_has_arrived_is_kept_when_another_one_joins(tmp_path):
    """The bodies wait, for the first one not to have joined by then."""
    pause = tmp_path / "pause"

    def comes(size):
        def wait(run):
            pause.touch()
            run.controller.post(SizeRequested(size))
            status, over = run.controller.status, run.controller.ended.is_set
            eventually(lambda: status()["world_size"] == size or over(), status)

        return wait

    script = [(4, comes(3)), (1, comes(4)), (1, lambda run: pause.unlink())]
    script += [(1, wait_for_joins(tmp_path, 2)), ENOUGH]
    spec = {"config": {**job().config, "pause": str(pause)}}
    cut = gradually(average_and_plateau, tmp_path)
    outcome, run = group(with_options(job(), **spec), cut, script=script)
    check(spec, average_and_plateau, outcome, run)
    assert (tmp_path / "kept").exists()


def two_train_and(joining):
    def wait(run):
        status, over = run.controller.status, run.controller.ended.is_set
        eventually(lambda: status()["world_size"] == 2 + joining or over(), status)
        goes_on(run, steps=2)

    return wait


@pytest.mark.parametrize("how", ["steps", "stop", "smaller"])
def test_run_ends_or_shrinks_before_the_worker_has_joined(how, tmp_path):
    def ends(run):
        two_train_and(1)(run)
        if how != "steps":
            run.controller.post(StopRequested("enough") if how == "stop" else SizeRequested(2))

    steps = 14 if how == "steps" else ENDLESS  # the end of a generation is planned up to 6 ahead
    stop = [(20, StopRequested("enough"))] if how == "smaller" else []
    config = job().config | {"hold": {5: 3}}
    script = (4, ends), *stop
    run = join_and_check(average_and_plateau, tmp_path, *script, steps=steps, config=config)
    assert len(formed_of(run)) > 1


def with_muon(ctx):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    model[0].bias.requires_grad_(False), model[1].bias.requires_grad_(False)
    loop(ctx, model, optimizer)


def test_state_that_must_be_whole_is_copied_at_once(tmp_path):
    join_and_check(with_muon, tmp_path, (4, wait_for_joins(tmp_path)), ENOUGH)
    assert not [*tmp_path.glob("w* gradually")]


def by_optimizer(kind, options):
    def train(ctx):
        model = classifier()
        muon = kind is torch.optim.Muon
        parameters = [p for p in model.parameters() if p.ndim == 2 or not muon]
        for p in model.parameters():
            p.requires_grad_(p.ndim == 2 or not muon)
        optimizer = kind(parameters, **{"lr": LR.get(kind, 0.01)} | options)
        loop(ctx, model, optimizer, clip_norm=0.5)

    return train


@SLOW
@pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind, some in VARIANTS.items() for options in some]
)
def test_two_join_with_each_optimizer_and_clipped_gradients(kind, options, tmp_path):
    steps = join_twice(by_optimizer(kind, options), tmp_path, {})
    assert len(steps) == (2 if kind in ELEMENTWISE else 0)


def joining_alone():
    """A `GradualJoin` of a run of one parameter, and that parameter's optimizer."""
    p = torch.nn.Parameter(torch.ones(1 << 23))
    optimizer = torch.optim.SGD([p], lr=0.1)
    state = SimpleNamespace(
        optimizers=SimpleNamespace(outer=optimizer, all=[optimizer]),
        optimizer=optimizer,
        holders=SimpleNamespace(is_divided=False),
        previous=None,
        parameters={"p": p},
    )
    return GradualJoin(state, SimpleNamespace(joining={0}, rank=0), allowed=True)


def test_parts_are_as_large_as_the_slowest_member_says():
    """An entry of b"" is a joiner's. A member says 0, 1 or 2: half, as much, or twice as much."""
    joining, found = joining_alone(), []
    for paces in ([2, 2], [2, 2], [0, 2], [2, 2], [2, 2], [2, 2], [2, 1], [1, 0]):
        joining.agree([bytes([paces[0]]) + b"of the source", b"", bytes([paces[1]])])
        assert joining._given == b"of the source"
        found.append(joining._rounds)
    assert found == [2, 4, 2, 4, 8, 8, 8, 4]


@pytest.mark.parametrize(
    ("took", "left", "is_over", "pace"),
    [
        (0.01, 0.5, True, 2),
        (0.01, 0.3, True, 1),  # twice as much would take more than a twentieth
        (0.01, 0.1, True, 0),
        (0.01, 0.5, False, 0),
    ],
)
def test_pace_follows_what_arrived_and_what_it_cost(took, left, is_over, pace, monkeypatch):
    joining, clock = joining_alone(), iter([0.0, took, took + left])
    # Not the clock of the whole process: its other threads read that, too.
    monkeypatch.setattr(gradual_join, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    joining._move = SimpleNamespace(in_flight=False, is_over=is_over, begin=lambda rounds: None)
    joining.begin(1)
    joining._source = 1
    assert joining.propose() == bytes([pace])


def test_what_has_arrived_is_forgotten_where_the_state_comes_anew():
    """Also if a member dies at once: the structure is another one by then."""
    joining = joining_alone()
    joining._arrived, joining._kept_at = {0}, (1, 7)

    def dies(_):
        raise GroupAborted("a member has died")

    group = SimpleNamespace(rank=0, world_size=2, gather_equal=dies)
    with pytest.raises(GroupAborted):
        joining.start(group, 1, possible=True, keeps=False)
    joining.close(1, 7)
    assert joining.kept_of(1) is None
