"""The learning rate for a batch of another size, beside the formulas."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

import elastic_dp as edp
from elastic_dp.errors import SpecError
from elastic_dp.train.loop_guard.steps_arguments import decay_by_epochs
from tests.runs import group, local, spec_of
from tests.train.jobs import classifier, cross_entropy


def rates(factor, steps, lr=0.5):
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("k", [1, 2, 8, 100])
def test_linear_and_square_root_rules_are_those_of_the_papers(k):
    assert rates(edp.batch_lr(4 * k, base=4), 2) == [0.5 * k] * 2
    assert rates(edp.batch_lr(4 * k, base=4, rule="sqrt"), 2) == [0.5 * math.sqrt(k)] * 2


def test_rate_follows_the_batch_in_the_step_in_which_it_grows():
    growth = {0: 8, 3: 16, 5: 32}
    assert rates(edp.batch_lr(growth, base=8), 7) == [0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]


def test_warm_up_rises_in_equal_parts_at_the_start_and_at_each_change():
    found = rates(edp.batch_lr({0: 8, 6: 16}, base=8, warmup_steps=4), 12, lr=1.0)
    assert found == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0]


def test_change_within_a_warm_up_goes_on_from_the_rate_that_was_reached():
    found = rates(edp.batch_lr({0: 8, 2: 16}, base=8, warmup_steps=4), 7, lr=1.0)
    assert found == [0.25, 0.5, 0.875, 1.25, 1.625, 2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": {5: 8}}, "batch: the number of the first step is missing"),
        ({"batch": 0}, "batch is 0, must be at least 1"),
        ({"batch": None}, "batch is None"),
        ({"base": 0}, "base is 0, must be a positive number"),
        ({"base": True}, "base is True"),
        ({"base": math.nan}, "base is nan"),
        ({"rule": "cubic"}, "rule is 'cubic'"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": None}, "warmup_steps is None"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, words):
    with pytest.raises(SpecError, match=words):
        edp.batch_lr(**{"batch": 8, "base": 8} | options)


def scaled(ctx):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    factor = edp.batch_lr(ctx.virtual_workers, base=4, warmup_steps=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        ctx.log({"lr": step.lr})


def test_rate_of_a_growing_run_is_that_of_the_formula_for_any_number_of_workers():
    spec = spec_of(steps=8, virtual={0: 4, 5: 8}, workers=2, min_workers=2)
    calm = local(spec, scaled)
    assert [x["lr"] / 0.01 for x in calm.logged] == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 4 / 3, 5 / 3, 2.0]
    )
    outcome, _ = group(spec, scaled)
    assert (outcome.error, outcome.digest) == (None, calm.digest)


@pytest.mark.parametrize(
    ("make", "per_epoch", "steps", "is_said"),
    [
        (lambda o: lr_scheduler.StepLR(o, 30, 0.1), 1000, 90_000, True),
        (lambda o: lr_scheduler.StepLR(o, 30, 0.1), 60, 5400, False),
        (lambda o: lr_scheduler.StepLR(o, 30_000, 0.1), 1000, 90_000, False),
        (lambda o: lr_scheduler.MultiStepLR(o, [20, 30, 60, 80], 0.1), 1000, 90_000, True),
        (lambda o: lr_scheduler.MultiStepLR(o, [30_000, 60_000], 0.1), 90_000, 90_000, False),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.95), 1000, 90_000, True),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.95), 1000, 0, False),  # a run by time
        (lambda o: lr_scheduler.ExponentialLR(o, 1e-4 ** (1 / 1000)), 10_000, 1000, False),
        (lambda o: lr_scheduler.ExponentialLR(o, 1.1), 1000, 90_000, False),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 90), 1000, 90_000, False),  # which comes back
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 1000), 10_000, 1000, False),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 1e-8, 1000), 10_000, 1000, False),
        (lambda o: None, 1000, 90_000, False),
    ],
)
def test_decay_that_counts_epochs_is_said_and_one_that_counts_steps_is_not(
    make, per_epoch, steps, is_said
):
    scheduler = make(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    assert (decay_by_epochs(scheduler, per_epoch, steps) is not None) == is_said
