"""Variables of the loop's body: named where a worker that joins would lack them, carried by
ctx.carry, and an error where parameter groups differ. More of them are in `user_loops.py`."""

import argparse
import math
import random
import time

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from elastic_dp.cluster.run_handle import error_of
from elastic_dp.errors import LoopError
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, resize, spec_of, texts_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold


def begin(ctx, **options):
    model = classifier()
    return ctx.steps(model, adamw(model), cross_entropy, **options)


def heard_of(train, steps=4):
    heard = []
    local(spec_of(steps=steps, workers=1, virtual=2), train, on_say=heard.append)
    return [text for text in heard if "WARNING" in text]


# ------------------------------------------------------------------------------------- named


def last_evaluation(ctx):
    value = 0.0
    for step in begin(ctx):
        if step.number % 2 == 0:
            value = step.loss
        ctx.log({"value": value})


def in_args(ctx):
    args = argparse.Namespace(lr=0.1)
    for _ in begin(ctx):
        args.lr *= 0.5


def own_generator(ctx):
    rng = random.Random(0)
    for _ in begin(ctx):
        rng.random()


def helper_generator(ctx):
    def numbered():
        yield from begin(ctx)

    wait = 0
    for _ in numbered():
        wait = wait + 1


NAMED = {
    last_evaluation: "value (0.0, then",
    in_args: "args.lr (0.1, then 0.05)",
    own_generator: "rng",
    helper_generator: "wait (0, then 1)",
}


@pytest.mark.parametrize("train", NAMED, ids=lambda train: train.__name__)
def test_variable_that_the_body_changes_is_named_once(train):
    warnings = heard_of(train)
    named = [text for text in warnings if NAMED[train] in text.partition(". A worker")[0]]
    assert len(named) == 1, warnings
    assert "ctx.carry(" in named[0] or "state={" in named[0]


# --------------------------------------------------------------------------------- not named


def assigned_before_it_is_read(ctx):
    for step in begin(ctx):
        loss = step.loss
        text = f"{loss:.3f}"
        low = [x for x in (1.0, 2.0) if x < loss]
        ctx.log({"text": text, "low": low})
    assert loss


def clocks(ctx):
    began = time.time()
    last = time.perf_counter()
    for step in begin(ctx):
        ctx.log({"s": time.time() - began, "since": time.perf_counter() - last, "n": step.number})
        last = time.perf_counter()


def constants(ctx):
    config = {"every": 2, "names": ["a", "b"]}
    for step in begin(ctx):
        if step.number % config["every"] == 0:
            ctx.log({name: step.loss for name in config["names"]})


def passed(ctx):
    model = classifier()
    optimizer = adamw(model)
    ema, scheduler = AveragedModel(model), StepLR(optimizer, 2)
    for _ in ctx.steps(model, optimizer, cross_entropy, state={"e": ema, "s": scheduler}):
        ema.update_parameters(model)
        scheduler.step()


def carried(ctx):
    c = ctx.carry(best=math.inf, seen=[])
    for step in begin(ctx):
        c.best = min(c.best, step.loss)
        c.seen.append(step.number)


@pytest.mark.parametrize(
    "train",
    [assigned_before_it_is_read, clocks, constants, passed, carried],
    ids=lambda train: train.__name__,
)
def test_variable_that_travels_or_carries_nothing_is_not_named(train):
    assert heard_of(train) == []


# ------------------------------------------------------------------------------------ refused


def average_in_the_body(ctx):
    model = classifier()
    ema = AveragedModel(model)
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        ema.update_parameters(model)


def carried_module(ctx):
    ctx.carry(ema=nn.Linear(1, 1))


def carried_in_the_loop(ctx):
    for _ in begin(ctx):
        ctx.carry(wait=0)


def key_of_carry(ctx):
    ctx.carry(wait=0)
    for _ in begin(ctx, state={"carry": nn.Linear(1, 1)}):
        pass


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (average_in_the_body, 'state={"ema": ema}'),
        (carried_module, r'state={"ema": ema}'),
        (carried_in_the_loop, "Call it before the loop"),
        (key_of_carry, "give the object another one"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_body_that_a_joiner_could_not_follow_raises(train, words):
    with pytest.raises(Exception, match="ctx") as refused:
        heard_of(train)
    assert words in str(refused.value)


# ------------------------------------------------------------------------------------ on workers


def stops_early(ctx):
    """Stops once the loss has not been under its best for some steps in all."""
    c = ctx.carry(best=math.inf, wait=0, history=[])
    for step in begin(ctx):
        c.history.append(step.number)
        c.wait += step.loss >= c.best
        c.best = min(c.best, step.loss)
        assert c.history == list(range(1, step.number + 1))
        if c.wait >= 7:
            ctx.stop(f"no better after {step.number} steps")
        hold(ctx, step)


def test_run_stops_at_the_same_step_although_all_who_began_it_are_lost(tmp_path):
    spec = spec_of(steps=200, workers=2, config={"hold": {0: 2}})
    alone = local(spec, stops_early)
    # The second one has rank 0 then.
    faults = tuple(
        WorkerFault("backward", rank=0, world_size=2, step=step, once=str(tmp_path / f"{step}"))
        for step in (4, 8)
    )
    outcome, run = group(spec, stops_early, faults=faults)
    assert 8 < outcome.step < 200 and outcome.workers_lost == 2
    assert (outcome.step, outcome.digest) == (alone.step, alone.digest)
    assert not [text for text in texts_of(run) if "WARNING" in text]


def lowers_by_hand(ctx):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    for step in ctx.steps(model, optimizer, cross_entropy):
        count = count + 1
        if count == 8:
            optimizer.param_groups[0]["lr"] *= 0.5
        hold(ctx, step)


def test_parameter_group_that_differs_names_field_values_and_who_joined():
    spec = spec_of(steps=40, workers=1, config={"hold": {0: 2}})
    outcome, run = group(spec, lowers_by_hand, script=[resize(1, 2)], fails=True)
    error = error_of(outcome)
    assert type(error) is LoopError, outcome.traceback
    for words in ("param_groups[0]['lr'] is 0.0", "joined after step", "ctx.carry", "w1", "w2"):
        assert words in str(error)
    assert any("count (0, then 1)" in text for text in texts_of(run))
