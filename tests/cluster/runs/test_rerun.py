"""Running it again: each row of the table in docs/checkpoints.md."""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import nn
from torch.utils import data as data_utils

import elastic_dp as edp
from elastic_dp.checkpoint.lease import Lease
from elastic_dp.cluster.runs.run_history import StartRecord
from elastic_dp.errors import ModelError, RunMismatch
from elastic_dp.storage import Store
from elastic_dp.train.exactness.code_fingerprint import code_fingerprint
from elastic_dp.train.local_run import LocalRun
from tests.runs import Points, group, spec_of
from tests.train.jobs import Average, adamw, classifier, cross_entropy


def trains(width=16, lr=1e-3, **loop):
    def train(ctx):
        model = classifier(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        rate = torch.optim.lr_scheduler.StepLR(optimizer, loop.get("period", 100))
        state = {"ema": Average(model)} if loop.get("average") else None
        for step in ctx.steps(model, optimizer, cross_entropy, scheduler=rate, state=state):
            ctx.log({"lr": step.lr})

    return train


FIRST = trains()


def fit(path, train=FIRST, max_steps=4, seed=0, virtual=2, rows=192, size=4, **options):
    """With what it warned of."""
    data = edp.MapStyleData(Points(rows), micro_batch_size=size, seed=seed)
    trainer = edp.ElasticTrainer(
        train,
        name="again",
        storage_path=str(path),
        data=data,
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=virtual),
        checkpoint=edp.CheckpointConfig(every_steps=2),
        max_steps=max_steps,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trainer.fit(local=True)
    return result, [str(w.message) for w in caught if w.category is UserWarning]


def said(path):
    lines = (path / "again" / "events.jsonl").read_text().splitlines()
    return [line["text"] for line in map(json.loads, lines) if line.get("command") == "Explain"]


def test_a_finished_one_returns_its_stored_result(tmp_path):
    first, _ = fit(tmp_path)
    assert fit(tmp_path) == (first, [])


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "max_steps is 6 now, was 4"), ({"sharding": "optimizer"}, "sharding is 'optimizer' now")],
)
def test_a_larger_max_steps_continues_and_what_changes_is_said(more, words, tmp_path):
    fit(tmp_path)
    result, warned = fit(tmp_path, max_steps=6, **more)
    assert (result.step, warned) == (6, [])
    assert any("since the last start of this run" in x and words in x for x in said(tmp_path))
    assert result.weights_sha256 == fit(tmp_path / "at once", max_steps=6)[0].weights_sha256


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 1}, "seed is 1, .* 0"),
        ({"virtual": 4}, "virtual_workers is 4, .* 2"),
        ({"rows": 96}, "data"),
        ({"size": 8}, "micro_batch_size is 8, .* 4"),
        ({"exact": False}, "exact is False, .* True"),
        ({"wire": "bf16"}, "wire is 'bf16', .* None"),
        ({"staleness": 1}, "staleness is 1, .* 0"),
        ({"inner_steps": 2}, "inner_steps is 2, .* None"),
        ({"staleness": {0: 0, 9: 1}}, "staleness is {'0': 0, '9': 1}, .* 0"),
    ],
)
def test_rerun_with_another_result_deciding_setting_is_refused(tmp_path, other, words):
    fit(tmp_path)
    with pytest.raises(RunMismatch, match=words):
        fit(tmp_path, **other)


def inner(model, step):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trains_inside(ctx):
    model = classifier()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in ctx.steps(model, outer, cross_entropy, inner_optimizer=inner):
        pass


