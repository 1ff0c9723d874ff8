"""What cannot be sharded is refused before anything starts, by name and with the way out."""

import copy
import dataclasses
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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_optimizers_of_torch_are_accepted(kind):
    model = classifier()
    check(kind(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("name", ["LARS", "Lamb"])
def test_optimizers_for_large_batches_are_accepted(name):
    model = classifier()
    check(getattr(pytorch_optimizer(), name)(model.parameters()), model)


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


def test_optimizer_that_looks_at_the_norm_of_the_whole_gradient_is_refused():
    model = classifier()
    optimizer = pytorch_optimizer().Lamb(model.parameters(), pre_norm=True)
    with pytest.raises(ModelError, match=r"pre_norm=True.*use clip_norm="):
        check(optimizer, model)


def test_two_optimizers_in_one_are_refused():
    model = classifier()
    with pytest.raises(ModelError, match=r"optimizer is a .*\.Both, of which it is not known"):
        check(Both(model), model)


def test_step_that_is_not_that_of_the_class_is_refused():
    model = classifier()
    optimizer = adamw(model)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # it counts the steps
    check(optimizer, model)
    optimizer.step = lambda: None
    with pytest.raises(ModelError, match="step is not that of its class"):
        check(optimizer, model)


class OfSomebody(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [OfSomebody, AutoClip])
def test_optimizers_of_others_are_refused(kind):
    model = classifier()
    with pytest.raises(ModelError, match=rf"optimizer is a .*{kind.__name__}, of which .* AdamW"):
        check(kind(model.parameters()), model)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_refused(register):
    model = classifier()
    optimizer = adamw(model)

    def looks(*_):
        pass

    getattr(optimizer, register)(looks)
    with pytest.raises(ModelError, match=r"step hook \(.*looks\).*remove it"):
        check(optimizer, model)


def test_differentiable_steps_are_refused():
    model = classifier()
    with pytest.raises(ModelError, match="differentiable=True"):
        check(adamw(model, differentiable=True), model)


def test_parameters_that_share_memory_are_refused():
    model = nn.Module()
    memory = torch.zeros(8)
    model.one, model.other = nn.Parameter(memory[:6]), nn.Parameter(memory[4:])
    with pytest.raises(ModelError, match=r"model\.one and model\.other share memory"):
        check(adamw(model), model)


def test_parameters_with_gaps_are_refused():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(8, 8)[:, :4])
    with pytest.raises(ModelError, match=r"model\.weight has gaps.*contiguous"):
        check(adamw(model), model)


def test_loss_scaling_is_refused_before_the_first_step():
    spec = dataclasses.replace(spec_of(steps=2, workers=1), sharding="optimizer")
    with pytest.raises(SpecError, match=r'precision is "fp16".*use "bf16"'):
        local(spec, autocast_fp16)


def test_noise_scale_is_refused_before_the_first_step():
    def train(ctx):
        model = classifier()
        loop(ctx, model, adamw(model), cross_entropy, noise_scale_every=1)

    spec = dataclasses.replace(spec_of(steps=2, workers=1), sharding="optimizer")
    with pytest.raises(SpecError, match="noise_scale_every needs the whole gradient"):
        local(spec, train)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sharding": "parameters"}, "sharding is 'parameters', must be one of None, 'optimizer'"),
        ({"exact": False}, "sharding is 'optimizer' and exact is False"),
        ({"staleness": 1}, "staleness is 1 and sharding is 'optimizer'"),
    ],
)
def test_jobs_that_cannot_be_sharded_are_refused(change, match):
    spec = dataclasses.replace(spec_of(), sharding="optimizer")
    with pytest.raises(SpecError, match=match):
        dataclasses.replace(spec, **change)


def test_optimizer_of_the_user_has_no_state_and_keeps_its_groups():
    seen = []

    def train(ctx):
        model = classifier()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loop(ctx, model, optimizer, cross_entropy, scheduler=scheduler)
        seen.append((len(optimizer.state), optimizer.param_groups[0]["lr"]))

    local(dataclasses.replace(spec_of(steps=3), sharding="optimizer"), train)
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
        local(dataclasses.replace(spec_of(steps=3), sharding="optimizer"), train)
