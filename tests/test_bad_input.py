"""Each mistake a user can make is a typed error that names the field and the way out, before anything starts."""

import contextlib
import functools
import json
import math
import re
import threading
import warnings

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp import errors
from elastic_dp.cluster.run import error_of
from elastic_dp.errors import (
    LoopError,
    LossError,
    ModelError,
    RunMismatch,
    SpecError,
    StorageError,
    UserCodeError,
)
from tests.runs import Points, group, lines_of, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


class _Huge(int):
    """Beyond the largest float."""

    def __repr__(self):
        return "huge"

    __str__ = __repr__


_HUGE = _Huge(10**400)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_workers": 3, "max_workers": 2}, ["min_workers is 3", "max_workers"]),
        ({"max_workers": 8, "virtual_workers": 4}, ["virtual_workers is 4", "at least 8"]),
        ({"max_workers": 0}, ["max_workers is 0"]),
        ({"min_workers": 0}, ["min_workers is 0"]),
        ({"virtual_workers": 0}, ["virtual_workers is 0"]),
        ({"standby": -1}, ["standby is -1"]),
        ({"max_workers": 2.5}, ["max_workers is 2.5", "whole number"]),
        ({"threads_per_worker": 0}, ["threads_per_worker is 0"]),
        ({"stabilization_s": -1}, ["stabilization_s is -1"]),
        ({"market": "cheap"}, ["market is 'cheap'", "'spot-first'"]),
        ({"balance": "fair"}, ["balance is 'fair'", "'measured'"]),
        ({"min_on_demand": 2}, ["min_on_demand is 2, more than max_workers"]),
        ({"zones": "a"}, ["zones is 'a', must be a list of names"]),
        ({"label_selector": {"team": 1}}, ["label_selector is {'team': 1}", "texts by label"]),
        (
            {"market": "spot", "label_selector": {"ray.io/market-type": "spot"}},
            ["names ray.io/market-type"],
        ),
        ({"zones": 5}, ["zones is 5, must be a list of names"]),
        ({"zones": ["!a"]}, ["zones is ['!a'], must be a list of names as labels have them"]),
        ({"label_selector": {"a": "in()"}}, ["label_selector has 'a': 'in()'", "!in(a,b)"]),
        ({"label_selector": {"a b": "c"}}, ["label_selector has 'a b': 'c'"]),
        ({"label_selector": {"a": "c d"}}, ["label_selector has 'a': 'c d'"]),
        ({"resources_per_worker": {"GPU": -1}}, ["resources_per_worker['GPU'] is -1"]),
        ({"resources_per_worker": {"GPU": 1.5}}, ["['GPU'] is 1.5, must be a whole number"]),
        ({"resources_per_worker": {5: 1}}, ["[5]: a resource's name must be a text"]),
    ],
)
def test_scaling_config_out_of_range_names_field_and_value(options, words):
    with pytest.raises(SpecError) as caught:
        edp.ScalingConfig(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("wanted", ["H100", "!H100", "in(A100,H100)", "!in(A100, H100)"])
def test_label_selector_that_ray_takes_is_accepted(wanted):
    edp.ScalingConfig(label_selector={"ray.io/accelerator-type": wanted}, zones=["eu-west-1a"])


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (edp.ScalingConfig, {"max_workers": None}, "ScalingConfig.max_workers is None"),
        (edp.ScalingConfig, {"resources_per_worker": ["GPU"]}, "must be a dict of amounts"),
        (edp.ScalingConfig, {"resources_per_worker": {"GPU": math.nan}}, "'GPU'] is nan, must be f"),
        (edp.FailureConfig, {"heartbeat_timeout_s": math.inf}, "heartbeat_timeout_s is inf, must be f"),
        (edp.FailureConfig, {"heartbeat_timeout_s": None}, "heartbeat_timeout_s is None"),
        (edp.CheckpointConfig, {"every_s": math.nan}, "every_s is nan, must be finite"),
        (edp.DataConfig, {"url": "x", "micro_batch_size": None}, "micro_batch_size is None"),
        (edp.DataConfig, {"url": "x", "micro_batch_size": 1, "transform": 3}, "transform is 3"),
        (edp.MapStyleData, {"dataset": [1], "micro_batch_size": 1, "seed": None}, "seed is None"),
        (edp.MapStyleData, {"dataset": [1], "micro_batch_size": 1, "shuffle": "none"}, "shuffle is 'n"),
        (edp.MapStyleData, {"dataset": [1], "micro_batch_size": 1, "collate_fn": 3}, "collate_fn is 3"),
        (edp.MapStyleData, {"dataset": {"train": [1]}, "micro_batch_size": 1}, "dataset is a dict, whose"),
        (edp.MapStyleData, {"dataset": "/rows", "micro_batch_size": 1}, "or DataConfig a URL"),
        (edp.DataConfig, {"url": {"x": _HUGE}, "micro_batch_size": 1}, ", must be finite"),
    ],
    ids=str,
)  # fmt: skip
def test_config_value_of_another_kind_is_refused(make, options, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        make(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"name": name}, "name is ") for name in ("..", ".", " ", "a/b", "a\nb", 5)),
        ({"name": "é" * 128}, "of 256 bytes, must be at most 255"),
        ({"labels": {"team": 1}}, "labels is {'team': 1}, must be texts by name"),
        ({"storage_path": 5}, "storage_path is 5"),
        ({"config": [1]}, "config is a list"),
        ({"scaling": {"max_workers": 2}}, "scaling is a dict, must be a ScalingConfig"),
        ({"failure": 3}, "failure is a int"),
        ({"checkpoint": 500}, "checkpoint is a int"),
        ({"data": "x"}, "data is a str, must be a DataConfig or a MapStyleData"),
        ({"exact": "no"}, "exact is 'no', must be True or False"),
        ({"max_time_s": math.inf}, "max_time_s is inf"),
        ({"loggers": print}, "loggers is "),
        ({"loggers": [3]}, "loggers is "),
        ({"runtime_env": "x"}, "runtime_env is a str"),
        ({"train": lambda: None}, "train takes (), must be a function of one argument (ctx)"),
        ({"train": lambda ctx, other: None}, "train takes (ctx, other)"),
    ],
)
def test_trainer_argument_of_another_kind_is_refused(tmp_path, options, words):
    data = edp.MapStyleData(Points(), micro_batch_size=4)
    job = {
        "train": good,
        "name": "bad",
        "storage_path": str(tmp_path),
        "data": data,
        "max_steps": 1,
    }
    with pytest.raises(SpecError, match=re.escape(words)):
        edp.ElasticTrainer(**(job | options))