@pytest.mark.parametrize(
    ("train", "schedule", "other"),
    [
        (FIRST, {"wire": "bf16"}, {"wire": None}),
        (FIRST, {"staleness": 1}, {"staleness": 0}),
        (FIRST, {"staleness": {0: 0, 2: 1, 5: 0}}, {"staleness": {0: 0, 2: 1}}),
        (trains_inside, {"inner_steps": {0: 1, 3: 2}}, {"inner_steps": {0: 1, 4: 2}}),
    ],
    ids=["rounded", "delayed", "staleness", "inner steps"],
)
def test_run_goes_on_before_at_and_behind_the_changes_of_its_schedule_only(
    train, schedule, other, tmp_path
):
    at_once, _ = fit(tmp_path / "at once", train, max_steps=7, **schedule)
    for steps in (2, 3, 5, 7):
        result, warned = fit(tmp_path, train, max_steps=steps, **schedule)
        assert (result.step, warned) == (steps, [])
    assert result.weights_sha256 == at_once.weights_sha256
    assert (
        result.weights_sha256 != fit(tmp_path / "o", train, max_steps=7, **other)[0].weights_sha256
    )
    for run_record_is_there in (True, False):
        if not run_record_is_there:  # then the worker compares the checkpoint
            (tmp_path / "again" / "run.json").unlink()
        with pytest.raises(RunMismatch, match=f"{next(iter(other))} is .*, but the"):
            fit(tmp_path, train, max_steps=8, **other)


def no_optimizer_of_this_kind(ctx):
    model = classifier(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=rate):
        pass


def one_layer_more(ctx):
    model = nn.Sequential(classifier(16), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in ctx.steps(model, optimizer, cross_entropy):
        pass


def of_parts(model=classifier, scheduler=None, state=None, loss_fn=cross_entropy):
    """A train function whose parts another start may change."""

    def train(ctx):
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        rate = scheduler(optimizer) if scheduler else None
        for _ in ctx.steps(made, optimizer, loss_fn, scheduler=rate, state=state):
            pass

    return train


def frozen():
    model = classifier()
    next(model.parameters()).requires_grad_(False)
    return model


def in_eval_mode():
    model = classifier()
    model[0].eval()
    return model


def milestones(*steps):
    return lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, steps)


def in_sequence(*periods):
    def make(optimizer):
        inner = [torch.optim.lr_scheduler.StepLR(optimizer, each) for each in periods]
        first_steps = [10 * number for number in range(1, len(inner))]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, inner, first_steps)

    return make


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ({}, {"model": frozen}, "model.0.weight.requires_grad is False in the code now, was True"),
        ({"model": frozen}, {}, "model.0.weight.requires_grad is True in the code now, was False"),
        ({}, {"model": in_eval_mode}, "model.0.training is False in the code now, was True"),
        (
            {"scheduler": milestones(4, 8)},
            {"scheduler": milestones(3, 8)},
            "milestones is [[3, 1], [8, 1]] in the code now, was [[4, 1], [8, 1]]",
        ),
        (
            {"scheduler": in_sequence(4, 4)},
            {"scheduler": in_sequence(4, 5)},
            "the scheduler's scheduler 1's step_size is 5 in the code now, was 4",
        ),
    ],
)
def test_what_the_code_sets_and_the_checkpoint_decides_is_told(then, now, words, tmp_path):
    fit(tmp_path, of_parts(**then))
    fit(tmp_path, of_parts(**now), max_steps=6)
    assert any(
        words in text and "of the checkpoint of step 4 count" in text for text in said(tmp_path)
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_layer_without_state_may_be_added(staleness, tmp_path):
    """As `nn.Dropout`: the advice was to delete the checkpoint. Flags of the code count then."""
    fit(tmp_path, of_parts(), staleness=staleness)
    more = classifier().append(nn.Dropout(0.0))
    more[2].eval()
    result, warned = fit(tmp_path, of_parts(lambda: more), max_steps=6, staleness=staleness)
    assert result.step == 6 and "code of the train function" in warned[0]
    assert not more[2].training and not any("training is" in text for text in said(tmp_path))


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (
            {"state": {"mean": nn.Linear(2, 2)}},
            {"state": {"mean": nn.Linear(3, 3)}},
            "load_state_dict of the object 'mean' of state= does not take .*size mismatch",
        ),
        (
            {"model": lambda: Noted({"old": 1})},
            {"model": lambda: Noted({"new": 1})},
            "set_extra_state of _extra_state does not take .*KeyError: 'new'",
        ),
    ],
)
def test_state_that_its_object_does_not_take_is_named(then, now, words, tmp_path):
    fit(tmp_path, of_parts(**then))
    with pytest.raises(ModelError, match=f"(?s){words}.*bring the old code back or use a new name"):
        fit(tmp_path, of_parts(**now), max_steps=6)


