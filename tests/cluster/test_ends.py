"""How a run on processes ends, and what it says of that: the reason, whose fault, how many were
lost."""

import dataclasses
import sys

import pytest
import torch
from torch import nn

from elastic_dp.cluster.run_handle import Run, error_of
from elastic_dp.config import MapStyleData
from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested, StopRequested
from elastic_dp.data import open_data
from elastic_dp.errors import (
    BadShard,
    ClusterError,
    DataError,
    LoopError,
    ModelError,
    StorageError,
    UserCodeError,
)
from elastic_dp.run_record import Result, RunOutcome
from elastic_dp.storage.error_classes import ObjectMissing
from elastic_dp.train.local_run import LocalRun
from tests.patience import eventually
from tests.runs import Points, group, lines_of, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold


def stops(ctx):
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        if step.number == ctx.config.get("stop_at"):
            ctx.stop(ctx.config["reason"])


def run_local(spec, train):
    data = open_data(spec.data, virtual_workers=spec.scaling.num_virtual_workers)
    return LocalRun(spec, data, torch.device("cpu")).run(train)


@pytest.mark.parametrize(
    ("config", "step", "reason"),
    [
        ({"stop_at": 5, "reason": "converged"}, 5, "converged"),
        ({"stop_at": 5, "reason": ""}, 5, "asked without a reason"),
        ({}, 12, "the last step"),
    ],
)
def test_the_reason_is_the_job_s_own(config, step, reason):
    spec = spec_of(config=config, workers=2)
    outcome, _ = group(spec, stops)
    assert (outcome.step, outcome.reason, outcome.error) == (step, reason, None)
    assert outcome.result.reason == reason
    session = run_local(spec, stops)
    assert (session.position.step, session.progress.ended) == (step, reason)


@pytest.mark.parametrize("where", ["local", "group"])
def test_the_time_limit(where):
    spec = dataclasses.replace(spec_of(workers=1), max_steps=None, max_time_s=1.0)
    if where == "local":
        assert run_local(spec, stops).progress.ended == "max_time_s reached"
    else:
        assert group(spec, stops)[0].reason == "max_time_s reached"


@pytest.mark.parametrize("where", ["local", "group"])
def test_an_exit_is_an_error_of_the_job_and_not_a_death(where):
    def exits(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if step.number == 2:
                sys.exit("no such file")

    if where == "local":
        with pytest.raises(LoopError, match=r"exit with 'no such file'.*call ctx\.stop"):
            run_local(spec_of(workers=1), exits)
        return
    outcome, _ = group(spec_of(workers=2), exits, fails=True)
    assert isinstance(error_of(outcome), LoopError)
    assert 'sys.exit("no such file")' in outcome.traceback
    assert outcome.workers_lost == 0


def test_worker_that_was_asked_to_leave_does_not_count_as_lost():
    killed = []

    def trains(run, size, gone=""):
        """Waits until so many train, so each has the state, and whoever left before is gone."""

        def so():
            status = run.controller.status()
            stages = status["workers"]
            whole = (status["phase"], status["world_size"]) == ("running", size)
            return whole and list(stages.values()) == ["member"] * size and gone not in stages

        eventually(so, run.controller.status)
        return run.controller.coordinator.membership.members[0].worker

    def leave_one_by_one(run):
        trains(run, 3)
        run.controller.post(SizeRequested(2))
        drained = trains(run, 2)
        run.controller.post(DrainNoticed(drained, None))
        killed.append(trains(run, 2, gone=drained))
        run.worker_group.kill(killed[0])
        trains(run, 2, gone=killed[0])
        run.controller.post(StopRequested("enough"))

    spec = spec_of(workers=3, steps=100_000)
    outcome, run = group(spec, stops, script=[(1, leave_one_by_one)])
    assert (outcome.error, outcome.reason, outcome.workers_lost) == (None, "enough", 1)
    told = [
        (x["worker"], x["reason"], x["cause"])
        for x in lines_of(run)
        if x.get("event") == "WorkerLost"
    ]
    asked = ("left, as it was asked to", "released")
    [(worker, _, cause)] = [lost for lost in told if lost[1:] != asked]
    assert ([worker], cause) == (killed, "unknown"), told


def test_error_while_data_is_opened_keeps_its_type_and_message():
    outcome, _ = group(spec_of(workers=2, rows=0), stops, fails=True)
    error = error_of(outcome)
    assert type(error) is DataError and "is empty" in str(error)
    assert outcome.workers_lost == 0


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (BadShard("part-3.parquet", 7, "it was cut off"), BadShard),
        (ObjectMissing("no such object"), StorageError),
    ],
)
def test_an_error_of_ours_arrives_as_it_was(raised, kind):
    def raises(ctx):
        raise raised

    error = error_of(group(spec_of(workers=1), raises, fails=True)[0])
    assert type(error) is kind and error.args == raised.args


