"""Each mistake a user can make is a typed error that names the field and the way out, before anything starts."""

import threading

import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp import errors
from elastic_dp.errors import LoopError, LossError, ModelError, RunMismatch, SpecError
from tests.runs import Points, group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


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
        ({"resources_per_worker": {"GPU": -1}}, ["resources_per_worker['GPU'] is -1"]),
    ],
)
def test_scaling(options, words):
    with pytest.raises(SpecError) as caught:
        edp.ScalingConfig(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("field", ["micro_batch_size", "epochs"])
def test_zero_sizes_of_data(field):
    with pytest.raises(SpecError, match=f"DataConfig.{field} is 0"):
        edp.DataConfig("x", **{"micro_batch_size": 1, field: 0})


def trainer(tmp_path, train, rows=192, **options):
    options.setdefault("max_steps", 4)
    return edp.ElasticTrainer(
        train,
        name="bad",
        storage_path=str(tmp_path),
        data=edp.MapStyleData(Points(rows), micro_batch_size=4, seed=options.pop("seed", 0)),
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=options.pop("virtual", 2)),
        **options,
    )


def good(ctx):
    model = classifier()
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def test_data_with_no_shards(tmp_path):
    with pytest.raises(errors.DataError, match=str(tmp_path)):
        edp.ElasticTrainer(
            good,
            data=edp.DataConfig(str(tmp_path), micro_batch_size=1),
            storage_path=str(tmp_path),
            max_steps=1,
        ).start()


def test_too_few_rows_for_one_global_batch(tmp_path):
    with pytest.raises(errors.DataError, match="7 rows"):
        trainer(tmp_path, good, rows=7).start()


def test_a_function_that_cannot_be_pickled(tmp_path):
    lock = threading.Lock()

    def train(ctx):
        with lock:
            good(ctx)

    with pytest.raises(SpecError, match="cannot be sent to workers"):
        trainer(tmp_path, train).start()


def test_a_run_that_would_never_end(tmp_path):
    with pytest.raises(SpecError, match="max_steps is None"):
        trainer(tmp_path, good, max_steps=None)


@pytest.mark.parametrize(
    ("other", "word"),
    [({"seed": 1}, "seed"), ({"virtual": 4}, "virtual_workers"), ({"rows": 96}, "data")],
)
def test_a_rerun_that_differs(tmp_path, other, word):
    first = trainer(tmp_path, good).fit(local=True)
    assert trainer(tmp_path, good).fit(local=True) == first  # the stored result
    with pytest.raises(RunMismatch, match=word):
        trainer(tmp_path, good, **other).fit(local=True)


def fails(kind, words, loss_fn=cross_entropy, model=classifier, body=None, optimizer=adamw):
    def train(ctx):
        m = model()
        for step in ctx.steps(m, optimizer(m), loss_fn):
            if body is not None and body(m, step, ctx) == "break":
                break

    with pytest.raises(kind) as caught:
        local(spec_of(), train)
    for word in words:
        assert word in str(caught.value), caught.value


def test_no_loop():
    with pytest.raises(LoopError, match=r"ctx\.steps"):
        local(spec_of(), lambda ctx: None)


def test_a_lone_break():
    fails(
        LoopError,
        ["after step 3", "ctx.stop"],
        body=lambda m, s, c: "break" if s.number == 3 else 0,
    )


def test_a_loss_that_is_no_scalar():
    def loss_fn(m, b):
        return nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none")

    fails(LossError, ["shape (4,)", "scalar"], loss_fn)
    fails(LossError, ["float"], lambda m, b: 1.0)


@pytest.mark.parametrize("run", [local, group], ids=["local", "group"])
def test_a_gradient_that_is_not_finite_is_never_applied(run):
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


def test_a_loss_that_is_nan_names_step_virtual_worker_and_rows():
    def loss_fn(m, b):
        loss = cross_entropy(m, b)
        return loss * float("nan") if 17 in b["i"] else loss

    fails(LossError, ["step ", "virtual worker ", "17"], loss_fn)


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_writing_the_model_in_the_body(what):
    def body(m, step, ctx):
        with torch.no_grad():
            (m[0].weight if what == "parameter" else m[1].running_mean).mul_(0.5)

    def model():
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    name = "0.weight" if what == "parameter" else "1.running_mean"
    fails(LoopError, [name, "state="], model=model, body=body)


def test_sync_batch_norm():
    def model():
        return nn.Sequential(nn.Linear(16, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4))

    fails(ModelError, ["model.1", "SyncBatchNorm", "BatchNorm"], model=model)


def test_sparse_gradients_and_lbfgs():
    fails(
        ModelError,
        ["sparse=False"],
        model=lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
    )
    fails(ModelError, ["LBFGS"], optimizer=lambda m: torch.optim.LBFGS(m.parameters()))


def test_an_optimizer_of_another_model():
    fails(ModelError, ["not a parameter of"], optimizer=lambda m: adamw(classifier()))


def test_steps_twice():
    def train(ctx):
        good(ctx)
        good(ctx)

    with pytest.raises(LoopError, match="twice"):
        local(spec_of(), train)


def test_evaluating_outside_of_the_loop():
    def train(ctx):
        ctx.evaluate(cross_entropy, edp.MapStyleData(Points(8), micro_batch_size=4))

    with pytest.raises(LoopError, match=r"ctx\.evaluate"):
        local(spec_of(), train)


def test_every_error_pickles():
    import pickle

    for error in (
        errors.UserCodeError("w1", "KeyError: 'x'", "Traceback…"),
        errors.LossError("the loss is NaN"),
        errors.RunMismatch("seed is 1"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert type(again) is type(error)
