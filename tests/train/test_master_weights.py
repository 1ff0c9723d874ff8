"""fp32 masters of parameters in bfloat16: the bits of a loop that keeps them by hand, sharded or
not, with kills, joins and restores."""

import copy

import pytest
import torch
from torch.nn import functional as F

import elastic_dp as edp
from elastic_dp.checkpoint.codec import encode
from elastic_dp.checkpoint.layout import TensorSpec
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.extensions.sharding.elementwise_updates import updates_equal_in_pieces
from elastic_dp.extensions.sharding.shardable_optimizers import check_shardable
from elastic_dp.train import master_weights
from elastic_dp.train.state.train_state import TrainState
from tests.train.jobs import classifier, loop

KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adafactor, {}),
]


def gradients(parameters, step):
    drawn = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=drawn).to(p.dtype) for p in parameters]


def update(model, optimizer, step):
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, gradients(parameters, step), strict=True):
        p.grad = gradient
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_the_rounded_values_of_those_that_fp32_training_has(
    kind, options, dtype, monkeypatch
):
    """One parameter has no gradient at first, one is in fp32, and they are updated in parts."""
    monkeypatch.setattr(master_weights, "_TOGETHER_BYTES", 256)
    model = classifier().to(dtype)
    model[1].float()
    by_hand = copy.deepcopy(model).float()
    optimizer = edp.MasterWeights(model.parameters(), kind, lr=1e-2, **options)
    expected = kind(by_hand.parameters(), lr=1e-2, **options)
    parameters, theirs = list(model.parameters()), list(by_hand.parameters())
    for step in range(5):
        for n, gradient in enumerate(gradients(parameters, step)):
            has_one = bool(n or step)
            parameters[n].grad = gradient if has_one else None
            theirs[n].grad = gradient.float() if has_one else None
        optimizer.step()
        expected.step()
        for p, their in zip(parameters, theirs, strict=True):
            assert torch.equal(p, their.to(p.dtype))
            state, of_theirs = dict(optimizer.state[p]), expected.state[their]
            if p.dtype == dtype and state:
                assert torch.equal(state.pop("master"), their)
            assert state.keys() == of_theirs.keys()
            assert all(torch.equal(state[key], of_theirs[key]) for key in state)
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in parameters)


def test_groups_closures_and_schedulers_work_as_those_of_torch():
    model = classifier().to(torch.bfloat16)
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    optimizer = edp.MasterWeights(groups, torch.optim.AdamW, lr=0.5, weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for n, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(n))
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] == 0.25


def test_masters_are_fp32_when_their_state_is_loaded_again():
    def new():
        model = classifier().to(torch.bfloat16)
        return model, edp.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)

    model, optimizer = new()
    for step in range(3):
        update(model, optimizer, step)
    other, loaded = new()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = loaded.state.values()
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}
    for step in range(3, 6):
        update(model, optimizer, step)
        update(other, loaded, step)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, Own, []])
def test_masters_of_other_optimizers_are_refused(kind):
    with pytest.raises(SpecError, match=r"optimizer_class is .* must be one of torch\.optim: ASGD"):
        edp.MasterWeights(classifier().parameters(), kind, lr=0.1)


class OwnMasters(edp.MasterWeights):
    pass


@pytest.mark.parametrize("kind", [OwnMasters, edp.WeightPrediction])
def test_optimizer_that_is_not_known_to_be_shardable_is_refused_by_name(kind):
    model = classifier()
    optimizer = kind(model.parameters(), torch.optim.AdamW)
    words = rf"optimizer is a .*\.{kind.__name__}, of which it is not"
    with pytest.raises(ModelError, match=words):
        check_shardable(optimizer, dict(model.named_parameters()), None)


@pytest.mark.parametrize(
    ("kind", "equal"), [(torch.optim.AdamW, True), (torch.optim.Adafactor, False)]
)
def test_masters_are_updated_in_pieces_as_their_optimizer_is(kind, equal):
    found = updates_equal_in_pieces(
        kind, {"lr": 0.1}, torch.bfloat16, torch.device("cpu"), has_masters=True
    )
    assert found is equal


def with_masters(ctx):
    model = classifier().to(torch.bfloat16)
    model[1].float()  # the norm's weights stay in fp32
    optimizer = edp.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def loss_fn(model, batch):
        hidden = model[1](model[0](batch["x"].bfloat16()).float()).bfloat16()
        return F.cross_entropy(model[2:](hidden).float(), batch["y"])

    loop(ctx, model, optimizer, loss_fn, scheduler=scheduler, clip_norm=0.5)


def test_memory_of_a_worker_that_will_join_fits_masters_and_their_state():
    """A joiner receives there. Memory in the dtype of the parameters would be for nothing."""
    model = torch.nn.Linear(400, 400).bfloat16()
    optimizer = edp.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    state = TrainState(model, optimizer, None, None, {})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    encoded, tensors = encode(state.tree([], None))
    specs = [TensorSpec.of(*one) for one in tensors]
    state.preallocate()
    ours = state.own_tensors(encoded, specs)
    large = [slot for slot, spec in enumerate(specs) if len(spec.shape) == 2]
    assert len(large) == 4, "the parameter, its master and two moments"
    assert all(ours[slot].dtype == specs[slot].torch_dtype for slot in large)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, None])
def test_updates_that_bfloat16_would_lose_add_up(kind):
    """A hundred of a ten thousandth of a weight. Without masters each is rounded away."""
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    how = {"lr": 1e-4, "weight_decay": 0.0}
    with_masters = edp.MasterWeights([p], kind, **how) if kind else torch.optim.AdamW([p], **how)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        with_masters.step()
    assert p.tolist() == [0.98828125 if kind else 1.0] * 8
