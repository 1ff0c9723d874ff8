"""A kill costs one step: every named instant, every rank, one victim and two, compared with the
undisturbed run.

The job keeps an average of the weights in the loop's body, which enters the loss: a body that ran
twice, or not at all, in any process, changes the final weights. The evaluation inside it is logged
and compared, too.
"""

import functools
import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from elastic_dp.config import CheckpointConfig, MapStyleData
from elastic_dp.coordinator.messages import SizeRequested, StopRequested, TrainingPosition
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.train.fault_injection import POINTS, WorkerFault
from elastic_dp.train.fault_injection import _generation_of as generation_of
from elastic_dp.train.generations.state_transfer import plan_state_transfer
from elastic_dp.train.local_run import LocalRun
from elastic_dp.train.state import state_moves
from elastic_dp.train.step.leaf_runner import LeafRunner
from tests.cluster.test_budgets import is_first
from tests.patience import eventually
from tests.runs import (
    ENDLESS,
    Points,
    at_size,
    goes_on,
    group,
    in_turn,
    lines_of,
    local,
    losses_of,
    spec_of,
)
from tests.train.checkpointing.test_worker_checkpointer import steps_of
from tests.train.jobs import (
    adamw,
    average_and_plateau,
    batch_norm,
    classifier,
    cross_entropy,
    evaluates_after_the_loop,
    in_small_buckets,
    plain,
    scheduler_in_the_body,
)

WHILE_FORMING = ("forming", "sending_state", "receiving_state")
# Where the victim has not sent all that the others need for their commit.
NOBODY_COMMITS = POINTS[POINTS.index("before_forward") : POINTS.index("buffers")]
IN_BUCKETS = ("sent", "exchange", "gather")  # the first and the last: between two of them
WITH_CHECKPOINTS = (
    "restoring",
    "sharing",
    "keeping",
)  # see test_worker_checkpointer, test_collective_read
# See test_sharded_optimizer.
WHERE_SHARDED = ("receiving_pieces", "prepared", "gathered")
NOT_IN_A_STEP = (*WHILE_FORMING, *WITH_CHECKPOINTS, *WHERE_SHARDED)
IN_A_STEP = tuple(p for p in POINTS if p not in NOT_IN_A_STEP)
SOMEBODY_MAY_COMMIT = IN_A_STEP[IN_A_STEP.index("buffers") + 1 :]
VICTIMS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]

# Of the four that form, rank 0 gives the state and rank 3, the joiner, takes it.
SECONDS = [
    *(tuple(("forming", rank) for rank in ranks) for ranks in [*VICTIMS, (3,), (0, 3)]),
    (("sending_state", None),),  # the source: the first of those that are furthest
    (("receiving_state", 3),),
    (("sending_state", None), ("receiving_state", 3)),
    (("forming", 1), ("sending_state", None)),
    (("forming", 0), ("receiving_state", 3)),
]


def job(steps=ENDLESS, workers=3, **options):
    config = {
        "eval": MapStyleData(Points(60), micro_batch_size=8),
        "body_s": 0.02,
        "hold": {0: workers},
        **options,
    }
    return spec_of(steps=steps, workers=workers, virtual=4, min_workers=1, standby=1, config=config)


def one_after_another(deaths, tmp_path):
    """For each of these (point, ranks) in turn, with the group at full size: the ranks die
    there."""
    faults, before = [], ()
    for i, (point, ranks) in enumerate(deaths):
        files = [str(tmp_path / f"{i}-{rank}") for rank in ranks]
        faults += [
            WorkerFault(point, rank=rank, world_size=3, once=file, after=before, settled=True)
            for rank, file in zip(ranks, files, strict=True)
        ]
        before += tuple(files)
    return tuple(faults)


@functools.cache
def calm(steps, train):
    return local(job(steps), train)


def with_faults(spec, train, faults, **options):
    """A run that is stopped when all of them have happened, and the group makes steps again."""

    def all_happened(run):
        status, ended = run.controller.status, run.controller.ended.is_set
        for fault in faults:
            eventually(lambda file=fault.once: os.path.exists(file) or ended(), status)
        goes_on(run, steps=2)

    return group(
        spec,
        train,
        faults=faults,
        script=[(1, all_happened), (1, StopRequested("enough"))],
        **options,
    )


