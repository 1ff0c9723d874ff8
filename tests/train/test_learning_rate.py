"""Decay that a scheduler counts in epochs, although it is stepped once for each step."""

import pytest
import torch
from torch.optim import lr_scheduler

from elastic_dp.train.steps_arguments import decay_by_epochs


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