class Noted(nn.Sequential):
    def __init__(self, note):
        super().__init__(*classifier())
        self.note = note

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = {key: state[key] for key in self.note}


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(tmp_path):
    fit(tmp_path)
    shutil.rmtree(tmp_path / "again" / "checkpoints")
    result, _ = fit(tmp_path, max_steps=5)
    assert any("has no checkpoint: it begins at step 1" in x for x in said(tmp_path))
    assert result.weights_sha256 == fit(tmp_path / "at once", max_steps=5)[0].weights_sha256


def test_a_changed_config_is_told(tmp_path):
    kept = {"kept": [1, {"a": 2}], "itself": []}
    kept["itself"].append(kept)
    then = {"args": argparse.Namespace(smoothing=0.1), "secret": "abc"}
    fit(tmp_path, config=kept | then)
    now = kept | {"args": argparse.Namespace(smoothing=0.2)}
    told = "other values in config: args, secret"
    assert fit(tmp_path, config=now)[1] == [f"{told}; the stored result is returned all the same"]
    _, warned = fit(tmp_path, max_steps=6, config=now)
    assert warned == [f"since the last start of this run: {told}"]
    assert "abc" not in (tmp_path / "again" / "start.json").read_text()


def test_a_start_is_recorded_once_the_run_is_its_own(tmp_path, monkeypatch):
    """Else the status of a live run would tell of another driver, which waits for its end."""
    fit(tmp_path)
    record = tmp_path / "again" / "start.json"
    first, found, say = record.read_text(), [], LocalRun.say

    def looks(run, text):
        if "the run is held by" in text:
            found.append(record.read_text())
        say(run, text)

    monkeypatch.setattr(LocalRun, "say", looks)
    Lease(Store(str(record.parent)), "another host", "token", lease_s=0.5).acquire()
    fit(tmp_path, max_steps=6)
    assert found == [first] and '"max_steps": 6' in record.read_text()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            of_parts(scheduler=milestones(3)),
            r"the scheduler: MultiStepLR here, StepLR in the newest",
        ),
        (
            of_parts(scheduler=in_sequence(3, 4)),
            r"the scheduler: SequentialLR\(StepLR, StepLR\) here, StepLR in the newest",
        ),
        (of_parts(), r"the scheduler: None here, StepLR in the newest"),
        (trains(width=17), r"parameter 0\.weight: \(32, 17\) of torch.float32 here, \(32, 16\)"),
        (one_layer_more, r"parameter 0\.0\.weight: .* here, absent in"),
        (no_optimizer_of_this_kind, "the optimizer: SGD here, AdamW in"),
        (trains(average=True), r"the keys of state=: \['ema'\] here, \[\] in"),
    ],
)
def test_a_state_that_does_not_fit_is_named(tmp_path, other, words):
    fit(tmp_path)
    with pytest.raises(RunMismatch, match=words):
        fit(tmp_path, other, max_steps=6)


def test_rerun_with_another_learning_rate_warns_and_keeps_that_of_the_checkpoint(tmp_path):
    fit(tmp_path)
    result, warned = fit(tmp_path, trains(lr=0.5), max_steps=6)
    assert result.metrics["lr"] == 1e-3
    assert any("the code of the train function" in text for text in warned)
    told = [text for text in said(tmp_path) if "the optimizer's lr is 0.5" in text]
    assert len(told) == 1 and "was 0.001" in told[0] and "step 4 count" in told[0]
    fit(tmp_path, trains(lr=0.5), max_steps=8)  # once
    assert len([text for text in said(tmp_path) if "lr is 0.5" in text]) == 1