def check(outcome, run, train, kills):
    undisturbed = calm(outcome.step, train)
    assert outcome.digest == undisturbed.digest
    lines = lines_of(run)
    # The survivors kept their processes.
    assert outcome.workers_lost == kills, losses_of(run)
    stops = [line["position"] for line in lines if line.get("event") == "WorkerStopped"]
    assert all(isinstance(position, TrainingPosition) for position in stops)
    ends = [line["lineage_id"] for line in lines if line.get("event") == "WorkerFinished"]
    formed = {x["generation"] for x in lines if x.get("command") == "FormGeneration"}
    assert len(set(ends)) == 1 and ends[0] in formed  # one beginning, and a generation that was
    if undisturbed.logged:
        metrics = {x["step"]: x["eval_loss"] for x in lines if "eval_loss" in x}
        assert metrics == {x["step"]: x["eval_loss"] for x in undisturbed.logged}


def noting_what_is_reused(train, note):
    """Leaves this file where a worker uses what it has finished of a step that was cut."""

    def noting(ctx):
        add_finished = GradientReducer.add_finished

        def add(gradients, *given):
            note.touch()
            add_finished(gradients, *given)

        GradientReducer.add_finished = add
        train(ctx)

    return noting


def dies_when_others_have_finished(train, folder):
    """A worker dies in a step when those who will survive it have run all of their leaves, so they
    have something to use again."""

    def waiting(ctx):
        session, faults = ctx._session, ctx._session.faults
        point, send = faults.point, GradientReducer.send

        def finished(step, rank):
            return folder / f"finished-{session.generation}-{step}-{rank}"

        def sends(gradients):
            send(gradients)
            finished(session.position.step + 1, session.rank).touch()

        def passes(name, step, rank, world_size, generation):
            dying = {
                fault.rank
                for fault in faults.plan
                if (fault.point, fault.world_size) == (name, world_size)
                and all(generation_of(file) < generation for file in fault.after)
                and generation_of(fault.once) >= generation  # not yet, or just now
            }
            if rank in dying:
                survivors = [finished(step, r) for r in range(world_size) if r not in dying]
                over = session.control._over
                eventually(lambda: all(file.exists() for file in survivors) or over())
            point(name, step, rank, world_size, generation)

        GradientReducer.send, faults.point = sends, passes
        train(ctx)

    return waiting


def check_kills_in_steps(deaths, train, tmp_path):
    """The group is back at full size in between. What survivors have finished is used again, unless
    they have what they need for their commit."""
    points = {point for point, _ in deaths}
    faults, reused = one_after_another(deaths, tmp_path), tmp_path / "reused"
    trained = in_small_buckets(train) if points & {*IN_BUCKETS} else train
    if points <= {*NOBODY_COMMITS}:
        trained = dies_when_others_have_finished(trained, tmp_path)
    outcome, run = with_faults(job(), noting_what_is_reused(trained, reused), faults)
    check(outcome, run, train, kills=len(faults))
    assert outcome.generations > len(deaths)
    assert reused.exists() or not points <= {*NOBODY_COMMITS}


IN_CI = [
    [*zip(NOBODY_COMMITS, itertools.cycle(VICTIMS))],
    [("buffers", (1,)), ("buffers", (0, 2))],
    [*zip(SOMEBODY_MAY_COMMIT, itertools.cycle(VICTIMS[2:] + VICTIMS[:2]))],
]


def test_kills_in_ci_are_at_each_point_and_of_each_rank_and_pair():
    assert {point for deaths in IN_CI for point, _ in deaths} == {*IN_A_STEP}
    for deaths in IN_CI[0], IN_CI[2]:
        assert {ranks for _, ranks in deaths} == {*VICTIMS}