def test_trainer_takes_path_objects(tmp_path):
    data = edp.DataConfig(tmp_path / "rows", micro_batch_size=4)
    trainer = edp.ElasticTrainer(good, name="a b", storage_path=tmp_path, data=data, max_steps=1)
    assert (trainer.url, trainer.spec.data.urls) == (f"{tmp_path}/a b", (f"{tmp_path}/rows",))


def test_attach_finds_an_ended_run_by_a_path_object(tmp_path, monkeypatch):
    def connect(address):
        raise errors.ClusterError("no cluster")

    monkeypatch.setattr("elastic_dp.cluster.finding.connect", connect)
    result = trainer(tmp_path, good).fit(local=True)
    assert edp.attach(result.name, tmp_path).result() == result
    assert trainer(tmp_path, good, labels={"team": "a"}).start().status()["labels"] == {"team": "a"}


@pytest.mark.parametrize("field", ["micro_batch_size", "epochs"])
def test_data_config_size_of_zero_is_refused(field):
    with pytest.raises(SpecError, match=f"DataConfig.{field} is 0"):
        edp.DataConfig("x", **{"micro_batch_size": 1, field: 0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hang_timeout_s": 0}, ["hang_timeout_s is 0", "at least 1.0"]),
        ({"hang_timeout_s": "5"}, ["hang_timeout_s is '5'", "number"]),
        ({"compare_weights_every": 0}, ["compare_weights_every is 0", "at least 1"]),
        ({"compare_weights_every": 2.5}, ["compare_weights_every is 2.5", "whole number"]),
    ],
)
def test_failure_config_out_of_range_names_field_and_value(options, words):
    with pytest.raises(SpecError) as caught:
        edp.FailureConfig(**options)
    assert all(word in str(caught.value) for word in words), caught.value


