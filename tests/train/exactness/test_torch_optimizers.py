"""What is known of the optimizers of torch.optim is true of this torch."""

import itertools

import pytest
import torch
from torch import optim

from elastic_dp.extensions.sharding.elementwise_updates import (
    parameters_to_keep_whole,
    updates_equal_in_pieces,
)
from elastic_dp.train.master_weights import may_write_to_gradients
from tests.runs import local, spec_of
from tests.train.jobs import classifier, loop

VARIANTS = {
    optim.SGD: (
        {},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    optim.Adam: ({}, {"amsgrad": True, "weight_decay": 0.01}),
    optim.AdamW: ({}, {"amsgrad": True, "maximize": True}),
    optim.NAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    optim.RAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    optim.Adamax: ({}, {"weight_decay": 0.01}),
    optim.Adagrad: ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    optim.Adadelta: ({}, {"weight_decay": 0.01}),
    optim.RMSprop: ({}, {"centered": True, "momentum": 0.9}),
    optim.Rprop: ({},),
    optim.ASGD: ({}, {"t0": 1.0, "weight_decay": 0.01}),
    optim.Adafactor: ({},),
    optim.Muon: ({}, {"nesterov": False}),
}
LR = {optim.SGD: 0.1, optim.Adadelta: 1.0}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def cases():
    """Yields (name, kind, options, dtype)."""
    for (kind, variants), dtype in itertools.product(
        VARIANTS.items(), (torch.float32, torch.bfloat16)
    ):
        ways = [{"foreach": False}, {"foreach": True}]
        if kind is optim.Muon:
            ways = [{}]
        elif kind in FUSED and (kind, dtype) != (optim.SGD, torch.bfloat16):
            # That one is refused (steps_arguments.py). With momentum it also reads beyond tensors.
            ways.append({"fused": True})
        for options, way in itertools.product(variants, ways):
            options = {"lr": LR.get(kind, 0.01)} | options | way
            yield f"{kind.__name__} {options} {dtype}", kind, options, dtype


CASES = list(cases())


def shapes(kind):
    """Return shapes of parameters: of one unit and of several, odd and even. Muon takes matrices
    alone."""
    return [(70, 33), (1, 5)] if kind is optim.Muon else [(70, 33), (129,), (64, 2), (1,)]


def test_cases_have_every_optimizer_of_torch_that_updates_dense_gradients():
    every = {
        kind
        for kind in vars(optim).values()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    # LBFGS calls a closure; SparseAdam takes sparse gradients, which are refused.
    assert every - {optim.Optimizer, optim.LBFGS, optim.SparseAdam} == set(VARIANTS)


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
    return found, may_write_to_gradients(optimizer)


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
            loop(ctx, model, optimizer, body=lambda step: found.append(step.grad_norm))

        local(spec_of(steps=3), train)
        return found

    assert norms(True) == norms(False)


CPU = torch.device("cpu")


def test_probe_cuts_adamw_in_fp32():
    assert updates_equal_in_pieces(torch.optim.AdamW, {"lr": 0.01}, torch.float32, CPU)


def test_probe_keeps_a_parameter_whole_whose_last_elements_round_otherwise(monkeypatch):
    """A vectorized kernel does so whose scalar tail rounds in another way."""

    class Tail(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                p[-1:].mul_(1 + 2**-22)

    module = "elastic_dp.extensions.sharding.elementwise_updates.ELEMENTWISE"
    monkeypatch.setattr(module, frozenset({Tail}))
    assert not updates_equal_in_pieces(Tail, {"lr": 0.1}, torch.float32, CPU)


def test_probe_sees_state_that_differs_while_the_parameter_does_not(monkeypatch):
    class Count(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["mean"] = p.grad.mean().expand_as(p).clone()

    module = "elastic_dp.extensions.sharding.elementwise_updates.ELEMENTWISE"
    monkeypatch.setattr(module, frozenset({Count}))
    assert not updates_equal_in_pieces(Count, {"lr": 0.1}, torch.float32, CPU)


class Subclass(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Subclass])
def test_optimizer_not_known_to_be_elementwise_keeps_all_parameters_whole(kind):
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    assert parameters_to_keep_whole(kind(parameters[1:]), parameters) == {1, 2}


def test_probe_leaves_optimizer_parameters_and_random_state_as_they_are():
    parameters = [torch.nn.Parameter(torch.ones(4))]
    optimizer, before = torch.optim.Adam(parameters, lr=0.1), torch.get_rng_state()
    assert parameters_to_keep_whole(optimizer, parameters) == set()
    assert not optimizer.state and torch.equal(parameters[0].detach(), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)