@pytest.mark.parametrize("deaths", IN_CI, ids=lambda deaths: f"{deaths[0][0]} and later")
def test_kills_at_one_point_after_the_other_have_the_local_digest(deaths, tmp_path):
    train = batch_norm if deaths[0][0] == "buffers" else average_and_plateau
    check_kills_in_steps(deaths, train, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("point", IN_A_STEP)
def test_kill_at_each_point_has_the_local_digest(point, tmp_path):
    train = batch_norm if point == "buffers" else average_and_plateau
    check_kills_in_steps([(point, ranks) for ranks in VICTIMS], train, tmp_path)


def hears_of_the_end_late(train, dead):
    """Each worker hears of a planned end when it has run all it has to in the step behind it. The
    first that does so dies when another has, too, and leaves the file `dead`, unless it trains
    alone: with the only state."""

    def late(ctx):
        session = ctx._session
        control, end, told = session.control, session.control.end, {}
        run_leaf = LeafRunner._run_leaf

        def heard(after_step):
            if dead is not None and session.world_size > 1:
                others = f"{dead}-{session.generation}"
                if is_first(dead):
                    eventually(lambda: os.path.exists(others))
                    os.kill(os.getpid(), signal.SIGKILL)
                open(others, "w").close()
            end(session.generation, after_step)

        def put_off(generation, after_step):
            told[generation] = after_step
            waits = session.reporter.phase == "collective"
            if waits and (control._attempting or 0) > after_step:
                heard(after_step)

        def runs(runner, turn, **given):
            run_leaf(runner, turn, **given)
            after_step = told.get(session.generation, turn.step)
            if turn.is_last and turn.step > after_step:
                heard(after_step)

        control.end, LeafRunner._run_leaf = put_off, runs
        train(ctx)

    return late


@pytest.mark.parametrize("kills", [0, 1])
def test_planned_end_that_cuts_a_step_has_the_local_digest(kills, tmp_path):
    reused, dead = tmp_path / "reused", str(tmp_path / "dead") if kills else None
    train = noting_what_is_reused(hears_of_the_end_late(average_and_plateau, dead), reused)
    script = [(20, SizeRequested(2)), (20, at_size(2)), (1, StopRequested("enough"))]
    outcome, run = group(job(hold={}), train, script=script)
    check(outcome, run, average_and_plateau, kills=kills)
    lines = lines_of(run)
    cut = {x["generation"] for x in lines if x.get("event") == "WorkerStopped" and x["finished"]}
    told = {x["command"] for x in lines if x.get("command") and x.get("generation") in cut}
    assert "EndGeneration" in told
    assert kills or "AbortGeneration" not in told
    assert reused.exists()


def test_killed_between_two_buckets_in_fast_mode(tmp_path):
    """Two virtual workers on two workers, or on the one that is left: even there both give the same
    sum."""
    deaths = [("sent", 0), ("gather", 1), ("sent", 1), ("gather", 0)]
    each = [{"point": point, "rank": rank} for point, rank in deaths]
    faults = in_turn(each, tmp_path, world_size=2, settled=True)
    options = {"virtual": 2, "workers": 2, "exact": False}
    spec = spec_of(steps=ENDLESS, standby=1, config={"hold": {0: 2}, "body_s": 0.02}, **options)
    outcome, _ = with_faults(spec, in_small_buckets(plain), faults)
    assert outcome.workers_lost == len(deaths)
    assert outcome.digest == local(spec_of(steps=outcome.step, **options), plain).digest


def while_it_forms(seconds, tmp_path):
    """A first kill makes a generation of three whole workers and a joiner form; then these die in
    that."""
    first = str(tmp_path / "first")
    return (
        WorkerFault("after_step", rank=3, world_size=4, once=first, settled=True),
        *(
            WorkerFault(point, rank=r, once=str(tmp_path / f"{point}-{r}"), after=(first,))
            for point, r in seconds
        ),
    )


SLOW = pytest.mark.slow
SECONDS_IN_CI = (0, 4, *range(8, 11))  # a source, two others, and each of the last kinds


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(seconds, marks=() if at in SECONDS_IN_CI else SLOW)
        for at, seconds in enumerate(SECONDS)
    ],
    ids=str,
)
def test_killed_while_a_generation_forms(seconds, tmp_path):
    faults = while_it_forms(seconds, tmp_path)
    outcome, run = with_faults(job(workers=4), average_and_plateau, faults)
    check(outcome, run, average_and_plateau, kills=1 + len(seconds))


