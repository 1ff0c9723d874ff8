"""The last checkpoint: of workers that a notice takes away, of an operator's stop, of Ctrl-C.

None of these jobs is told to make checkpoints by itself, unless it says so.
"""

import dataclasses
import errno
import os
import re
import signal
import time

import pytest

import elastic_dp as edp
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator import drain_checkpointer
from elastic_dp.coordinator.messages import DrainNoticed, StopRequested
from elastic_dp.errors import Interrupted, StateDiffers
from elastic_dp.storage.local_backend import LocalBackend
from elastic_dp.train.checkpointing.checkpoint_committer import CheckpointCommitter
from elastic_dp.train.interruption import TIME_IS_UP
from tests.patience import PATIENCE_S, eventually
from tests.runs import ENDLESS, PATIENT, goes_on, group, lines_of, local, spec_of
from tests.train.checkpointing.test_worker_checkpointer import job, steps_of
from tests.train.jobs import (
    Kept,
    adamw,
    average_and_plateau,
    classifier,
    classify,
    cross_entropy,
    digest_of,
)

NONE = CheckpointConfig()


def short(steps=ENDLESS, checkpoint=NONE):
    """Return the spec of two workers, which begin together."""
    return job(steps, workers=2, least=2, body_s=0.05, checkpoint=checkpoint)


def calm(outcome):
    return local(short(outcome.step), average_and_plateau).digest


def take_away(*workers, room=2):
    """Drain these workers: their machines go soon, and there is no room for others before they have
    left. So much of the notice is margin that they have to leave in a second, and have minutes for
    it."""

    def act(run):
        alive = [run.worker_group.processes[worker].is_alive for worker in workers]
        run.worker_group.allow(room)
        object.__setattr__(run.controller.coordinator.config, "drain_margin_s", PATIENCE_S)
        for worker in workers:
            run.controller.post(DrainNoticed(worker, time.monotonic() + 1.0 + PATIENCE_S))
        eventually(lambda: not any(is_alive() for is_alive in alive), run.controller.status)

    return act


def last_step_of(workers, run):
    stops = [line for line in lines_of(run) if line.get("event") == "WorkerStopped"]
    return max(line["position"].step for line in stops if line["worker"] in workers)


def told(run, kind, **fields):
    """Where in the journal a command, an event or a text stands first."""
    for at, line in enumerate(lines_of(run)):
        named = kind in (line.get("event"), line.get("command"))
        if named and all(str(line.get(name, "")).startswith(v) for name, v in fields.items()):
            return at
    raise AssertionError(f"no {kind} {fields}")


def test_drain_of_all_workers_repeats_no_step(tmp_path, monkeypatch):
    # Both notices are of one moment.
    monkeypatch.setattr(drain_checkpointer, "NOTICE_WINDOW_S", PATIENCE_S)
    script = [(5, take_away("w1", "w2")), (5, goes_on), (5, StopRequested("enough"))]
    outcome, run = group(short(), average_and_plateau, script=script, url=str(tmp_path))
    assert (outcome.error, outcome.digest) == (None, calm(outcome))
    last = last_step_of(("w1", "w2"), run)
    back = f"every worker with the training state is lost; going back to step {last}"
    told(run, "Explain", text=back)
    # At the notice one, or two if those who are told hear of it at different steps; and the end.
    assert len(steps_of(tmp_path)) <= 3 and last in steps_of(tmp_path)
    assert outcome.workers_lost == 0


def test_drain_below_min_workers_commits_the_state_and_waits(tmp_path):
    """The worker that holds the state goes on when another has joined."""
    script = [(5, take_away("w2")), (5, goes_on), (5, StopRequested("enough"))]
    outcome, run = group(short(), average_and_plateau, script=script, url=str(tmp_path))
    assert (outcome.error, outcome.digest) == (None, calm(outcome))
    waits = told(
        run, "Explain", text="w2 must leave; waiting for the commit of the state after step"
    )
    step = int(re.search(r"after step (\d+)", lines_of(run)[waits]["text"])[1])
    committed = told(run, "Explain", text=f"checkpoint of step {step} is committed")
    assert told(run, "WriteDrainCheckpoint") < committed < told(run, "ReleaseWorker", worker="w2")
    assert not any(
        "every worker with the training state is lost" in line.get("text", "")
        for line in lines_of(run)
    )


@pytest.mark.parametrize("checkpoint", [NONE, CheckpointConfig(every_s=1000.0)])
def test_an_operators_stop_keeps_the_end(tmp_path, checkpoint):
    script = [(5, StopRequested("enough"))]
    spec = short(checkpoint=checkpoint)
    outcome, _ = group(spec, average_and_plateau, script=script, url=str(tmp_path))
    assert (outcome.error, outcome.reason) == (None, "enough")
    assert steps_of(tmp_path) == [outcome.step]
    outcome, _ = group(short(outcome.step + 5), average_and_plateau, url=str(tmp_path))
    assert (outcome.error, outcome.digest) == (None, calm(outcome))