class Others(Points):
    """As many, but not the same."""


def trainer(tmp_path, train, rows=192, points=Points, fingerprint="", **options):
    options.setdefault("max_steps", 4)
    return edp.ElasticTrainer(
        train,
        name="bad",
        storage_path=str(tmp_path),
        data=edp.MapStyleData(
            points(rows), micro_batch_size=4, seed=options.pop("seed", 0), fingerprint=fingerprint
        ),
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=options.pop("virtual", 2)),
        **options,
    )


def good(ctx):
    model = classifier()
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def test_start_without_shards_is_refused(tmp_path):
    with pytest.raises(errors.DataError, match=str(tmp_path)):
        edp.ElasticTrainer(
            good,
            data=edp.DataConfig(str(tmp_path), micro_batch_size=1),
            storage_path=str(tmp_path),
            max_steps=1,
        ).start()


def test_start_with_too_few_rows_for_a_global_batch_is_refused(tmp_path):
    with pytest.raises(errors.DataError, match="7 rows"):
        trainer(tmp_path, good, rows=7).start()


def test_train_function_that_cannot_be_pickled_is_refused(tmp_path):
    lock = threading.Lock()

    def train(ctx):
        with lock:
            good(ctx)

    with pytest.raises(SpecError, match="cannot be sent to workers"):
        trainer(tmp_path, train).start()


def good_with(ctx, *, steps):
    good(ctx)


class Trains:
    def __call__(self, ctx):
        good(ctx)

    def method(self, ctx):
        good(ctx)


@pytest.mark.parametrize(
    "train",
    [functools.partial(good_with, steps=3), Trains(), Trains().method, functools.partial(Trains())],
    ids=["partial", "object", "method", "partial of an object"],
)
def test_train_may_be_any_callable(tmp_path, train):
    _, sent = cloudpickle.loads(trainer(tmp_path, train)._pickle())
    assert trainer(tmp_path, sent).fit(local=True).step == 4


def test_trainer_without_a_limit_is_refused(tmp_path):
    with pytest.raises(SpecError, match="max_steps is None"):
        trainer(tmp_path, good, max_steps=None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_s": -1.0}, "every_s is -1.0"),
        ({"every": "often"}, "every is 'often', must be one of None, 'auto'"),
        ({"checkpoint_score_order": "best"}, "checkpoint_score_order is 'best'"),
    ],
)
def test_checkpoint_config_out_of_range_is_refused(options, words):
    with pytest.raises(SpecError, match=words):
        edp.CheckpointConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_user_errors": -1}, "max_user_errors is -1"),
        ({"max_out_of_memory": 0.5}, "max_out_of_memory is 0.5, must be a whole number"),
        ({"max_losses_of_micro_batch": 0}, "max_losses_of_micro_batch is 0"),
    ],
)
def test_failure_budget_out_of_range_is_refused(options, words):
    with pytest.raises(SpecError, match=words):
        edp.FailureConfig(**options)


def test_orphan_timeout_below_the_lease_is_refused():
    with pytest.raises(SpecError, match=r"orphan_timeout_s is 5.0, less than the lease \(10 s\)"):
        edp.FailureConfig(orphan_timeout_s=5.0)
    with pytest.raises(SpecError, match="orphan_timeout_s is 'never', must be a number"):
        edp.FailureConfig(orphan_timeout_s="never")
    assert edp.FailureConfig(heartbeat_timeout_s=1.0).orphan_timeout == 120.0


@pytest.mark.parametrize("local", [False, True])
def test_storage_path_that_cannot_be_written_is_refused(tmp_path, local):
    (tmp_path / "file").write_text("not a folder")
    trainer = edp.ElasticTrainer(
        lambda ctx: None,
        name="nowhere",
        storage_path=str(tmp_path / "file"),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        max_steps=1,
    )
    with pytest.raises(StorageError, match=r"cannot write .*Not a directory"):
        trainer.fit(local=local)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"seed": 1}, "seed"),
        ({"virtual": 4}, "virtual_workers"),
        ({"rows": 96}, "data"),
        ({"points": Others}, "data"),
        ({"fingerprint": "2"}, "data"),
    ],
)
def test_rerun_with_another_seed_data_or_virtual_workers_is_refused(tmp_path, other, word):
    first = trainer(tmp_path, good).fit(local=True)
    assert trainer(tmp_path, good).fit(local=True) == first  # the stored result
    with pytest.raises(RunMismatch, match=word):
        trainer(tmp_path, good, **other).fit(local=True)


