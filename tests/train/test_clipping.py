"""Clipping by the norm over units. A run that an earlier version began keeps the norm that it began
with."""

import dataclasses

import pytest
import torch

from elastic_dp.config import CheckpointConfig
from elastic_dp.train.state import train_state
from elastic_dp.train.state.train_state import PARAMETERS, TrainState
from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, loop


def clipped(ctx):
    model = classifier()
    loop(ctx, model, adamw(model), clip_norm=0.5)


def job(steps):
    return dataclasses.replace(spec_of(steps=steps), checkpoint=CheckpointConfig(every_steps=6))


def as_an_earlier_version(patch):
    """Clips over whole parameters, and writes states that do not say so."""
    tree = TrainState.tree

    def without_norm(self, *arguments, **options):
        made = tree(self, *arguments, **options)
        del made["step"]["norm_over"]
        return made

    def begin(self):
        self.norm_over = PARAMETERS
        after_init(self)

    after_init = TrainState.__post_init__
    patch.setattr(train_state.TrainState, "__post_init__", begin)
    patch.setattr(train_state.TrainState, "tree", without_norm)


def test_run_begun_by_an_earlier_version_keeps_its_norm(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        as_an_earlier_version(patch)
        earlier = local(job(18), clipped).digest
        local(job(6), clipped, url=str(tmp_path))
    assert local(job(18), clipped).digest != earlier  # else the test shows nothing
    local(job(12), clipped, url=str(tmp_path))
    assert local(job(18), clipped, url=str(tmp_path)).digest == earlier  # and passes it on


def test_clipped_gradients_have_the_norm_asked_for_and_report_the_one_before():
    norms = []

    def train(ctx):
        model = classifier()
        optimizer = adamw(model)

        def measure(optimizer, args, kwargs):
            grads = [p.grad for p in model.parameters()]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))

        optimizer.register_step_pre_hook(measure)
        for step in ctx.steps(model, optimizer, cross_entropy, clip_norm=0.01):
            norms.append(step.grad_norm)

    local(spec_of(steps=1), train)
    after, before = norms
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
