"""Checkpoints of sharded runs in processes: kills while units are written, drains of all workers,
requests of the loop's body, and bytes that a checkpoint sends."""

import os
import signal

import pytest

from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.storage.local_backend import LocalBackend
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import at_size, goes_on, group, losses_of, never_put_off, scaled
from tests.train.checkpointing.test_last_checkpoints import last_step_of, take_away
from tests.train.checkpointing.test_worker_checkpointer import EVERY_5, steps_of
from tests.train.jobs import average_and_plateau, plain
from tests.train.test_sharded_optimizer import (
    STEPS,
    check,
    checkpoints_of,
    checkpoints_without_sharding,
    in_small_units,
    job,
)


def with_a_death_while_writing(train, step, files, once):
    """Rank 1 dies before it writes the blob of this step that follows so many."""

    def dying(ctx):
        session, write = ctx._session, LocalBackend.write
        left = [files]

        def writes(backend, path, *given, **how):
            if f"step-{step:012}/" in path and session.rank == 1:
                left[0] -= 1
                if left[0] < 0 and not once.exists():
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return write(backend, path, *given, **how)

        LocalBackend.write = writes
        train(ctx)

    return dying


@pytest.mark.parametrize("files", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_units_of_a_worker_that_dies_while_it_writes_are_written_by_others(files, tmp_path):
    """The checkpoint of that step is committed, with what a run without the loss has in it."""
    once, url = tmp_path / "dead", tmp_path / "run"
    spec = job(steps=STEPS, checkpoint=EVERY_5)
    train = with_a_death_while_writing(average_and_plateau, 10, files, once)
    outcome, run = group(spec, never_put_off(in_small_units(train)), url=str(url))
    assert once.exists() and outcome.workers_lost == 1, losses_of(run)
    check(outcome, average_and_plateau, spec)
    without = checkpoints_without_sharding(spec, average_and_plateau, tmp_path)
    assert checkpoints_of(url) == without and 10 in without


def counting_bytes(train, folder):
    """Writes down how many bytes a worker has received when it begins each step."""

    def counted(ctx):
        received, session = [0], ctx._session
        for name in ("all_gather", "all_to_all"):
            inner = getattr(ProcessGroup, name)

            def call(pg, output, *given, inner=inner):
                received[0] += output.nbytes
                return inner(pg, output, *given)

            setattr(ProcessGroup, name, call)
        passes = session.reporter.pass_point

        def note(point, at=None):
            file = folder / f"{session.rank}-{at}"
            if point == "before_forward" and not file.exists():
                file.write_text(str(received[0]))
            passes(point, at)

        session.reporter.pass_point = note
        session.faults.plan = [WorkerFault("none")]  # or else the points are not passed
        train(ctx)

    return counted


def test_step_with_a_checkpoint_receives_no_more_than_another_one(tmp_path):
    """Who gathered the state of all would receive twice the parameters on top."""
    counts, spec = tmp_path / "counts", job(steps=12, checkpoint=EVERY_5)
    counts.mkdir()
    train = never_put_off(counting_bytes(in_small_units(plain), counts))
    outcome, _ = group(spec, train, url=str(tmp_path / "run"))
    check(outcome, plain, spec)
    assert steps_of(tmp_path / "run")[-2:] == [10, 12]
    # Each of three joins takes a step, so all are there in the fourth one.
    # The last to come may find everything done in that.
    for rank in range(4):
        at = {step: int((counts / f"{rank}-{step}").read_text()) for step in range(5, 13)}
        by_step = {step: at[step + 1] - at[step] for step in range(5, 12)}
        with_checkpoint = max(by_step.pop(5), by_step.pop(10))
        assert with_checkpoint <= 1.05 * max(by_step.values()), (with_checkpoint, by_step)


def test_checkpoint_that_the_body_asks_for_is_of_its_own_step(tmp_path):
    def train(ctx):
        inner = ctx.steps

        def steps(*given, **how):
            for step in inner(*given, **how):
                yield step
                if step.number == 7:
                    ctx.checkpoint()

        ctx.steps = steps
        plain(ctx)

    spec = job(steps=9)
    outcome, _ = group(spec, never_put_off(in_small_units(train)), url=str(tmp_path))
    check(outcome, plain, spec)
    assert steps_of(tmp_path) == [7, 9]


@pytest.mark.slow
def test_drain_of_all_workers_repeats_no_step(tmp_path):
    """Each has a part of the state: they write it together before they leave."""
    left = []

    def take_all_away(run):
        at_size(4)(run)
        left.extend(member.worker for member in run.controller.coordinator.membership.members)
        take_away(*left, room=4)(run)

    script = [(5, take_all_away), (5, goes_on), (5, StopRequested("enough"))]
    spec = scaled(job(hold={}), min_workers=4, standby=0)
    outcome, run = group(
        spec, in_small_units(average_and_plateau), script=script, url=str(tmp_path)
    )
    check(outcome, average_and_plateau, spec)
    assert last_step_of(left, run) in steps_of(tmp_path)
    assert outcome.workers_lost == 0, losses_of(run)