@pytest.mark.parametrize(
    ("first", "again", "steps"),
    [
        ({"epochs": 1}, {"epochs": 1}, 24),
        ({"epochs": 1}, {"epochs": 2}, 48),
        ({"epochs": 2}, {"epochs": 1}, 48),
        ({"epochs": 1}, {"epochs": 2, "max_steps": 24}, 24),
        ({"max_steps": 4}, {"max_steps": 6}, 6),
        ({"max_steps": 4}, {"max_steps": None, "epochs": 1}, 24),
        ({"max_steps": 30, "stop_at": 3}, {"max_steps": 30}, 3),
        ({"max_steps": 30, "stop_at": 3}, {"max_steps": 31}, 31),
        ({"max_steps": 4, "max_time_s": 50}, {"max_steps": 4, "max_time_s": 60}, 4),
        ({"max_steps": 40, "max_time_s": 0.001}, {"max_steps": 40, "max_time_s": 60}, 40),
    ],
)
def test_rerun_with_a_raised_limit_goes_on(tmp_path, first, again, steps):
    def fit(epochs=None, stop_at=None, **limits):
        def train(ctx):
            model = classifier()
            for step in ctx.steps(model, adamw(model), cross_entropy):
                if step.number == stop_at:
                    ctx.stop("enough")

        data = edp.MapStyleData(Points(), micro_batch_size=4, epochs=epochs)
        scaling = edp.ScalingConfig(max_workers=2)
        at = {"name": "limits", "storage_path": str(tmp_path)}
        return edp.ElasticTrainer(train, data=data, scaling=scaling, **at, **limits).fit(local=True)

    before = fit(**first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = fit(**again)
    others = first | {"stop_at": 0} != again | {"stop_at": 0}
    told = [str(w.message) for w in caught if "under other limits" in str(w.message)]
    assert len(told) == (after == before and others)
    assert after.step == steps
    assert (after == before) == (before.step == steps)


def test_rerun_keeps_the_virtual_workers_of_the_first_start(tmp_path):
    def fit(workers, steps):
        scaling = edp.ScalingConfig(max_workers=workers)
        data = edp.MapStyleData(Points(), micro_batch_size=4)
        return edp.ElasticTrainer(
            good,
            data=data,
            name="v",
            storage_path=str(tmp_path),
            scaling=scaling,
            max_steps=steps,
        ).fit(local=True)

    first = fit(2, 4)
    assert fit(1, 4) == first  # the stored result
    assert (
        fit(1, 6).weights_sha256
        == trainer(tmp_path, good, max_steps=6).fit(local=True).weights_sha256
    )
    with pytest.raises(RunMismatch, match=r"max_workers is 3, .* virtual_workers=2"):
        fit(3, 4)


def test_scale_out_of_bounds_is_refused(tmp_path):
    spec = spec_of(min_workers=2)
    run = edp.Run(spec, str(tmp_path), controller=object())
    run._ask = lambda *_: {"size": 8, "min_workers": 3}  # as an operator has set it since
    with pytest.raises(SpecError, match=r"size is 2, must be a whole number within 3\.\.8"):
        run.scale(2)
    with pytest.raises(SpecError, match=r"size is None, must be a whole number"):
        run.scale()
    for least in (0, 9, True):
        with pytest.raises(SpecError, match=rf"min_workers is {least}, must .* within 1\.\.8"):
            run.scale(4, min_workers=least)
    with pytest.raises(SpecError, match=r"size is 4, must be a whole number within 5\.\.8"):
        run.scale(4, min_workers=5)


def fails(
    kind,
    words,
    loss_fn=cross_entropy,
    model=classifier,
    body=None,
    optimizer=adamw,
    scheduler=lambda o: None,
    **options,
):
    def train(ctx):
        m = model()
        o = optimizer(m)
        for step in ctx.steps(m, o, loss_fn, scheduler=scheduler(o), **options):
            if body is not None and body(m, step, ctx) == "break":
                break

    with pytest.raises(kind) as caught:
        local(spec_of(), train)
    for word in words:
        assert word in str(caught.value), caught.value


def looping(loss_fn=cross_entropy, model=classifier, body=lambda step: False):
    """A train function whose loop breaks where `body` says so."""

    def train(ctx):
        m = model()
        for step in ctx.steps(m, adamw(m), loss_fn):
            if body(step):
                break

    return train


def not_finite(m, b):
    loss = cross_entropy(m, b)
    return loss * float("nan") if 17 in b["i"] else loss


def synchronised():
    return nn.Sequential(nn.Linear(16, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4))


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
    outcome, run = group(spec_of(workers=2, min_workers=2), train)
    error = error_of(outcome)
    assert (type(error), str(error)) == (kind, str(alone.value))
    assert told(run) == 1


def test_error_of_all_workers_at_one_step_is_recorded_once():
    def fails_at_three(step):
        if step.number == 3:
            raise KeyError("both of them")

    outcome, run = group(spec_of(workers=2, min_workers=2), looping(body=fails_at_three))
    error = error_of(outcome)
    assert type(error) is UserCodeError and error.description == "KeyError: 'both of them'"
    assert error.remote_traceback.count('raise KeyError("both of them")') == 1
    assert told(run) == 1


def told(run):
    """How often its record says that it failed."""
    return sum(line.get("command") == "FailRun" for line in lines_of(run))


def test_train_without_a_loop_is_refused():
    with pytest.raises(LoopError, match=r"ctx\.steps"):
        local(spec_of(), lambda ctx: None)


def test_break_out_of_the_loop_without_stop_is_refused():
    fails(
        LoopError,
        ["after step 3", "ctx.stop"],
        body=lambda m, s, c: "break" if s.number == 3 else 0,
    )


def test_loss_that_is_no_real_scalar_is_refused():
    def loss_fn(m, b):
        return nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none")

    fails(LossError, ["shape (4,)", "scalar"], loss_fn)
    fails(LossError, ["float"], lambda m, b: 1.0)
    fails(LossError, ["complex64", "real"], lambda m, b: cross_entropy(m, b) * 1j)


def test_loss_without_a_gradient_is_refused():
    """Otherwise nothing would be learnt, silently."""
    words = ["step 1", "virtual worker 0", "no gradient", "weight 0"]
    fails(LossError, words, lambda m, b: cross_entropy(m, b).detach())
    fails(LossError, words, model=lambda: classifier().requires_grad_(False))


def test_error_of_loss_fn_is_raised_though_train_swallows_it():
    def train(ctx):
        model = classifier()
        with contextlib.suppress(Exception):
            for _ in ctx.steps(model, adamw(model), lambda m, b: {}["missing key"]):
                pass

    with pytest.raises(KeyError, match="missing key"):
        local(spec_of(), train)
    outcome, _ = group(spec_of(workers=1), train)
    assert outcome.error == "KeyError: 'missing key'"


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ((None,), ["weight", "NoneType"]),
        ((1e31,), ["weight of a micro-batch is 1e+31", "at most 1e+30"]),
        ((_HUGE,), ["weight of a micro-batch is a _Huge"]),
        ((1e-32,), ["add up to 8e-32", "multiply all"]),
        (({"accuracy": 1.0},), ["weight", "dict", "(loss, weight, metrics)"]),
        ((4, [1.0]), ["metrics", "list", "mapping"]),
        ((4, {"accuracy": torch.ones(2)}), ["'accuracy'", "shape (2,)", "number"]),
        ((4, {"accuracy": None}), ["'accuracy'", "NoneType"]),
        ((4, {"accuracy": "0.5"}), ["'accuracy'", "str"]),
    ],
    ids=str,
)
def test_loss_fn_with_a_bad_weight_or_metrics_is_refused(beside, words):
    fails(LossError, words, lambda m, b: (cross_entropy(m, b), *beside))


