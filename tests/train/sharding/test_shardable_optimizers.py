"""What cannot be sharded is refused before anything starts, by name and with the way out."""

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

from elastic_dp.errors import LoopError, ModelError, SpecError
from elastic_dp.extensions.sharding.shardable_optimizers import check_shardable
from elastic_dp.train.master_weights import MasterWeights
from tests.runs import local, spec_of
from tests.train.jobs import adamw, autocast_fp16, classifier, cross_entropy, loop
from tests.train.optimizers import AutoClip, Both, pytorch_optimizer


def check(optimizer, model, precision=None):
    check_shardable(optimizer, dict(model.named_parameters()), precision)


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, "LARS", "Lamb"]
)
def test_optimizers_that_can_be_sharded_are_accepted(make):
    model = classifier()
    make = getattr(pytorch_optimizer(), make) if isinstance(make, str) else make
    check(make(model.parameters(), lr=0.1), model)


def test_adafactor_that_takes_the_epsilon_of_another_parameter_is_refused():
    """Torch takes that of the first parameter's dtype, and a worker updates a part of them."""
    model = classifier().to(torch.bfloat16)
    model[1].float()
    narrow = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    with pytest.raises(ModelError, match=r"group 0 of Adafactor .*bfloat16 and .*float32, and eps"):
        check(torch.optim.Adafactor(model.parameters()), model)
    apart = [{"params": narrow}, {"params": list(model[1].parameters())}]
    for params, options in (apart, {}), (model.parameters(), {"eps": (1e-8, 1e-3)}):
        check(torch.optim.Adafactor(params, **options), model)
    check(MasterWeights(model.parameters(), torch.optim.Adafactor), model)


def test_sgd_that_rounds_the_momentum_of_a_parameter_by_what_others_have_is_refused():
    narrow, wide = classifier().to(torch.bfloat16), classifier()
    options = {"lr": 0.1, "momentum": 0.9, "foreach": True}
    with pytest.raises(ModelError, match=r"group 0 of SGD .*bfloat16.* Leave foreach out"):
        check(torch.optim.SGD(narrow.parameters(), **options), narrow)
    check(torch.optim.SGD(wide.parameters(), **options), wide)
    check(MasterWeights(narrow.parameters(), torch.optim.SGD, **options), narrow)
    for other in {"momentum": 0}, {"foreach": None}:
        check(torch.optim.SGD(narrow.parameters(), **options | other), narrow)


class OfSomebody(torch.optim.Adam):
    pass


def with_another_step(model):
    optimizer = adamw(model)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # it counts the steps
    check(optimizer, model)
    optimizer.step = lambda: None
    return optimizer


def looks(*_):
    pass


def with_a_hook(model, register):
    optimizer = adamw(model)
    getattr(optimizer, register)(looks)
    return optimizer


def parts_of_one_memory(model):
    memory = torch.zeros(8)
    model.one, model.other = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    return adamw(model)


def with_gaps(model):
    model.weight = nn.Parameter(torch.zeros(8, 8)[:, :4])
    return adamw(model)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda model: pytorch_optimizer().Lamb(model.parameters(), pre_norm=True),
            r"pre_norm=True.*use clip_norm=",
        ),
        (Both, r"optimizer is a .*\.Both, of which it is not known"),
        (lambda model: OfSomebody(model.parameters()), r"is a .*OfSomebody, of which .* AdamW"),
        (lambda model: AutoClip(model.parameters()), r"is a .*AutoClip, of which .* AdamW"),
        (with_another_step, "step is not that of its class"),
        (lambda model: with_a_hook(model, "register_step_pre_hook"), r"\(.*looks\).*remove it"),
        (lambda model: with_a_hook(model, "register_step_post_hook"), r"\(.*looks\).*remove it"),
        (lambda model: adamw(model, differentiable=True), "differentiable=True"),
        (parts_of_one_memory, r"model\.other and model\.one share memory"),
        (with_gaps, r"model\.weight has gaps.*contiguous"),
    ],
)
def test_what_cannot_be_sharded_is_refused(make, match):
    model = classifier()
    optimizer = make(model)
    with pytest.raises(ModelError, match=match):
        check(optimizer, model)


@pytest.mark.parametrize(
    ("train", "match"),
    [
        (autocast_fp16, r'precision is "fp16".*use "bf16"'),
        (
            lambda ctx: loop(ctx, m := classifier(), adamw(m), cross_entropy, noise_scale_every=1),
            "noise_scale_every needs the whole gradient",
        ),
    ],
)
def test_loop_that_cannot_be_sharded_is_refused_before_the_first_step(train, match):
    spec = spec_of(steps=2, workers=1, sharding="optimizer")
    with pytest.raises(SpecError, match=match):
        local(spec, train)


def test_optimizer_of_the_user_has_no_state_and_keeps_its_groups():
    seen = []

    def train(ctx):
        model = classifier()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loop(ctx, model, optimizer, cross_entropy, scheduler=scheduler)
        seen.append((len(optimizer.state), optimizer.param_groups[0]["lr"]))

    local(spec_of(steps=3, sharding="optimizer"), train)
    assert seen == [(0, 1e-2 / 8)]


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: [state["exp_avg"].zero_() for state in optimizer.state.values()],
        lambda optimizer: [optimizer.state[p]["exp_avg"] for p in optimizer.state],
        lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]].clear(),
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: optimizer.load_state_dict(adamw(classifier()).state_dict()),
        lambda optimizer: copy.deepcopy(optimizer),
    ],
    ids=["clear", "zero", "keys", "entry", "replaced", "loaded", "copied"],
)
def test_body_that_looks_for_the_state_of_a_sharded_optimizer_is_refused(change):
    """To find nothing there and go on would be another training than without sharding."""

    def train(ctx):
        model = classifier()
        optimizer = adamw(model)
        for step in ctx.steps(model, optimizer, cross_entropy):
            if step.number == 2:
                change(optimizer)

    refusals = "each worker holds a part of it|the body .* wrote to the optimizer's state"
    with pytest.raises(LoopError, match=refusals):
        local(spec_of(steps=3, sharding="optimizer"), train)
