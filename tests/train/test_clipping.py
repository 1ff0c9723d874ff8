"""Clipping by the norm over units."""

from types import SimpleNamespace

import pytest
import torch

from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


def test_clipped_gradients_have_the_norm_asked_for_and_report_the_one_before():
    norms = SimpleNamespace(found=[])

    def train(ctx):
        model = classifier()
        optimizer = adamw(model)

        def measure(optimizer, args, kwargs):
            grads = [p.grad for p in model.parameters()]
            norms.found.append(float(torch.nn.utils.get_total_norm(grads)))

        optimizer.register_step_pre_hook(measure)
        for step in ctx.steps(model, optimizer, cross_entropy, clip_norm=0.01):
            norms.found.append(step.grad_norm)

    local(spec_of(steps=1), train)
    after, before = norms.found
    assert after == pytest.approx(0.01, rel=1e-3) and before > 0.02


def test_norm_is_the_same_number_with_and_without_clipping():
    """The norm is added over units in both, whoever has which gradients."""

    def norms(clip_norm):
        found = []

        def train(ctx):
            model = classifier()
            for step in ctx.steps(model, adamw(model), cross_entropy, clip_norm=clip_norm):
                found.append(step.grad_norm)

        local(spec_of(steps=12), train)
        return found

    assert norms(None) == norms(1e9)