def test_loop_option_of_another_kind_is_refused():
    fails(SpecError, ["clip_norm is '1'", "number"], clip_norm="1")
    fails(SpecError, ["clip_norm is nan"], clip_norm=float("nan"))
    fails(SpecError, ["precision is 'bfloat16'", "'bf16'"], precision="bfloat16")
    fails(ModelError, ["NoneType as optimizer"], optimizer=lambda m: None)
    fails(ModelError, ["Linear as optimizer"], optimizer=lambda m: m[0])

    fails(SpecError, ["loss_fn is a NoneType"], loss_fn=None)
    fails(SpecError, ["loss_fn takes (m)", "(model, batch)"], loss_fn=lambda m: m)
    fails(SpecError, ["state is a list", "dict"], state=[classifier()])


def test_optimizer_that_does_not_fit_is_refused():
    """Before the first step: nothing may fail between its commit and its end."""

    class Closure(torch.optim.SGD):
        def step(self, closure):
            closure()

    fails(ModelError, ["Closure", "'closure'"], optimizer=lambda m: Closure(m.parameters()))
    sparse = torch.optim.SparseAdam
    fails(ModelError, ["SparseAdam"], optimizer=lambda m: sparse(m.parameters()))


def test_complex_parameter_is_refused():
    def model():
        model = classifier()
        model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        return model

    fails(ModelError, ["model.phase", "complex64", "view_as_real"], model=model)


