"""What is known of the optimizers of torch.optim is true of this torch."""

import torch

from elastic_dp.train.exactness.torch_optimizers import may_write_to_gradients
from tests.runs import local, spec_of
from tests.train.exactness.test_clipped_steps import CASES, shapes
from tests.train.jobs import classifier, cross_entropy

NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True}


def writes(kind, options, dtype=torch.float32):
    """Whether three steps change a gradient, and whether that is known."""
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes(kind)]
    optimizer = kind(parameters, **options)
    found = False
    for _ in range(3):
        gradients = [torch.randn(p.shape).to(dtype) for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        found |= not all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))
    return found, may_write_to_gradients(kind, optimizer.param_groups)


def test_optimizers_that_write_to_gradients_are_known():
    for name, kind, options, dtype in CASES:
        found, known = writes(kind, options, dtype)
        assert known or not found, name


def test_nesterov_momentum_of_many_tensors_together_writes_to_gradients():
    assert writes(torch.optim.SGD, NESTEROV | {"foreach": True}) == (True, True)
    assert writes(torch.optim.SGD, NESTEROV) == (False, False)


def test_norm_that_is_read_after_the_update_is_that_of_the_gradient():
    def norms(foreach):
        found = []

        def train(ctx):
            model = classifier()
            optimizer = torch.optim.SGD(model.parameters(), foreach=foreach, **NESTEROV)
            for step in ctx.steps(model, optimizer, cross_entropy):
                found.append(step.grad_norm)

        local(spec_of(steps=3), train)
        return found

    assert norms(True) == norms(False)
