"""Optimizers for large batches, from the libraries that keep them: the same bits on one worker and
on three, with a join, a kill and a restore, and for a batch that grows."""

import pytest
import torch

from elastic_dp.config import CheckpointConfig
from tests.runs import fit, local, spec_of
from tests.train.jobs import classifier, loop
from tests.train.optimizers import Both, pytorch_optimizer


def lars(model):
    return pytorch_optimizer().LARS(
        model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.02
    )


def lamb(model):
    return pytorch_optimizer().Lamb(model.parameters(), lr=0.02, weight_decay=0.01)


class MuonAndAdamW(Both):
    """Muon takes matrices only."""

    def __init__(self, model):
        super().__init__(model)
        matrices, rest = (group["params"] for group in self.param_groups)
        self.parts = {
            "matrices": torch.optim.Muon(matrices, lr=0.02),
            "rest": torch.optim.AdamW(rest, lr=0.01),
        }


EVERY_2 = CheckpointConfig(every_steps=2)
OPTIMIZERS = {"LARS": lars, "LAMB": lamb, "Muon": MuonAndAdamW}


def training(make):
    def train(ctx):
        model = classifier()
        optimizer = make(model)
        schedulers = (
            {}
            if make is MuonAndAdamW
            else {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)}
        )
        body = lambda step: ctx.log({"loss": step.loss})  # noqa: E731
        loop(ctx, model, optimizer, body=body, clip_norm=1.0, **schedulers)

    return train


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.slow if name == "LAMB" else ())
        for name, make in OPTIMIZERS.items()
    ],
)
def test_restored_run_has_the_weights_of_the_one_at_once_and_learns(make, tmp_path):
    train, options = training(make), {"virtual": {0: 4, 4: 8}, "checkpoint": EVERY_2}
    at_once = fit(train, tmp_path / "at once", 12, **options)
    fit(train, tmp_path / "parts", 3, **options)
    restored = fit(train, tmp_path / "parts", 12, **options)
    assert restored.weights_sha256 == at_once.weights_sha256
    assert at_once.metrics["loss"] < 1.3  # of four classes, at first about 1.39


def test_norm_of_the_gradient_is_that_before_the_optimizer_writes_to_it():
    norms = []

    def train(ctx):
        model = classifier()
        make = lars if norms else lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        loop(ctx, model, make(model), body=lambda step: norms.append(step.grad_norm))

    local(spec_of(steps=1), train)
    local(spec_of(steps=1), train)
    assert norms[0] == norms[1] > 0.1