def in_pieces(train, folder):
    """State travels in many pieces; who gives or takes it passes that point once more when two of
    them have arrived. A taker leaves a file that says so: the generation, and the step that it was
    at."""

    def torn(ctx):
        session, begin, begun = ctx._session, state_moves.Move.begin, Counter()

        def with_a_point(move):
            begun[move] += len(move._units) > 1
            if begun[move] == 3:
                membership = session.membership
                receivers = plan_state_transfer(membership).receivers
                arrived = {r: folder / f"{session.generation}-{r}" for r in receivers}
                if session.rank in arrived:
                    at = str(session.position.step)
                    arrived[session.rank].write_text(at, encoding="utf-8")
                    session.pass_point("receiving_state")
                elif membership.source == session.worker:
                    over = session.control._over
                    eventually(lambda: all(f.exists() for f in arrived.values()) or over())
                    session.pass_point("sending_state")
            begin(move)

        state_moves.UNIT_BYTES = state_moves.ROUND_BYTES = 256
        state_moves._MAX_IN_FLIGHT = 1
        state_moves.Move.begin = with_a_point
        train(ctx)

    return torn


def taken_half_way(dead, folder):
    """The steps at which those were who had taken two pieces when this fault happened."""
    generation = dead.read_text(encoding="utf-8")
    return {int(file.read_text(encoding="utf-8")) for file in folder.glob(f"{generation}-*")}


@pytest.mark.parametrize(("point", "rank"), [("sending_state", None), ("receiving_state", 3)])
def test_killed_half_way_through_a_joiners_hand_over(point, rank, tmp_path):
    """What has arrived is in the joiner's own tensors; they are void until the last piece is there,
    from whomever. Three survivors may form a generation before the joiner is there, in which one
    gives another the last step; with four members there is a joiner."""
    first, dead = tmp_path / "first", tmp_path / "dead"
    faults = (
        WorkerFault("after_step", rank=3, world_size=4, once=str(first), settled=True),
        WorkerFault(point, rank=rank, world_size=4, nth=2, once=str(dead), after=(str(first),)),
    )
    torn = in_pieces(average_and_plateau, tmp_path)
    outcome, run = with_faults(job(workers=4), torn, faults)
    check(outcome, run, average_and_plateau, kills=2)
    assert 0 in taken_half_way(dead, tmp_path), "perhaps beside a member that is a step behind"


def held_before_its_commit(train, step, rank, committed):
    """That rank commits that step only when it has heard of a loss; then it cannot any more, unless
    it makes the step again. Rank 2 does when the other one has, which says so by this file."""
    waits = committed.with_name("waits")

    def held(ctx):
        session = ctx._session
        control, commit = session.control, session.control.commit

        def late():
            here = session.position.step + 1 == step and not isinstance(session.link, LocalRun)
            if here and session.rank == rank and not waits.exists():
                waits.touch()
                eventually(control._over)
            if here and session.rank == 2:
                eventually(committed.exists)
            commit()
            if here and session.rank == 1 - rank:
                committed.touch()

        control.commit = late
        train(ctx)

    return held


@pytest.mark.parametrize(
    ("late", "train"),
    [
        pytest.param(0, average_and_plateau, marks=SLOW),
        (1, average_and_plateau),
        (0, scheduler_in_the_body),
    ],
)
def test_kill_of_a_member_ahead_while_another_is_behind_has_the_local_digest(late, train, tmp_path):
    """Rank `late` is held before its commit of step 22; rank 2 commits, runs the body, and dies in
    step 23."""
    fault = WorkerFault("before_forward", 23, rank=2, once=str(tmp_path / "dead"))
    held = held_before_its_commit(train, 22, late, tmp_path / "committed")
    outcome, run = with_faults(job(), held, (fault,))
    check(outcome, run, train, kills=1)
    lines = lines_of(run)
    death = next(at for at, line in enumerate(lines) if line.get("event") == "WorkerLost")
    died_in = max(
        line["generation"] for line in lines[:death] if line.get("command") == "FormGeneration"
    )
    stops = [line for line in lines if line.get("event") == "WorkerStopped"]
    steps = {stop["position"].step for stop in stops if stop["generation"] == died_in}
    assert steps == {21, 22}  # they really differed by one step