@pytest.mark.parametrize("ends_by", ["max_steps", "epochs", "max_time_s", "ctx.stop"])
@pytest.mark.parametrize("where", ["local", "group"])
def test_the_last_step_is_kept_whatever_ends_the_run(tmp_path, ends_by, where):
    """Also where no checkpoints are configured, or `every_steps` does not divide the last step."""
    spec = short(8, CheckpointConfig(every_steps=7) if ends_by == "max_steps" else NONE)
    if ends_by == "epochs":
        data = dataclasses.replace(spec.data, epochs=1)
        spec = dataclasses.replace(spec, data=data, max_steps=None)
    if ends_by == "max_time_s":
        spec = dataclasses.replace(
            spec, max_steps=None, max_time_s=3.0 if where == "local" else 1000.0
        )
    config = dict(spec.config) | {"stop_at": 5 if ends_by == "ctx.stop" else 0}
    spec = dataclasses.replace(spec, config=config)
    if where == "local":
        run = local(spec, stops, str(tmp_path))
        step, digest = run.logged[-1]["step"], run.digest
    else:
        script = [(5, StopRequested(TIME_IS_UP))] if ends_by == "max_time_s" else []
        outcome, _ = group(spec, stops, script=script, url=str(tmp_path))
        step, digest = outcome.step, outcome.digest
    assert steps_of(tmp_path)[-1] == step
    assert digest_of(edp.load_state(str(tmp_path)).model) == digest


def stops(ctx):
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        ctx.log({"loss": step.loss})
        if step.number == ctx.config["stop_at"]:
            ctx.stop("converged")


def interrupted(times):
    """The job, with Ctrl-C in a body; by a fixed step, so what was made in vain shows."""

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            for _ in range(times if step.number == 7 and ctx.config["interrupts"] else 0):
                os.kill(os.getpid(), signal.SIGINT)
            ctx.log({"step": step.number})

    return train


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_local_run(tmp_path, times):
    """The first one keeps what there is, the second one ends at once."""
    undisturbed = spec_of(steps=12, config={"interrupts": False})
    calm = local(undisturbed, interrupted(times))
    handler = signal.getsignal(signal.SIGINT)
    spec = spec_of(steps=12, config={"interrupts": True})
    with pytest.raises(KeyboardInterrupt):
        local(spec, interrupted(times), url=str(tmp_path))
    assert signal.getsignal(signal.SIGINT) is handler
    assert steps_of(tmp_path) == ([7] if times == 1 else [])
    again = local(undisturbed, interrupted(times), str(tmp_path))
    assert again.digest == calm.digest
    assert again.logged[0]["step"] == (8 if times == 1 else 1)


def test_one_sigterm_ends_a_local_run_whose_disk_is_full(tmp_path, monkeypatch):
    write = LocalBackend.write

    def full(backend, path, content, create_only):
        if "step-" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(backend, path, content, create_only)

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if step.number == 5:
                monkeypatch.setattr(LocalBackend, "write", full)
            if step.number == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    failure = dataclasses.replace(PATIENT, storage_timeout_s=0.1)
    spec = spec_of(steps=12, failure=failure, checkpoint=CheckpointConfig(every_steps=2))
    with pytest.raises(Interrupted):
        local(spec, train, url=str(tmp_path))


def test_ctrl_c_after_the_loop_is_none_of_ours(tmp_path):
    def train(ctx):
        classify(ctx)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")

    with pytest.raises(KeyboardInterrupt):
        local(spec_of(steps=3), train, url=str(tmp_path))


@pytest.mark.parametrize("config", [CheckpointConfig(every_steps=3), NONE], ids=["first", "last"])
def test_state_that_differs_fails_the_run_by_key_with_the_weights_in_a_checkpoint(
    config, tmp_path, monkeypatch
):
    close = CheckpointCommitter.close

    def close_and_find_one_more(committer):
        close(committer)
        committer._actions.fail(StateDiffers(99, "of a later checkpoint", "w0"))

    monkeypatch.setattr(CheckpointCommitter, "close", close_and_find_one_more)

    def train(ctx):
        model, ranked = classifier(), Kept(0)
        for _ in ctx.steps(model, adamw(model), cross_entropy, state={"mine": ranked}):
            ranked.value = ctx.rank

    outcome, _ = group(short(20, config), train, url=str(tmp_path), fails=True)
    assert re.search(r"state\['mine'\]\.state_dict\(\)\.value \((0 and 1|1 and 0)\)", outcome.error)
    # A later one may be written too before the workers hear of the error.
    steps = steps_of(tmp_path)
    assert f"after step {steps[0]}: " in outcome.error
    assert steps[-1] < 20 if config.every_steps else steps == [20]
    assert edp.load_state(str(tmp_path)).step == steps[-1]
