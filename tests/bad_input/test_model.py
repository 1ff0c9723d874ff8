"""Models, optimizers, schedulers and states that cannot be trained."""

import threading

import pytest
import torch
from torch import nn

from elastic_dp import MasterWeights
from elastic_dp.errors import (
    ModelError,
    SpecError,
)
from tests.bad_input.jobs import fails, synchronised
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, loop


def test_optimizer_that_does_not_fit_is_refused():
    """Before the first step: nothing may fail between its commit and its end."""

    class Closure(torch.optim.SGD):
        def step(self, closure):
            closure()

    fails(ModelError, ["Closure", "'closure'"], optimizer=lambda m: Closure(m.parameters()))
    sparse = torch.optim.SparseAdam
    fails(ModelError, ["SparseAdam"], optimizer=lambda m: sparse(m.parameters()))


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_is_refused_where_it_does_not_train(dtype):
    """In torch 2.13 it leaves parameters of 16 bits on a processor as they are."""
    model = classifier().to(dtype)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model[0].weight.detach().clone()
    fused_sgd(model).step()
    if not torch.equal(before, model[0].weight):
        pytest.skip("this version of torch trains them")
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


def test_complex_parameter_is_refused():
    def model():
        model = classifier()
        model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        return model

    fails(ModelError, ["model.phase", "complex64", "view_as_real"], model=model)


def test_scheduler_that_does_not_fit_is_refused():
    """Before the first step: after it, the model would be ahead of its scheduler."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    words = ["ReduceLROnPlateau", "metrics", "scheduler.step(step.loss)", 'state={"scheduler"']
    fails(SpecError, words, scheduler=plateau)
    fails(SpecError, ["object", "no step()"], scheduler=lambda o: object())


def test_lazy_module_without_a_shape_is_refused():
    words = ["model.0.weight has no shape yet", "before the optimizer"]
    fails(ModelError, words, model=lambda: nn.Sequential(nn.LazyLinear(4)))


def test_model_on_the_meta_device_is_refused():
    def on_meta():
        model = classifier()
        model[4].to("meta")
        return model

    fails(ModelError, ["model.4.weight", "meta device", "to_empty"], model=on_meta)


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
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest


def test_sync_batch_norm_is_refused():
    fails(ModelError, ["model.1", "SyncBatchNorm", "BatchNorm"], model=synchronised)


def test_sparse_gradients_and_lbfgs_are_refused():
    fails(
        ModelError,
        ["sparse=False"],
        model=lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
    )

    def rarely_sparse(m, b):
        looked_up = nn.functional.embedding(b["y"], m[0].weight, sparse=True)
        return cross_entropy(m[1], b) + (looked_up.sum() if 17 in b["i"] else 0.0)

    fails(
        ModelError,
        ["model.0.weight", "sparse=False"],
        rarely_sparse,
        model=lambda: nn.ModuleList([nn.Embedding(4, 3), classifier()]),
    )
    fails(ModelError, ["LBFGS"], optimizer=lambda m: torch.optim.LBFGS(m.parameters()))


def test_optimizer_around_one_that_does_not_fit_is_refused():
    class Around(torch.optim.SGD):
        def __init__(self, outer, inner):
            super().__init__(outer.param_groups, lr=0.1)
            self.inner = inner

    words = ["optimizer.inner", "not a parameter of"]
    fails(ModelError, words, optimizer=lambda m: Around(adamw(m), adamw(classifier())))
    words = ["optimizer.inner", "LBFGS"]
    fails(
        ModelError,
        words,
        optimizer=lambda m: Around(adamw(m), torch.optim.LBFGS(m.parameters())),
    )


def test_optimizer_of_another_model_is_refused():
    fails(ModelError, ["not a parameter of"], optimizer=lambda m: adamw(classifier()))


def test_state_that_cannot_be_sent_is_refused_at_the_start():
    """Said at the start, in local mode, too: later it would end the run of whoever gives it to a
    joiner."""

    class Held:
        def state_dict(self):
            return {"count": 1, "held": [{"lock": threading.Lock()}]}

        load_state_dict = print

    def train(ctx):
        model = classifier()
        for _ in ctx.steps(model, adamw(model), cross_entropy, state={"mine": Held()}):
            pass

    words = r"state\['mine'\].state_dict\(\) cannot be sent to a worker that joins: held.0.lock is"
    with pytest.raises(SpecError, match=words):
        local(spec_of(), train)