class Remembers(nn.Module):
    """Makes a buffer of its first rows, in the first forward pass."""

    def __init__(self, known):
        super().__init__()
        self.inner = classifier()
        if known:
            self.register_buffer("mean", None)

    def forward(self, x):
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", x.mean())
        return self.inner(x) + self.mean


GROWS = {  # what the error names: what a body does, and the model
    "late": (lambda m, s, c: m.register_buffer("late", torch.ones(3)), classifier),
    "5": (lambda m, s, c: m.add_module("5", nn.Linear(4, 4)), classifier),
    "4": (lambda m, s, c: m.__delattr__("4"), classifier),
    "0.extra": (lambda m, s, c: m[0].register_parameter("extra", m[0].bias), classifier),
    "mean": (None, lambda: Remembers(known=True)),
    "mean ": (None, lambda: Remembers(known=False)),
}


@pytest.mark.parametrize("name", GROWS)
def test_model_that_grows_in_the_loop_is_refused(name):
    """A joiner would lack it, and what a forward pass makes of its rows is another with another number of workers."""
    body, model = GROWS[name]
    fails(LoopError, [f"model.{name.strip()} was added", "before the loop"], model=model, body=body)


def test_scheduler_that_does_not_fit_is_refused():
    """Before the first step: after it, the model would be ahead of its scheduler."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    words = ["ReduceLROnPlateau", "metrics", "scheduler.step(step.loss)", 'state={"scheduler"']
    fails(SpecError, words, scheduler=plateau)
    fails(SpecError, ["object", "no step()"], scheduler=lambda o: object())


def test_lazy_module_without_a_shape_is_refused():
    words = ["model.0.weight has no shape yet", "before the optimizer"]
    fails(ModelError, words, model=lambda: nn.Sequential(nn.LazyLinear(4)))


def test_model_on_the_meta_device_is_refused():
    def on_meta():
        model = classifier()
        model[4].to("meta")
        return model

    fails(ModelError, ["model.4.weight", "meta device", "to_empty"], model=on_meta)


def test_stop_iteration_in_loss_fn_is_a_loss_error():
    """In a generator StopIteration would be another error, or the loop's end."""
    fails(LossError, ["loss function raised StopIteration", "next()"], lambda m, b: next(iter(())))


def test_logger_that_raises_is_warned_of_and_called_again(tmp_path):
    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            ctx.log({"loss": step.loss})

    seen = []

    def away(record):
        seen.append(record["step"])
        raise OSError("the service is away")

    job = trainer(tmp_path, train, loggers=[away, lambda record: seen.append(-record["step"])])
    with pytest.warns(UserWarning, match=r"'away' raised OSError: the service is away"):
        assert job.fit(local=True).step == 4
    assert seen == [1, -1, 2, -2, 3, -3, 4, -4]