@pytest.mark.parametrize(("point", "step"), [("sending_state", 22), ("receiving_state", 21)])
def test_killed_half_way_through_the_hand_over_to_one_behind(point, step, tmp_path):
    """The setting is that of the test above; then rank 1, at 22, gives rank 0 what step 22 has
    changed. If it dies in that, rank 0 makes step 22 itself."""
    dead = tmp_path / "dead"
    faults = (
        WorkerFault("before_forward", 23, rank=2, once=str(tmp_path / "first")),
        WorkerFault(point, step, nth=2, once=str(dead)),
    )
    held = held_before_its_commit(average_and_plateau, 22, 0, tmp_path / "committed")
    outcome, run = with_faults(job(), in_pieces(held, tmp_path), faults)
    check(outcome, run, average_and_plateau, kills=2)
    assert 21 in taken_half_way(dead, tmp_path)
    torn = int(dead.read_text(encoding="utf-8"))
    stops = [x for x in lines_of(run) if x.get("event") == "WorkerStopped"]
    steps = {x["position"].step for x in stops if x["generation"] == torn and x["has_state"]}
    assert steps == ({21} if point == "sending_state" else {22})  # all of it, or nothing


@pytest.mark.parametrize("exchange", [pytest.param(1, marks=SLOW), 4])
def test_killed_in_an_evaluation_after_the_loop(exchange, tmp_path):
    """The standby that takes the place knows which evaluations lay before the loop's end, and which
    come behind."""
    there = tmp_path / "there"
    spec = job(steps=40, standby_is_ready=str(there))  # in the last three train for long
    # exchanges that rank 1 makes for one evaluation of these 60 rows: 8 micro-batches, 3 workers
    in_body = 2
    fault = WorkerFault(
        "evaluate_exchange", 40, 1, nth=in_body + exchange, once=str(tmp_path / "dead")
    )

    def ready(run):
        stages = list(run.controller.status()["workers"].values())
        return stages.count("member") == 3 and "ready" in stages

    script = [(1, lambda run: eventually(lambda: ready(run))), (1, lambda run: there.touch())]
    outcome, run = group(spec, evaluates_after_the_loop, faults=(fault,), script=script)
    undisturbed = local(spec, evaluates_after_the_loop)
    assert (tmp_path / "dead").exists()
    assert (outcome.digest, outcome.step) == (undisturbed.digest, 40)
    check_final_metrics(run, undisturbed)


def check_final_metrics(run, undisturbed):
    for name in ("final_2", "final_3"):
        found = [line[name] for line in lines_of(run) if name in line]
        assert found == [line[name] for line in undisturbed.logged if name in line]


def test_lone_worker_killed_in_an_evaluation_after_the_loop(tmp_path):
    """The run goes back to the checkpoint of the last step, whose body has logged, too."""
    there, url = tmp_path / "there", str(tmp_path / "run")
    config = job(workers=1, standby_is_ready=str(there)).config
    every = CheckpointConfig(every_steps=5)
    spec = spec_of(steps=10, workers=1, virtual=4, config=config, checkpoint=every)
    of_one = 8  # micro-batches of an evaluation of 60 rows
    fault = WorkerFault("evaluate", 10, nth=of_one + 4, once=str(tmp_path / "dead"))

    def goes_on_when_it_is_saved(run):
        eventually(lambda: 10 in steps_of(url))
        there.touch()

    script = [(1, goes_on_when_it_is_saved)]
    outcome, run = group(spec, evaluates_after_the_loop, faults=(fault,), script=script, url=url)
    assert (tmp_path / "dead").exists()
    undisturbed = local(spec, evaluates_after_the_loop)
    assert (outcome.digest, outcome.step) == (undisturbed.digest, 10)
    check_final_metrics(run, undisturbed)


SETTLED, END = 60, 300  # generations; every second one begins with a kill
MAX_BYTES = 0.05 * 2**20  # for each kill


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_survivor_of_a_hundred_kills_has_the_memory_that_it_had(tmp_path):
    said = tmp_path / "resident"

    def train(ctx):
        model, generations, resident = classifier(), set(), {}
        for _ in ctx.steps(model, adamw(model), cross_entropy):
            generations.add(ctx._session.generation)
            resident.setdefault(len(generations), resident_bytes())
            if len(generations) == END:
                said.write_text(str((resident[END] - resident[SETTLED]) * 2 / (END - SETTLED)))
                ctx.stop("enough")
            if ctx.world_size == 2 and ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    spec = spec_of(steps=1 << 20, workers=2, virtual=2, max_time_s=600)
    outcome, _ = group(spec, train, timeout_s=700)
    assert outcome.workers_lost >= (END - SETTLED) // 2
    assert float(said.read_text()) < MAX_BYTES
