"""Mistakes in the loop over ctx.steps, in its body, and in what is logged there."""

import json
import math
import os
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp import errors
from elastic_dp.cluster.run_handle import error_of
from elastic_dp.errors import (
    LoopError,
    LossError,
    ModelError,
    UserCodeError,
)
from tests.bad_input.jobs import good, looping, not_finite, synchronised, trainer
from tests.runs import Points, group, lines_of, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy, logs_its_loss

MISTAKES = {  # the train function, the error, and what it names
    "no loop": (lambda ctx: None, LoopError, "ctx.steps"),
    "no scalar": (looping(lambda m, b: m(b["x"]).sum(1)), LossError, "shape (4,)"),
    "not finite": (looping(not_finite), LossError, "17"),
    "a lone break": (looping(body=lambda s: s.number == 3), LoopError, "after step 3"),
    "SyncBatchNorm": (looping(model=synchronised), ModelError, "model.1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_group_raises_the_error_of_a_local_run_and_records_it_once(mistake):
    train, kind, word = MISTAKES[mistake]
    with pytest.raises(kind, match=re.escape(word)) as alone:
        local(spec_of(), train)
    outcome, run = group(spec_of(workers=2, min_workers=2), train, fails=True)
    error = error_of(outcome)
    assert (type(error), str(error)) == (kind, str(alone.value))
    assert told(run) == 1


def test_error_of_all_workers_at_one_step_is_recorded_once():
    def fails_at_three(step):
        if step.number == 3:
            raise KeyError("both of them")

    outcome, run = group(
        spec_of(workers=2, min_workers=2), looping(body=fails_at_three), fails=True
    )
    error = error_of(outcome)
    assert type(error) is UserCodeError and error.description == "KeyError: 'both of them'"
    assert error.remote_traceback.count('raise KeyError("both of them")') == 1
    assert told(run) == 1


def told(run):
    """How often its record says that it failed."""
    return sum(line.get("command") == "FailRun" for line in lines_of(run))


# to the model of `test_body_that_replaces_or_resets_state_is_refused`: what a body may do, and what
# the error names
WRITES = {
    "data": (lambda m, o: [p.data.mul_(0.5) for p in m.parameters()], "wrote to "),
    "one data": (lambda m, o: m[3].bias.data.mul_(0.5), "wrote to '3.bias'"),
    "new data": (lambda m, o: setattr(m[0].bias, "data", m[0].bias * 0.5), "wrote to '0.bias'"),
    "parameter": (lambda m, o: setattr(m[0], "bias", nn.Parameter(m[0].bias * 0.5)), "0.bias was"),
    "module": (lambda m, o: setattr(m, "3", nn.Linear(8, 4)), "model.3 was replaced"),
    "state": (lambda m, o: o.state[m[0].weight]["exp_avg"].zero_(), "state of '0.weight'"),
    "removed": (lambda m, o: delattr(m, "4"), "of which it removed model.4"),
    "reset": (lambda m, o: o.state.clear(), "the optimizer's state of "),
    "step": (lambda m, o: o.step(), r"optimizer.step\(\)"),
}


@pytest.mark.parametrize("write", WRITES)
def test_body_that_replaces_or_resets_state_is_refused(write):
    """In the first body also those that raise no tensor's version. Whoever takes a step over would
    have them twice."""

    def train(ctx):
        model = nn.Sequential(
            nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        )
        optimizer = adamw(model, fused=True)
        for _ in ctx.steps(model, optimizer, cross_entropy):
            act(model, optimizer)

    act, words = WRITES[write]
    with pytest.raises(LoopError, match=words):
        local(spec_of(), train)


@pytest.mark.parametrize("run", [local, group], ids=["local", "group"])
def test_parameter_group_added_in_the_body_is_refused(run):
    """A joiner could not know of it. The same error for any number of workers, at the step that did
    it."""

    def train(ctx):
        model = classifier()
        optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-2)
        for step in ctx.steps(model, optimizer, cross_entropy):
            assert step.number <= 3
            if step.number == 3:
                optimizer.add_param_group({"params": list(model[0].parameters())})

    if run is local:
        with pytest.raises(LoopError, match="Make all groups before the loop"):
            local(spec_of(), train)
    else:
        outcome, _ = group(spec_of(workers=1), train, fails=True)
        assert outcome.error.startswith("LoopError: the body of the loop over ctx.steps changed")


def test_second_loop_over_steps_is_refused():
    def train(ctx):
        good(ctx)
        good(ctx)

    with pytest.raises(LoopError, match="called twice"):
        local(spec_of(), train)


def test_evaluate_before_the_loop_is_refused():
    def train(ctx):
        ctx.evaluate(cross_entropy, edp.MapStyleData(Points(8), micro_batch_size=4))

    with pytest.raises(LoopError, match=r"ctx\.evaluate"):
        local(spec_of(), train)


def on_rank_0(ctx, data):
    if ctx.rank == 0:
        ctx.evaluate(cross_entropy, data)


def more_often_on_rank_1(ctx, data):
    for _ in range(2 + ctx.rank):
        ctx.evaluate(cross_entropy, data)


def of_other_rows(ctx, data):
    data = edp.MapStyleData(Points(20 + ctx.rank), micro_batch_size=4)
    ctx.evaluate(cross_entropy, data)


EVALUATIONS = {
    "on rank 0": (on_rank_0, r"called 1 time after step 3 by w\d, but not by w\d: every worker"),
    "more often": (
        more_often_on_rank_1,
        r"called 3 times after step 3 by w\d, but only 2 times by",
    ),
    "of other rows": (of_other_rows, "got other data on one worker than on another"),
}


@pytest.mark.parametrize("after_the_loop", [False, True], ids=["in the loop", "after it"])
@pytest.mark.parametrize("mistake", EVALUATIONS)
def test_evaluation_that_differs_between_workers_fails_the_run(mistake, after_the_loop):
    """Those that evaluate and those that have gone on would wait for each other for ever."""
    evaluate, words = EVALUATIONS[mistake]

    def train(ctx):
        model, data = classifier(), edp.MapStyleData(Points(20), micro_batch_size=4)
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if step.number < 3:
                ctx.evaluate(cross_entropy, data)
            elif step.number == 3 and not after_the_loop:
                evaluate(ctx, data)
        if after_the_loop:
            evaluate(ctx, data)

    spec = spec_of(steps=3 if after_the_loop else 5, workers=2, min_workers=2)
    error = error_of(group(spec, train, fails=True, timeout_s=20.0)[0])
    assert type(error) is LoopError and re.search(words, str(error)), error


def test_logger_that_raises_is_warned_of_and_called_again(tmp_path):
    seen = []

    def away(record):
        seen.append(record["step"])
        raise OSError("the service is away")

    job = trainer(
        tmp_path, logs_its_loss, loggers=[away, lambda record: seen.append(-record["step"])]
    )
    with pytest.warns(UserWarning, match=r"'away' raised OSError: the service is away"):
        assert job.fit(local=True).step == 4
    assert seen == [1, -1, 2, -2, 3, -3, 4, -4]


def test_metrics_at_the_limits_of_floats_are_added():
    def loss_fn(m, b):
        first = float(b["i"][0])
        return cross_entropy(m, b), 4, {"large": 1e308, "both": math.copysign(math.inf, first - 90)}

    def train(ctx):
        classify(ctx, loss_fn, body=lambda step: ctx.log(step.metrics))

    assert [list(map(repr, run.values())) for run in local(spec_of(steps=1), train).logged] == [
        ["1", "inf", "nan"]
    ]


def test_log_of_half_a_character_is_recorded_as_a_text_that_can_be_written():
    half = os.fsdecode(b"caf\xe9")

    def train(ctx):
        classify(ctx, body=lambda step: ctx.log({half: half}))

    (logged,) = local(spec_of(steps=1), train).logged
    assert logged == {"step": 1, "caf\\udce9": "caf\\udce9"}


def test_log_of_any_value_is_recorded_as_json():
    """The controller gets no tensor that it could not load, no class of the user's, no key that it
    could not write."""

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            odd = {("a", 1): {2: [torch.ones(1), np.ones(2)]}, "lock": threading.Lock()}
            ctx.log(odd | {"step": step.number, "nan": float("nan"), "huge": -(10**400)})

    run = local(spec_of(steps=1), train)
    assert json.loads(json.dumps(run.logged))[0]["('a', 1)"] == {"2": [1.0, [1.0, 1.0]]}
    assert run.logged[0]["lock"].startswith("<unlocked _thread.lock")
    assert run.logged[0]["huge"] == -float("inf")  # a number that is no float


def test_errors_survive_pickling():
    import pickle

    for error in (
        errors.UserCodeError("w1", "KeyError: 'x'", "Traceback…"),
        errors.LossError("the loss is NaN"),
        errors.RunMismatch("seed is 1"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert type(again) is type(error)