def test_error_of_user_code_in_a_data_process_is_a_user_code_error():
    def collate(items):
        raise KeyError("not a column")

    data = MapStyleData(Points(), micro_batch_size=4, collate_fn=collate, workers=1)
    outcome, _ = group(dataclasses.replace(spec_of(workers=1), data=data), stops, fails=True)
    error = error_of(outcome)
    assert isinstance(error, UserCodeError) and error.worker == "w1"
    assert 'raise KeyError("not a column")' in error.remote_traceback
    assert "not a column" in error.description and "step 1, virtual worker" in error.description


def test_a_failure_of_the_controller_is_not_the_user_s():
    outcome = RunOutcome(error="the controller failed: TypeError: …", traceback="Traceback …")
    assert type(error_of(outcome)) is ClusterError and "Traceback …" in str(error_of(outcome))


class InDouble(nn.Linear):
    """A layer that computes in float64."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x.double()).float()


# Models that train all the same.
DIFFERENCES = {  # of a model: what makes it, and the two lines that the error names
    "shape": (
        lambda model: model.__setitem__(4, nn.Linear(32, 5)),
        (
            "parameter 4.weight (5, 32) of torch.float32",
            "parameter 4.weight (4, 32) of torch.float32",
        ),
    ),
    "name": (
        lambda model: model[1].register_parameter("scale", nn.Parameter(torch.ones(32))),
        ("parameter 1.scale (32,) of torch.float32", "parameter 4.weight (4, 32) of torch.float32"),
    ),
    "dtype": (
        lambda model: model.__setitem__(4, InDouble(32, 4)),
        (
            "parameter 4.weight (4, 32) of torch.float64",
            "parameter 4.weight (4, 32) of torch.float32",
        ),
    ),
    "buffer": (
        lambda model: model[4].register_buffer("seen", torch.zeros(3)),
        ("buffer 4.seen (3,) of torch.float32", "the optimizer AdamW"),
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_models_that_differ_are_an_error_of_the_job_that_names_the_first_difference(difference):
    change, (its, ours) = DIFFERENCES[difference]

    def differs(ctx):
        model = classifier()
        if not ctx.is_source:
            change(model)
        for step in ctx.steps(model, adamw(model), cross_entropy):
            hold(ctx, step)

    outcome, _ = group(spec_of(workers=2, config={"hold": {3: 2}}), differs, fails=True)
    assert type(error_of(outcome)) is ModelError
    assert str(error_of(outcome)).endswith(f"{its!r}, not {ours!r}")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("the last step", "the run had ended already, after step 60 (the last step)"),
        ("interrupted", "there is no checkpoint; run the same command again"),
    ],
)
def test_ctrl_c_after_the_last_step_does_not_promise_that_the_run_goes_on(
    tmp_path, monkeypatch, reason, said
):
    result = Result.__new__(Result)
    outcome = RunOutcome(result=result, step=60, reason=reason)
    monkeypatch.setattr("elastic_dp.cluster.ray.private.owns_cluster", lambda: True)
    monkeypatch.setattr(Run, "_ask", lambda run, method, *of: outcome if method == "wait" else None)
    texts = []
    progress = type("Said", (), {"say": staticmethod(texts.append)})
    run = Run(spec_of(), str(tmp_path / "run"), controller=object())
    run.interrupted(progress)
    assert texts[-1].startswith(said)