def test_rerun_after_the_scheduler_changed_the_rate_does_not_warn(tmp_path):
    """The scheduler is to lower the rate after one step; that is no change of the code."""
    fit(tmp_path, trains(period=1))
    result, warned = fit(tmp_path, trains(period=1), max_steps=6)
    assert result.metrics["lr"] == pytest.approx(1e-3 * 0.1**5)
    assert warned == []
    assert not [text for text in said(tmp_path) if text.startswith("WARNING")]


def test_rerun_with_other_code_warns(tmp_path):
    def train(ctx):
        FIRST(ctx)

    fit(tmp_path)
    _, warned = fit(tmp_path, train)
    assert len(warned) == 1 and "stored result is returned" in warned[0]
    _, warned = fit(tmp_path, train, max_steps=6)
    assert len(warned) == 1 and "the code of the train function" in warned[0]
    assert warned[0] in said(tmp_path)
    assert fit(tmp_path, train, max_steps=8)[1] == []


def test_a_lower_limit_is_told(tmp_path):
    first, _ = fit(tmp_path)
    result, warned = fit(tmp_path, max_steps=3)
    assert result == first and len(warned) == 1 and "under other limits" in warned[0]
    (tmp_path / "again" / "result.json").unlink()  # as if it had not finished
    result, warned = fit(tmp_path, max_steps=4)
    assert warned == []
    (tmp_path / "again" / "result.json").unlink()
    _, warned = fit(tmp_path, max_steps=3)
    assert warned == ["since the last start of this run: max_steps is 3 now, was 4"]


def test_workers_say_the_same_of_a_checkpoint_that_does_not_fit(tmp_path):
    fit(tmp_path)
    spec = spec_of(virtual=2, workers=1, steps=6)
    outcome, _ = group(spec, trains(width=17), url=str(tmp_path / "again"), fails=True)
    assert outcome.error.startswith("RunMismatch: parameter 0.weight")


def test_run_once_continued_on_another_kind_of_machine_stays_inexact(tmp_path, monkeypatch):
    first, _ = fit(tmp_path)
    assert first.exact
    monkeypatch.setattr(
        "elastic_dp.train.worker_session.machine_kind", lambda device, exact: "an abacus"
    )
    for steps in (6, 8):  # the second finds a checkpoint that an abacus made
        result, _ = fit(tmp_path, max_steps=steps)
        assert not result.exact
        assert "several kinds of machine: torch" in result.inexact_because[0]
        assert result.inexact_because[0].endswith(" | an abacus")
    assert sum("goes on from step 4 on 'an abacus'" in text for text in said(tmp_path)) == 1


# ------------------------------------------------------------------------------------------- code

SCRIPT = """
RATES = {"all": {"a", "b", "c", "d"}}
class Net:
    depth = 3
    def forward(self, x):
        return helper(x) if self.training else x
def helper(x):
    return x * RATE
RATE = 2
def train(ctx):
    net, names = Net(2, 2), {n for n in RATES["all"] if n in {"a", "b", "c"}}
    for _ in ctx.steps(net, None, lambda model, batch: model(batch)):
        pass
max_steps = 10
"""


def code_in_a_process(script, tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        script + "\nfrom elastic_dp.train.exactness.code_fingerprint import "
        "code_fingerprint\nprint(code_fingerprint(train))"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONHASHSEED": "random"}
    command = [sys.executable, path]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout


def test_two_starts_of_a_script_have_one_code(tmp_path):
    once = code_in_a_process(SCRIPT, tmp_path)
    assert len(once.split()[0]) == 16
    other = SCRIPT.replace("max_steps = 10", "# a remark\n\nmax_steps = 20")
    assert code_in_a_process(other, tmp_path) == once


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 2", "RATE = 3"),
        ("x * RATE", "x + RATE"),
        ("depth = 3", "depth = 4"),
        ("if self.training else", "if x is None else"),
        ("model(batch)", "model(batch, 1)"),
        ('"a", "b", "c"}}', '"a", "b", "d"}}'),
        ("Net(2, 2)", "Net(2, 3)"),
    ],
)
def test_each_change_of_it_is_another(old, new):
    def run(script):
        # As where the script itself is at hand no more: in a worker.
        names = {"__name__": "a_job"}
        exec(compile(textwrap.dedent(script), "nowhere.py", "exec"), names)
        return code_fingerprint(names["train"])

    assert old in SCRIPT
    assert run(SCRIPT) == run(SCRIPT) != run(SCRIPT.replace(old, new))


