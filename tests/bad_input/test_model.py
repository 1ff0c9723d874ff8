"""Models, optimizers, schedulers and states that cannot be trained."""

import pytest
import torch
from torch import nn

from elastic_dp import MasterWeights
from elastic_dp.errors import (
    ModelError,
)
from tests.bad_input.jobs import fails
from tests.runs import group, local, spec_of
from tests.train.jobs import classifier, cross_entropy, loop


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_is_refused_where_it_does_not_train(dtype):
    """In torch 2.13 it leaves parameters of 16 bits on a processor as they are."""
    words = ["optimizer is SGD with fused=True", str(dtype), "MasterWeights"]
    fails(ModelError, words, model=lambda: classifier().to(dtype), optimizer=fused_sgd)


def test_fused_sgd_trains_where_it_does():
    """In fp32, and with masters in fp32."""

    def narrow(ctx):
        model = classifier().to(torch.bfloat16)
        options = {"lr": 0.1, "momentum": 0.9, "fused": True}
        before = model[0].weight.detach().clone()
        loop(ctx, model, MasterWeights(model.parameters(), torch.optim.SGD, **options), in_bf16)
        assert not torch.equal(before, model[0].weight)

    def in_bf16(model, batch):
        return nn.functional.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"])

    def wide(ctx):
        model = classifier()
        loop(ctx, model, fused_sgd(model))

    assert all(local(spec_of(steps=2), train).step == 2 for train in (narrow, wide))


def test_optimizer_with_another_order_on_one_worker_gets_the_order_of_the_model():
    """Such as of a set of parameters: optimizer state travels by place, and two of these have one
    shape."""

    def train(ctx):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        parameters = list(model.parameters())
        if not ctx.is_source:
            parameters[:4] = parameters[2:4] + parameters[:2]
        for _ in ctx.steps(model, torch.optim.AdamW(parameters), cross_entropy):
            pass

    spec = spec_of(workers=2, min_workers=2)
    outcome, _ = group(spec, train)
    assert outcome.digest == local(spec, train).digest
