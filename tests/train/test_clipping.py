"""Clipping by the norm over units, and by value."""

from types import SimpleNamespace

import pytest
import torch

from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


class WithScalar(torch.nn.Module):
    """A parameter without dimensions, and one in fp64, in which the norm is then."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.7))
        self.layers, self.shift = classifier(), torch.nn.Parameter(torch.zeros(1).double())

    def forward(self, x):
        return self.layers(x) * self.scale + self.shift


def gradients_of(make=classifier, **options):
    """The gradients that the optimizer gets in the first step, and the norm of the step."""
    found = SimpleNamespace()

    def train(ctx):
        model = make()
        optimizer = adamw(model)

        def look(optimizer, args, kwargs):
            found.gradients = [p.grad.clone() for p in model.parameters()]

        optimizer.register_step_pre_hook(look)
        for step in ctx.steps(model, optimizer, cross_entropy, **options):
            found.norm = step.grad_norm

    local(spec_of(steps=1), train)
    return found.gradients, found.norm


def test_clipped_gradients_are_those_of_torch_and_the_norm_is_that_before():
    whole, before = gradients_of()
    assert float(torch.nn.utils.get_total_norm(whole)) == pytest.approx(before) and before > 0.02
    by_norm, of_norm = gradients_of(clip_norm=0.01)
    assert float(torch.nn.utils.get_total_norm(by_norm)) == pytest.approx(0.01, rel=1e-3)
    by_value, of_value = gradients_of(clip_value=0.01)
    assert of_norm == of_value == before
    for gradient, clipped in zip(whole, by_value, strict=True):
        assert torch.equal(clipped, gradient.clamp(-0.01, 0.01))
    assert not all(map(torch.equal, whole, by_value))


def test_parameter_without_dimensions_is_clipped_as_torch_does():
    """In fp64, where fp32 is the precision for elements of other parameters."""

    def clipped(gradient, norm):
        torch._foreach_mul_([gradient], norm / (torch.tensor(before, dtype=torch.double) + 1e-6))
        return gradient

    whole, before = gradients_of(WithScalar)
    norms = [i / 1000 for i in range(1, 30)]
    pairs = [(clipped(whole[0].clone(), n), clipped(whole[0].view(1).clone(), n)) for n in norms]
    clip_norm = next(n for n, (one, other) in zip(norms, pairs, strict=True) if one != other)
    found, _ = gradients_of(WithScalar, clip_norm=clip_norm)
    assert all(map(torch.equal, found, [clipped(gradient, clip_norm) for gradient in whole]))