def test_metrics_at_the_limits_of_floats_are_added():
    def loss_fn(m, b):
        first = float(b["i"][0])
        return cross_entropy(m, b), 4, {"large": 1e308, "both": math.copysign(math.inf, first - 90)}

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), loss_fn):
            ctx.log(step.metrics)

    assert [list(map(repr, run.values())) for run in local(spec_of(steps=1), train).logged] == [
        ["1", "inf", "nan"]
    ]


def test_log_of_no_mapping_is_refused():
    fails(LoopError, ["ctx.log got a int", "mapping"], body=lambda m, s, c: c.log(3))


def test_log_of_a_reserved_name_is_refused():
    """Another time in a line would cost a controller that takes over its place in what was recorded."""
    for name in ("time", "event", "command"):
        fails(
            LoopError,
            [f"named '{name}'", "another name"],
            body=lambda m, s, c, n=name: c.log({n: 1}),
        )
    fails(LoopError, ["named 'step'", "step 1"], body=lambda m, s, c: c.log({"step": 7}))


def test_log_of_any_value_is_recorded_as_json():
    """The controller gets no tensor that it could not load, no class of the user's, no key that it could not write."""

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            odd = {("a", 1): {2: [torch.ones(1), np.ones(2)]}, "lock": threading.Lock()}
            ctx.log(odd | {"step": step.number, "nan": float("nan")})

    run = local(spec_of(steps=1), train)
    assert json.loads(json.dumps(run.logged))[0]["('a', 1)"] == {"2": [1.0, [1.0, 1.0]]}
    assert run.logged[0]["lock"].startswith("<unlocked _thread.lock")


@pytest.mark.parametrize("run", [local, group], ids=["local", "group"])
def test_gradient_that_is_not_finite_is_never_applied(run):
    """Every loss is finite, but the slope of a root at 0 is not; and one so steep that only the sum is too large."""

    def root(m, b):
        return (m(b["x"]) * 0.0).abs().sqrt().mean()

    def steep(m, b):
        slope = 1e38 * (m[0].bias.sum() - m[0].bias.sum().detach())
        return cross_entropy(m, b) + slope, 40.0  # ten times the rows

    for loss_fn in (root, steep):

        def train(ctx, loss_fn=loss_fn):
            m = classifier()
            for _ in ctx.steps(m, adamw(m), loss_fn):
                raise AssertionError("it was applied")

        if run is local:
            with pytest.raises(LossError, match="gradient of step 1 is not finite"):
                local(spec_of(), train)
        else:
            outcome, _ = group(spec_of(), train)
            assert outcome.error.startswith("LossError: the gradient of step 1 is not finite")


def test_nan_loss_names_step_virtual_worker_and_rows():
    fails(LossError, ["step ", "virtual worker ", "17"], not_finite)


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_body_that_writes_a_parameter_or_buffer_in_place_is_refused(what):
    def body(m, step, ctx):
        with torch.no_grad():
            (m[0].weight if what == "parameter" else m[1].running_mean).mul_(0.5)

    def model():
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    name = "0.weight" if what == "parameter" else "1.running_mean"
    fails(LoopError, [name, "state="], model=model, body=body)


WRITES = {  # to the model of `test_body_that_replaces_or_resets_state_is_refused`: what a body may do, and what the error names
    "data": (lambda m, o: [p.data.mul_(0.5) for p in m.parameters()], "wrote to "),
    "one data": (lambda m, o: m[3].bias.data.mul_(0.5), "wrote to '3.bias'"),
    "new data": (lambda m, o: setattr(m[0].bias, "data", m[0].bias * 0.5), "wrote to '0.bias'"),
    "parameter": (lambda m, o: setattr(m[0], "bias", nn.Parameter(m[0].bias * 0.5)), "'0.bias'"),
    "module": (lambda m, o: setattr(m, "3", nn.Linear(8, 4)), "'3'"),
    "state": (lambda m, o: o.state[m[0].weight]["exp_avg"].zero_(), "state of '0.weight'"),
    "reset": (lambda m, o: o.state.clear(), "the optimizer's state of "),
    "step": (lambda m, o: o.step(), r"optimizer.step\(\)"),
}


