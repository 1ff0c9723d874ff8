"""Frozen and slow are told apart: a stopped process is left behind, a slow one is waited for.

For 20 s: frozen, with the interpreter's lock, in forward (as in a compiler), and in the body,
under the default timeouts. The groups only wait, so they run side by side.
"""

import ctypes
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from elastic_dp.cluster.heartbeat.heartbeat_sidecar import _look_at
from elastic_dp.config import FailureConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import PATIENCE_S, Stalls, eventually
from tests.runs import ENDLESS, formed_of, goes_on, group, lines_of, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, plain

WAITS_S = 20.0
SLOW = ("lock", "forward", "body")


def spec(orphan_timeout_s=None, **options):
    # Forming is not what is looked at, and four groups form at the same time.
    failure = FailureConfig(forming_timeout_s=PATIENCE_S, orphan_timeout_s=orphan_timeout_s)
    return spec_of(failure=failure, **options)


def times(run, name, key="event"):
    return [line["time"] for line in lines_of(run) if line.get(key) == name]


def slow(ctx):
    """Rank 1 is slow once: it holds the GIL, or takes long in forward, or in the body."""
    where = ctx.config["where"]
    model = classifier()

    def loss_fn(m, batch):
        if ctx.rank == 1 and ctx._session.position.step == 5 and ctx.generation:
            if where == "lock":
                ctypes.PyDLL(None).usleep(int(WAITS_S * 1e6))  # PyDLL keeps the GIL
            elif where == "forward":
                time.sleep(WAITS_S)
        return cross_entropy(m, batch)

    for step in ctx.steps(model, adamw(model), loss_fn):
        if where == "body" and ctx.rank == 1 and step.number == 5:
            time.sleep(WAITS_S)


def one_is_slow(where):
    made = spec(steps=8, virtual=3, workers=3, min_workers=3, config={"where": where})
    began = time.monotonic()
    outcome, run = group(made, slow)
    return outcome, run, time.monotonic() - began


def keeps_a_diary(folder):
    """`plain`; each process writes down its generation, step and the time of each commit, as it
    makes it."""

    def written(ctx):
        session = ctx._session
        commit = session.control.commit

        def commits():
            commit()
            with open(folder / session.worker, "a", encoding="utf-8") as diary:
                diary.write(f"{session.generation} {session.position.step + 1} {time.time()}\n")

        session.control.commit = commits
        plain(ctx)

    return written


def diary(path):
    """(generation, step, time) of each commit."""
    return [tuple(map(float, line.split())) for line in path.read_text("utf-8").splitlines()]


def nobody_reaches_who_is_frozen(run, spared):
    """Act as if its host had no network: no signal arrives there, and what its sidecar should be
    told does not either."""
    kill = run.worker_group.kill

    def kill_others(worker):
        process = run.worker_group.processes.get(worker)
        if worker in spared or (process is not None and is_stopped(process)):
            spared.append(worker)
        else:
            kill(worker)

    run.worker_group.kill = kill_others
    run.controller.heartbeats.evict = lambda worker, stuck: None


def is_stopped(process):
    return _look_at(process.pid)[0]


def one_is_frozen(folder):
    """Rank 1 is stopped within a step, and goes on 20 s later, when the others are far ahead.
    Nobody can kill it."""
    frozen = folder / "frozen"
    fault = WorkerFault(
        "exchange", rank=1, world_size=3, settled=True, action="freeze", once=str(frozen)
    )
    spared, before, codes = [], {}, []

    def thaw(run):
        there = eventually(lambda: frozen.exists() and dict(run.worker_group.processes))
        worker = eventually(lambda: spared, run.controller.status)[0]
        before[worker] = diary(folder / worker)
        time.sleep(max(0.0, os.stat(frozen).st_mtime + WAITS_S - time.time()))
        assert is_stopped(there[worker])
        os.kill(there[worker].pid, signal.SIGCONT)
        eventually(lambda: worker not in run.worker_group.processes, run.controller.status)
        codes.append(there[worker].exitcode)

    made = spec(steps=ENDLESS, config={"body_s": 0.5}, min_workers=1, orphan_timeout_s=WAITS_S)
    script = [
        (0, lambda run: nobody_reaches_who_is_frozen(run, spared)),
        (0, thaw),
        (0, goes_on),
        (0, StopRequested("enough")),
    ]
    outcome, run = group(made, keeps_a_diary(folder), faults=(fault,), script=script)
    return outcome, run, codes, before


def test_frozen_and_slow_are_told_apart(tmp_path):
    with Stalls() as stalls, ThreadPoolExecutor() as pool:
        frozen = pool.submit(one_is_frozen, tmp_path)
        slow_ones = {where: pool.submit(one_is_slow, where) for where in SLOW}

    for where, future in slow_ones.items():  # nobody was evicted
        outcome, run, took = future.result()
        assert took > WAITS_S
        assert (len(formed_of(run)), outcome.workers_lost) == (1, 0), where
        assert not times(run, "EvictWorker", "command")

    outcome, run, codes, before = frozen.result()
    assert codes == [0]  # what thawed found that nobody wants it any more, and went
    [(worker, was)] = before.items()
    assert len(diary(tmp_path / worker)) <= len(was) + 1  # at most the step that it was in
    undisturbed = local(spec(steps=outcome.step), plain)
    assert outcome.digest == undisturbed.digest  # what thawed changed nothing
    frozen_at, in_generation = os.stat(tmp_path / "frozen").st_mtime, was[-1][0]
    evicted = times(run, "EvictWorker", "command")[0]
    assert evicted - frozen_at < FailureConfig().heartbeat_timeout_s + 1.0 + stalls.lost_s
    others = set(tmp_path.iterdir()) - {tmp_path / "frozen", tmp_path / worker}
    commits = [commit for other in others for commit in diary(other)]
    back = min(at for generation, _, at in commits if generation > in_generation)
    assert back - frozen_at < 2 * FailureConfig().heartbeat_timeout_s + stalls.lost_s
