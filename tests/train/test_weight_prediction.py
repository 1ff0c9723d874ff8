"""Weights some updates ahead (`edp.WeightPrediction`): those of a loop that predicts them by hand,
and their state in copies."""

import copy
import pickle

import pytest
import torch

import elastic_dp as edp
from elastic_dp.errors import SpecError
from elastic_dp.train import master_weights
from tests.train.jobs import classifier, loop
from tests.train.test_master_weights import gradients, update

KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [0.0, 1.0, 2.5])
def test_parameters_are_the_weights_and_their_last_change_some_times(
    kind, options, dtype, ahead, monkeypatch
):
    """One parameter has no gradient at first, and they are updated in parts."""
    monkeypatch.setattr(master_weights, "_TOGETHER_BYTES", 256)
    model = classifier().to(dtype)
    by_hand = copy.deepcopy(model).float()
    optimizer = edp.WeightPrediction(model.parameters(), kind, lr=1e-2, ahead=ahead, **options)
    expected = kind(by_hand.parameters(), lr=1e-2, **options)
    parameters, theirs = list(model.parameters()), list(by_hand.parameters())
    for step in range(5):
        before = [p.detach().clone() for p in theirs]
        for n, gradient in enumerate(gradients(parameters, step)):
            parameters[n].grad = gradient if n or step else None
            theirs[n].grad = gradient.float() if n or step else None
        optimizer.step()
        expected.step()
        for p, their, old in zip(parameters, theirs, before, strict=True):
            predicted = their + ahead * (their - old)
            torch.testing.assert_close(p.float(), predicted.to(dtype).float(), rtol=0, atol=1e-6)
            if their.grad is not None:
                assert torch.equal(optimizer.state[p]["master"], their)
                assert ahead or torch.equal(p, their.to(dtype))


def test_number_of_updates_ahead_may_change_with_the_updates_before():
    one, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = edp.WeightPrediction(
        [{"params": [one]}, {"params": [other]}],
        torch.optim.SGD,
        lr=1.0,
        ahead={0: 0, 2: 3.0, 3: 0.5},
    )
    seen = []
    for _ in range(4):
        one.grad = other.grad = -torch.ones(1)
        optimizer.step()
        assert one == other
        seen.append(one.item())
    assert seen == [1.0, 2.0, 3.0 + 3.0, 4.0 + 0.5]


@pytest.mark.parametrize("ahead", [-1.0, float("nan"), float("inf"), "2", True, {0: None}])
def test_number_of_updates_that_is_none_is_refused(ahead):
    with pytest.raises(SpecError, match=r"ahead is .*, must be numbers of updates from 0"):
        edp.WeightPrediction(classifier().parameters(), torch.optim.SGD, lr=0.1, ahead=ahead)


@pytest.mark.parametrize("ahead", [{}, {1: 1.0}, {0: 0, -1: 1}, {0: 0, 0.5: 1}])
def test_numbers_of_updates_without_a_beginning_are_refused(ahead):
    with pytest.raises(SpecError, match=r"must have the number of updates for 0 and later ones"):
        edp.WeightPrediction(classifier().parameters(), torch.optim.SGD, lr=0.1, ahead=ahead)


def test_prediction_with_another_optimizer_is_refused():
    with pytest.raises(SpecError, match=r"must be one of torch\.optim: ASGD"):
        edp.WeightPrediction(classifier().parameters(), torch.optim.LBFGS, lr=0.1)


@pytest.mark.parametrize("how", ["copy", "pickle", "state"])
def test_copy_with_its_model_updates_as_the_original(how):
    def new():
        model = classifier().to(torch.bfloat16)
        return model, edp.WeightPrediction(
            model.parameters(), torch.optim.AdamW, lr=1e-3, ahead={0: 1.5, 2: 3.0}
        )

    model, optimizer = new()
    update(model, optimizer, 0)
    if how == "state":
        other, again = new()
        other.load_state_dict(model.state_dict())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        both = (model, optimizer)
        other, again = copy.deepcopy(both) if how == "copy" else pickle.loads(pickle.dumps(both))
    for number in (1, 2):
        update(model, optimizer, number)
        update(other, again, number)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def predicting(ctx):
    model = classifier()
    optimizer = edp.WeightPrediction(
        model.parameters(), torch.optim.NAdam, lr=1e-2, ahead={0: 0, 4: 1.5}
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loop(ctx, model, optimizer, scheduler=scheduler, clip_norm=0.5)


@pytest.mark.parametrize("before", [False, True], ids=["alone", "behind-masters"])
def test_step_hooks_run_once_whatever_the_process_did_before(before):
    def made(cls):
        return cls(torch.nn.Linear(2, 2, dtype=torch.bfloat16).parameters(), torch.optim.SGD, lr=1)

    if before:
        made(edp.MasterWeights)
    optimizer, ran = made(edp.WeightPrediction), []
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    optimizer.step()
    assert ran == ["pre", "post"] and optimizer.param_groups[0]["updates"] == 1


@pytest.mark.parametrize(("ahead", "is_borne"), [(0.0, False), (1.0, False), (2.0, True)])
def test_late_gradients_of_a_quadratic_are_borne_two_updates_ahead(ahead, is_borne):
    """A rate of 4.5 / curvature, momentum 0.95, and gradients that are one step late."""
    p = torch.nn.Parameter(torch.ones(1))
    how = {"lr": 4.5, "momentum": 0.95, "dampening": 0.95}
    optimizer = edp.WeightPrediction([p], torch.optim.SGD, ahead=ahead, **how)
    late = torch.zeros(1)
    for _ in range(600):
        p.grad, late = late, p.detach().clone()
        optimizer.step()
    assert p.abs() < 1e-3 if is_borne else p.abs() > 10
