"""Loops as people write them (user_loops.py), where workers that began are lost."""

import dataclasses
import os

import pytest

from elastic_dp.cluster.run_handle import error_of
from elastic_dp.config import CheckpointConfig
from tests.runs import group, in_turn, local, spec_of, texts_of
from tests.train.jobs import hold
from tests.train.user_loops import LOOPS

STEPS = 18  # at least; a run ends once all workers are lost that are to be
# The others are tried with `make slow`.
IN_CI = {
    *("early_stopping_that_travels", "plateau", "averaged_model_that_teaches"),
    *("layers_that_freeze", "curriculum", "lr_of_a_generator", "global_counter"),
}


class Context:
    """A context whose bodies wait for the size of the group, and end the run once the files of
    ctx.config["killed"] are there."""

    def __init__(self, ctx):
        self.ctx = ctx

    def __getattr__(self, name):
        return getattr(self.ctx, name)

    def steps(self, *args, **options):
        for step in self.ctx.steps(*args, **options):
            yield step
            hold(self.ctx, step)
            killed = self.ctx.config.get("killed", ())
            if killed and step.number >= STEPS and all(map(os.path.exists, killed)):
                self.ctx.stop("all were lost")


def held(train):
    return lambda ctx: train(Context(ctx))


def job(workers, **config):
    config |= {"hold": {0: workers}}
    steps = 100 * STEPS if "killed" in config else STEPS
    every = CheckpointConfig(every_steps=2)
    return spec_of(steps=steps, workers=workers, virtual=6, config=config, checkpoint=every)


def alone(name, steps=STEPS):
    """The run of one process, and what it said."""
    spec, heard = dataclasses.replace(job(1), max_steps=steps), []
    return local(spec, held(LOOPS[name][0]), on_say=heard.append), heard


def check_said(words, texts):
    """Checks that a warning has these words, or that there is none."""
    warnings = [text for text in texts if "WARNING" in text]
    if words is None:
        assert not warnings
    else:
        assert any(words in text for text in warnings), texts


@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_exact_or_named_in_one_process(name):
    _, error, words = LOOPS[name]
    if error is None:
        check_said(words, alone(name)[1])
        return
    with pytest.raises(error) as refusal:
        alone(name)
    assert type(refusal.value) is error and words in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(
            name, workers, marks=() if workers == 2 and name in IN_CI else pytest.mark.slow
        )
        for name in LOOPS
        for workers in (1, 2, 3)
    ],
)
def test_loop_is_exact_or_named_although_workers_that_began_it_are_lost(name, workers, tmp_path):
    _, error, words = LOOPS[name]
    # Each time rank 0, which has been there for longest, once the group is whole again.
    step = 7 if workers == 1 else None
    same = {"point": "backward", "rank": 0, "world_size": workers, "step": step}
    faults = in_turn([same] * workers, tmp_path, settled=True)
    # Of one worker nobody else has the state: it dies once that of step 2 is committed.
    url = str(tmp_path / "run") if workers == 1 else None
    commit = f"{url}/checkpoints/seals/step-{2:012}.claim-{2:08}.json"
    spec = job(
        workers, killed=tuple(fault.once for fault in faults), gates={6: commit} if url else {}
    )
    outcome, run = group(spec, held(LOOPS[name][0]), faults=faults, url=url, fails=True)
    if error is not None:
        refusal = error_of(outcome)
        assert type(refusal) is error and words in str(refusal), outcome.traceback
        return
    check_said(words, texts_of(run))
    if words is None:
        assert outcome.error is None, outcome.traceback
        undisturbed, _ = alone(name, outcome.step)
        assert (outcome.step, outcome.digest) == (undisturbed.step, undisturbed.digest)
        assert outcome.workers_lost == workers
