"""Loss functions that give no loss, none to learn from, or one that is not finite."""

import contextlib
import dataclasses

import pytest

from elastic_dp.errors import (
    LossError,
)
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


def test_error_of_loss_fn_is_raised_though_train_swallows_it():
    def train(ctx):
        model = classifier()
        with contextlib.suppress(Exception):
            for _ in ctx.steps(model, adamw(model), lambda m, b: {}["missing key"]):
                pass

    with pytest.raises(KeyError, match="missing key"):
        local(spec_of(), train)
    outcome, _ = group(spec_of(workers=1), train, fails=True)
    assert outcome.error == "KeyError: 'missing key'"


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
            outcome, _ = group(dataclasses.replace(spec_of(), sharding=sharding), train, fails=True)
            assert outcome.error.startswith("LossError: the gradient of step 1 is not finite")
