"""Loss functions that give no loss, none to learn from, or one that is not finite."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from elastic_dp.errors import (
    LossError,
)
from tests.bad_input.jobs import HUGE, fails, not_finite
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


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
        ((HUGE,), ["weight of a micro-batch is a _Huge"]),
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


def test_stop_iteration_in_loss_fn_is_a_loss_error():
    """In a generator StopIteration would be another error, or the loop's end."""
    fails(LossError, ["loss function raised StopIteration", "next()"], lambda m, b: next(iter(())))


@pytest.mark.parametrize("run", ["local", "group", "sharded"])
def test_gradient_that_is_not_finite_is_never_applied(run):
    """Every loss is finite, but the slope of a root at 0 is not; and one so steep that only the sum
    is too large."""

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

        if run == "local":
            with pytest.raises(LossError, match="gradient of step 1 is not finite"):
                local(spec_of(), train)
        else:
            sharding = "optimizer" if run == "sharded" else None
            outcome, _ = group(dataclasses.replace(spec_of(), sharding=sharding), train)
            assert outcome.error.startswith("LossError: the gradient of step 1 is not finite")


def test_nan_loss_names_step_virtual_worker_and_rows():
    fails(LossError, ["step ", "virtual worker ", "17"], not_finite)