@pytest.mark.parametrize("write", WRITES)
def test_body_that_replaces_or_resets_state_is_refused(write):
    """Also those that raise no tensor's version. Whoever takes a step over would have them twice."""

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
    """A joiner could not know of it. The same error on every fleet, at the step that did it."""

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
        outcome, _ = group(spec_of(workers=1), train)
        assert outcome.error.startswith("LoopError: the body of the loop over ctx.steps changed")


def test_optimizer_with_another_order_on_one_worker_is_refused():
    """As of a set of parameters: optimizer state travels by place, and two of these have one shape."""

    def train(ctx):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        parameters = list(model.parameters())
        if not ctx.is_source:
            parameters[:4] = parameters[2:4] + parameters[:2]
        for _ in ctx.steps(model, torch.optim.AdamW(parameters), cross_entropy):
            pass

    outcome, _ = group(spec_of(workers=2, min_workers=2), train)
    assert outcome.error is not None
    assert "order in its optimizer, differ" in outcome.error
    assert "'in group 0 of the optimizer 1.weight', not" in outcome.error


def test_sync_batch_norm_is_refused():
    fails(ModelError, ["model.1", "SyncBatchNorm", "BatchNorm"], model=synchronised)


def test_sparse_gradients_and_lbfgs_are_refused():
    fails(
        ModelError,
        ["sparse=False"],
        model=lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
    )

    def rarely_sparse(m, b):
        looked_up = nn.functional.embedding(b["y"], m[0].weight, sparse=True)
        return cross_entropy(m[1], b) + (looked_up.sum() if 17 in b["i"] else 0.0)

    fails(
        ModelError,
        ["model.0.weight", "sparse=False"],
        rarely_sparse,
        model=lambda: nn.ModuleList([nn.Embedding(4, 3), classifier()]),
    )
    fails(ModelError, ["LBFGS"], optimizer=lambda m: torch.optim.LBFGS(m.parameters()))


def test_optimizer_around_one_that_does_not_fit_is_refused():
    class Around(torch.optim.SGD):
        def __init__(self, outer, inner):
            super().__init__(outer.param_groups, lr=0.1)
            self.inner = inner

    words = ["optimizer.inner", "not a parameter of"]
    fails(ModelError, words, optimizer=lambda m: Around(adamw(m), adamw(classifier())))
    words = ["optimizer.inner", "LBFGS"]
    fails(
        ModelError,
        words,
        optimizer=lambda m: Around(adamw(m), torch.optim.LBFGS(m.parameters())),
    )


def test_optimizer_of_another_model_is_refused():
    fails(ModelError, ["not a parameter of"], optimizer=lambda m: adamw(classifier()))


def test_state_that_cannot_be_sent_is_refused_at_the_start():
    """Said at the start, in local mode, too: later it would end the run of whoever gives it to a joiner."""

    class Held:
        def state_dict(self):
            return {"count": 1, "held": [{"lock": threading.Lock()}]}

        load_state_dict = print

    def train(ctx):
        model = classifier()
        for _ in ctx.steps(model, adamw(model), cross_entropy, state={"mine": Held()}):
            pass

    words = r"state\['mine'\].state_dict\(\) cannot be sent to a worker that joins: held.0.lock is"
    with pytest.raises(SpecError, match=words):
        local(spec_of(), train)


def test_second_loop_over_steps_is_refused():
    def train(ctx):
        good(ctx)
        good(ctx)

    with pytest.raises(LoopError, match="twice"):
        local(spec_of(), train)


def test_evaluate_argument_of_another_kind_is_refused():
    data = edp.MapStyleData(Points(8), micro_batch_size=4)
    fails(SpecError, ["fn is a NoneType"], body=lambda m, s, c: c.evaluate(None, data))
    fails(SpecError, ["data is a NoneType"], body=lambda m, s, c: c.evaluate(cross_entropy, None))
    wrong = ["str as model"]
    fails(ModelError, wrong, body=lambda m, s, c: c.evaluate(cross_entropy, data, model="m"))


def test_evaluate_before_the_loop_is_refused():
    def train(ctx):
        ctx.evaluate(cross_entropy, edp.MapStyleData(Points(8), micro_batch_size=4))

    with pytest.raises(LoopError, match=r"ctx\.evaluate"):
        local(spec_of(), train)


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