def test_workers_compare_code_and_not_what_a_module_found_on_its_machine():
    def at(host, body="return host"):
        names = {"__name__": "a_job", "host": host}
        exec(f"def train(ctx):\n    {body}", names)
        return names["train"]

    assert code_fingerprint(at("a")) != code_fingerprint(at("b"))
    assert code_fingerprint(at("a"), constants=False) == code_fingerprint(at("b"), constants=False)
    assert code_fingerprint(at("a"), constants=False) != code_fingerprint(
        at("a", "return 1"), constants=False
    )


def test_code_does_not_change_with_a_variable_that_only_shares_an_attributes_name():
    """`steps = int(sys.argv[1])` in a script is not what `ctx.steps` reads."""

    def at(steps):
        names = {"__name__": "a_job", "steps": steps}
        exec("def train(ctx):\n    return ctx.steps()", names)
        return code_fingerprint(names["train"])

    assert at(10) == at(20)


def test_functions_of_a_table_and_of_the_data_count():
    def at(factor):
        names = {"__name__": "a_job"}
        exec(f"def loss(x):\n    return x * {factor}\ndef train(ctx):\n    return LOSSES", names)
        names["LOSSES"] = {"first": names["loss"]}
        return names

    assert code_fingerprint(at(1)["train"]) != code_fingerprint(at(2)["train"])
    alike = trains()
    assert code_fingerprint(alike, at(1)["loss"]) != code_fingerprint(alike, at(2)["loss"])


class Transformed(Points):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform
        self.dataset = self


@pytest.mark.parametrize(
    "around",
    [
        lambda function: Transformed(functools.lru_cache(function)),
        lambda function: data_utils.Subset(Transformed(function), [0]),
        lambda function: data_utils.ConcatDataset([Points(), Transformed(function)]),
    ],
)
def test_functions_within_a_data_set_count(around):
    def at(factor):
        names = {"__name__": "a_job"}
        exec(f"def transform(row):\n    return row * {factor}", names)
        data = edp.MapStyleData(around(names["transform"]), micro_batch_size=4)
        return StartRecord.of(dataclasses.replace(spec_of(), data=data), FIRST).code

    assert at(1) == at(1) != at(2)


def test_closures_and_partials_count():
    assert (
        code_fingerprint(trains())
        == code_fingerprint(trains())
        != code_fingerprint(trains(lr=2e-3))
    )
    assert code_fingerprint(adamw)


def by_total(ctx):
    model = classifier()
    optimizer = adamw(model)
    total = ctx.total_steps
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=rate):
        pass


@pytest.mark.parametrize("train", [by_total, FIRST])
def test_a_raised_max_steps_is_said_where_the_code_reads_the_total(tmp_path, train, capsys):
    fit(tmp_path, train)
    fit(tmp_path, train, max_steps=6)
    texts = said(tmp_path)
    assert "going on from step 4" in texts
    assert "going on from step 4" in capsys.readouterr().err
    warned = [text for text in texts if "ctx.total_steps is 6 now and was 4 up to step 4" in text]
    assert len(warned) == (train is by_total)


def test_a_warning_of_a_start_names_the_line_of_the_script(tmp_path):
    fit(tmp_path, trains(width=16))
    data = edp.MapStyleData(Points(192), micro_batch_size=4)
    scaling = edp.ScalingConfig(max_workers=2, virtual_workers=2)
    trainer = edp.ElasticTrainer(
        trains(lr=2e-3),
        name="again",
        storage_path=tmp_path,
        data=data,
        scaling=scaling,
        max_steps=6,
    )
    with pytest.warns(UserWarning, match="the code of the train function") as caught:
        trainer.fit(local=True)
    assert [w.filename for w in caught] == [__file__]
