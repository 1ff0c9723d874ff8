"""Moments of an inner optimizer that go on (`edp.InnerMoments`): the weights of a loop in plain
PyTorch; one digest for any number of workers, and after kills, joins and restarts."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp.data import open_data
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.sampling.seeds import seed_for
from tests.runs import local, spec_of
from tests.train.jobs import classifier, cross_entropy, loop
from tests.train.test_inner_steps import INNER
from tests.train.test_staleness import put, weights_of

BETA = 0.9


def with_moments(second_moments="factored"):
    model = classifier()
    model.moments = edp.InnerMoments(model, second_moments=second_moments)
    return model


def outer(model, **changes):
    return torch.optim.SGD(model.moments.outer_groups(**changes), lr=1.0)


def inner(model, step):
    adam = torch.optim.Adam(model.moments.weights, lr=1e-2, betas=(BETA, 0.95))
    return model.moments.go_on(adam, step=(step - 1) * INNER)


def looks_ahead(model, step):
    done = (step - 1) * INNER
    momenta = (BETA * (1 - 0.5 * 0.96 ** (i * 0.004)) for i in range(1, done + 1))
    nadam = torch.optim.NAdam(model.moments.weights, lr=1e-2, betas=(BETA, 0.95))
    return model.moments.go_on(nadam, step=done, mu_product=math.prod(momenta))


def trains(ctx):
    model = with_moments(ctx.config["second_moments"])
    loop(ctx, model, outer(model), inner_optimizer=inner, inner_clip_norm=1.0)


def trains_delayed(ctx):
    model = with_moments(ctx.config["second_moments"])
    loop(ctx, model, outer(model, momentum_lr=0.5), inner_optimizer=looks_ahead)


def by_rows(tensor):
    return tensor.reshape(len(tensor), -1)


def product(rows, columns, p):
    return (rows[:, None] * (columns / columns.mean().clamp_min(1e-30))).view_as(p)


@pytest.mark.parametrize("second_moments", ["factored", "whole"])
def test_moments_are_those_of_a_loop_in_plain_torch(second_moments):
    whole = second_moments == "whole"
    kept = []

    def noted(ctx):
        model = with_moments(second_moments)
        kept.append(([p.detach().clone() for p in model.moments.weights], None))
        for _ in ctx.steps(model, outer(model), cross_entropy, inner_optimizer=inner):
            weights = [p.detach().clone() for p in model.moments.weights]
            kept.append((weights, copy.deepcopy(model.moments.state_dict())))

    spec = spec_of(steps=3, virtual=2, workers=1, inner_steps=INNER)
    local(spec, noted)
    data = open_data(spec.data, virtual_workers=2 * INNER)
    (weights, _), *after = kept
    model = classifier()
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(p) for p in weights]
    factors = [(torch.zeros(len(p)), torch.zeros(by_rows(p).shape[1])) for p in weights]
    roots = [torch.zeros_like(p) for p in weights]
    for step, (expected, moments) in enumerate(after, 1):
        left = []
        for v in range(2):
            put(parameters, weights)
            optimizer = torch.optim.Adam(parameters, lr=1e-2, betas=(BETA, 0.95))
            for p, momentum, pair, root in zip(parameters, momenta, factors, roots, strict=True):
                optimizer.state[p] = {
                    "step": torch.tensor(float((step - 1) * INNER)),
                    "exp_avg": momentum.clone(),
                    "exp_avg_sq": root.square() if whole else product(*pair, p),
                }
            for key in range(v * INNER, (v + 1) * INNER):
                seed_everything(seed_for(spec.data.seed, step, key))
                optimizer.zero_grad()
                cross_entropy(model, data.batch(step, key)).backward()
                optimizer.step()
            left.append((weights_of(model), [optimizer.state[p] for p in parameters]))
        (one, of_one), (other, of_other) = left
        changes = zip(weights, one, other, strict=True)
        weights = [w - ((w - a) / 2 + (w - b) / 2) for w, a, b in changes]
        states = [*zip(of_one, of_other, strict=True)]
        momenta = [
            m - ((m - a["exp_avg"]) / 2 + (m - b["exp_avg"]) / 2)
            for m, (a, b) in zip(momenta, states, strict=True)
        ]
        ends = [[x["exp_avg_sq"].sqrt() for x in pair] for pair in states]
        roots = [r - ((r - a) / 2 + (r - b) / 2) for r, (a, b) in zip(roots, ends, strict=True)]
        second = [[by_rows(x["exp_avg_sq"]) for x in pair] for pair in states]
        factors = [((a.mean(1) + b.mean(1)) / 2, (a.mean(0) + b.mean(0)) / 2) for a, b in second]
        assert all(map(torch.equal, weights, expected)), step
        for number, (rows, columns) in enumerate(factors):
            assert torch.equal(moments[f"momenta.{number}"], momenta[number]), step
            if whole:
                assert torch.equal(moments[f"roots.{number}"], roots[number]), step
            else:
                assert torch.equal(moments[f"rows_{number}"], rows), step
                assert torch.equal(moments[f"columns_{number}"], columns), step
        assert len(moments) == len(weights) * (2 if whole else 3)


@pytest.mark.parametrize("second_moments", ["factored", "whole"])
def test_second_moments_of_a_vector_are_kept_as_they_are(second_moments):
    model = nn.ParameterDict({"bias": nn.Parameter(torch.randn(5)), "scale": torch.ones(())})
    if second_moments == "whole":
        model["matrix"] = nn.Parameter(torch.randn(3, 5))
    moments = edp.InnerMoments(model, second_moments=second_moments)
    optimizer = torch.optim.AdamW(moments.weights, lr=0.1)
    moments.go_on(optimizer, step=0)
    for p in moments.weights:
        p.grad = torch.randn_like(p)
    optimizer.step()
    again = torch.optim.AdamW(moments.weights, lr=0.1)
    moments.go_on(again, step=1)
    for p in moments.weights:
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(again.state[p][name], optimizer.state[p][name])
        assert again.state[p]["step"] == 1.0


BETAS = [(0.9, 0.95), (0.9, 0.999), (0.0, 0.9)]


@pytest.mark.parametrize("betas", [*BETAS, (0.95, 0.9)])
def test_moments_that_gradients_can_have_are_changed_by_nothing_but_their_root(betas):
    """The first element has the gradients with the most momentum beside its second moment, the
    second one has a gradient now and then."""
    beta1, beta2 = betas
    p = nn.Parameter(torch.zeros(2))
    moments = edp.InnerMoments(nn.ParameterList([p]), second_moments="whole")
    last = torch.optim.Adam([p], lr=0.0, betas=betas)
    moments.go_on(last, step=0)
    for step in range(100):
        growing = min(beta1 / beta2, 1.0) ** (99 - step)
        p.grad = torch.tensor([growing, float(step % 9 == 0)])
        last.step()
        again = torch.optim.Adam([p], lr=0.0, betas=betas)
        moments.go_on(again, step=step + 1)
        root = last.state[p]["exp_avg_sq"].sqrt()
        torch.testing.assert_close(again.state[p]["exp_avg_sq"].sqrt(), root, rtol=1e-5, atol=0)


@pytest.mark.parametrize("root", [-1e-3, 0.0, 1e-7])
@pytest.mark.parametrize("betas", BETAS)
def test_root_that_was_rounded_makes_no_step_longer_than_adams(betas, root):
    """`wire="int8"` can make a root negative, 0, or far too small for the momentum."""
    p = nn.Parameter(torch.zeros(3))
    moments = edp.InnerMoments(nn.ParameterList([p]), second_moments="whole")
    with torch.no_grad():
        moments.momenta[0].copy_(torch.tensor([0.0, 1e-3, -1.0]))
        moments.roots[0].fill_(root)
    adam = torch.optim.Adam([p], lr=0.1, betas=betas)
    moments.go_on(adam, step=1000)
    p.grad = torch.zeros(3)
    adam.step()
    beta1, beta2 = betas
    bound = (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
    assert p.isfinite().all()
    assert p.abs().max() <= 0.1 * bound * 1.001
    assert (adam.state[p]["exp_avg_sq"] >= 0).all()
    assert (moments.roots[0] >= 0).all()


def test_second_moments_of_another_name_are_refused():
    with pytest.raises(SpecError, match='second_moments is \'all\', must be "factored" or "whole"'):
        with_moments("all")


def test_parameters_without_elements_have_no_moments():
    """Some configurations have a layer of size 0. Means over nothing would be NaN."""
    model = nn.ParameterDict(
        {"none": torch.zeros(0, 3), "row": torch.ones(3), "one": torch.ones([])}
    )
    moments = edp.InnerMoments(model)
    assert set(moments.weights) == {model["row"], model["one"]}
    whole = edp.InnerMoments(model, second_moments="whole")
    assert [*map(len, (whole.weights, whole.momenta, whole.roots))] == [2, 2, 2]


@pytest.mark.parametrize(
    "optimizer", [torch.optim.RMSprop, torch.optim.Adamax, partial(torch.optim.Adam, amsgrad=True)]
)
def test_optimizer_with_other_moments_is_refused_by_name(optimizer):
    model = with_moments()
    with pytest.raises(ModelError, match="keeps other moments than exp_avg and exp_avg_sq: use"):
        model.moments.go_on(optimizer(model.moments.weights, lr=0.1), step=0)


def test_missing_count_is_refused_by_name():
    model = with_moments()
    nadam = torch.optim.NAdam(model.moments.weights, lr=0.1)
    with pytest.raises(ModelError, match=r"needs \['mu_product', 'step'\]: pass"):
        model.moments.go_on(nadam, step=0)


def halves_all_rates(model):
    optimizer = outer(model)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    "made",
    [
        lambda model: (torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9), None),
        lambda model: (torch.optim.SGD(model.moments.weights, lr=1.0), None),
        lambda model: (torch.optim.AdamW(model.moments.outer_groups(), lr=1.0), None),
        halves_all_rates,
        lambda model: (
            torch.optim.SGD([*model.moments.weights, *model.moments.momenta], lr=1.0),
            None,
        ),
    ],
    ids=["momentum", "left out", "AdamW", "scheduler", "roots left out"],
)
def test_outer_optimizer_that_does_not_take_the_mean_is_refused_by_name(made):
    def train(ctx):
        model = with_moments("whole")
        optimizer, scheduler = made(model)
        loop(ctx, model, optimizer, scheduler=scheduler, inner_optimizer=inner)

    spec = spec_of(steps=3, virtual=4, inner_steps=INNER)
    with pytest.raises(ModelError, match="does not take the mean of the moments of InnerMoments"):
        local(spec, train)
