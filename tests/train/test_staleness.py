"""Whole runs with delayed gradients (`staleness=1`): the weights of a loop in plain PyTorch; one
digest for any number of workers, and after kills, joins and restarts; the sum of a gradient travels
while the next one is computed."""

from functools import partial

import pytest
import torch

from elastic_dp.data import open_data
from elastic_dp.distributed.cross_worker_reduction import BucketReduction
from elastic_dp.errors import LossError, SpecError
from elastic_dp.extensions.delayed import DelayedGradient
from elastic_dp.extensions.delayed.previous_step import PreviousStep
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.step.leaf_runner import LeafRunner
from elastic_dp.train.step.precision import LossScale
from tests.patience import eventually
from tests.runs import group, local, spec_of
from tests.train.jobs import Kept, adamw, classifier, classify, cross_entropy, plain

LAST = 8  # step


def weights_of_each_step(kept, clip_norm=None):
    """The weights and the norm of the gradient after each step, without anything random."""

    def train(ctx):
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        kept.append(weights_of(model))
        given = {"scheduler": scheduler, "clip_norm": clip_norm}
        for step in ctx.steps(model, optimizer, cross_entropy, **given):
            kept.append((*weights_of(model), step.grad_norm, step.loss))

    return train


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def put(parameters, values):
    with torch.no_grad():
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


def tree_sum(leaves):
    """The left part of a node has the largest power of two of leaves that is not all of them."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return tree_sum(leaves[:left]) + tree_sum(leaves[left:])


def in_plain_torch(spec, initial):
    """The weights before the first step and after each one: θ(t+1) = f(θ(t), g(t-1)), and in steps
    without a delay θ(t+1) = f(θ(t), g(t))."""
    virtual, steps = spec.scaling.num_virtual_workers, spec.max_steps
    data = open_data(spec.data, virtual_workers=spec.scaling.virtual_workers_by_step)
    one, other = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
    model = torch.nn.Sequential(one, torch.nn.Tanh(), other)
    parameters = list(model.parameters())
    put(parameters, initial)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    before, found = None, [weights_of(model)]
    for step in range(1, steps + 1):
        rows = [data.rows(step, v) for v in range(virtual)]
        leaves = []
        for v in range(virtual):
            if rows[v]:
                loss = cross_entropy(model, data.batch(step, v)) * (rows[v] / sum(rows))
                leaves.append(torch.autograd.grad(loss, parameters))
            else:
                leaves.append([torch.full_like(p, -0.0) for p in parameters])
        mine = [tree_sum(list(each)) for each in zip(*leaves, strict=True)]
        is_delayed = StepSchedule(spec.staleness_by_step).at(step) == 1
        applied, before = (before, mine) if is_delayed else (mine, None)
        if applied is not None:
            for p, gradient in zip(parameters, applied, strict=True):
                p.grad = gradient
            optimizer.step()
            scheduler.step()
        found.append(weights_of(model))
    return found


@pytest.mark.parametrize("staleness", [1, {0: 1, 3: 0, 4: 1, 7: 0}])
def test_weights_after_each_step_are_those_of_a_loop_in_plain_torch(staleness):
    """With a last, shorter batch of an epoch, whose loss has other weights."""
    kept = []
    spec = spec_of(steps=LAST, virtual=5, rows=52, tail="short", staleness=staleness)
    local(spec, weights_of_each_step(kept))
    initial, *after = kept
    expected = in_plain_torch(spec, initial)
    for step, (values, mine) in enumerate(zip(expected, [initial, *after], strict=True)):
        for value, p in zip(values, mine[: len(values)], strict=True):
            assert torch.equal(value, p), step
    assert all(map(torch.equal, expected[1], initial))  # there was no gradient to apply
    assert not all(map(torch.equal, expected[2], initial))
    begins = [begin for begin, late in spec.staleness_by_step.items() if late]
    assert [step for step, one in enumerate(after) if one[-2] == 0.0] == begins


def test_norm_and_clipping_are_of_the_gradient_that_is_applied():
    """At step 2 the weights are those of step 1, so g(1) is that of a run that is not delayed."""
    ordinary = []
    late = []
    local(spec_of(steps=3), weights_of_each_step(ordinary, clip_norm=0.1))
    local(spec_of(steps=3, staleness=1), weights_of_each_step(late, clip_norm=0.1))
    assert late[2][-2] == ordinary[1][-2] > 0.1  # the norm before clipping
    assert all(map(torch.equal, late[2][:4], ordinary[1][:4]))
    assert late[1][-1] == ordinary[1][-1]  # a loss is that of its own step
    assert late[2][-1] != ordinary[2][-1]


def test_losses_with_weights_of_their_own_have_the_factor_of_their_step():
    """The mean of a step's losses is by the weights of that step, which the loss function gives."""

    def weighs_the_step(model, batch):
        rows = float(len(batch["y"]))
        return cross_entropy(model, batch), rows * (1.0 + float(batch["i"].min()) / 64)

    def trained(loss_fn):
        kept = []

        def train(ctx):
            model = torch.nn.Linear(16, 4)
            for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn):
                pass
            kept.extend(weights_of(model))

        local(spec_of(steps=5, virtual=1, workers=1, staleness=1), train)
        return kept

    # With one virtual worker the mean is its loss, whatever that weighs.
    for one, other in zip(trained(weighs_the_step), trained(cross_entropy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Moving(torch.nn.Module):
    """Has a buffer that each forward pass moves, and reads."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        found = self.head(x - self.mean)
        self.mean.lerp_(x.mean(0), 0.5)
        return found


def test_buffers_of_a_step_are_there_when_its_leaves_run_again():
    """Leaves of step 2 run again in step 3, and their loss reads a buffer that each step moves."""

    moved = []

    def train(ctx):
        model = Moving()
        for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy):
            moved.append(model.mean.clone())

    spec = spec_of(steps=4, virtual=2, workers=1, staleness=1)
    local(spec, train)
    data = open_data(spec.data, virtual_workers=spec.scaling.virtual_workers_by_step)
    mean = torch.zeros(16)
    for step, found in enumerate(moved, 1):
        left = [mean.lerp(data.batch(step, v)["x"].mean(0), 0.5) for v in range(2)]
        mean = (left[0] + left[1]) / 2
        assert torch.equal(found, mean), step


def test_parameter_that_the_body_freezes_gets_the_gradient_from_before():
    """Leaves of step 2 run again in step 3, when the body has frozen it."""
    moved = []

    def train(ctx):
        model = classifier()
        before = model[0].weight.detach().clone()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            moved.append(not torch.equal(before, model[0].weight))
            before = model[0].weight.detach().clone()
            model[0].requires_grad_(step.number not in (2, 3))

    local(spec_of(steps=6, staleness=1), train)
    assert moved == [False, True, True, False, False, True]  # g(1), g(2), none of 3 and 4, g(5)


def test_memory_for_a_delay_is_there_only_in_delayed_steps():
    """That of the weights and buffers of the step before."""
    held = []

    def train(ctx):
        model = torch.nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ctx.steps(model, optimizer, lambda m, b: m(b["x"]).square().mean()):
            held.append(bool(ctx._session.state.previous._values))

    local(spec_of(steps=11, staleness={0: 0, 4: 1, 8: 0}), train)
    assert held == [False] * 4 + [True] * 3 + [False] * 4  # the gradient of step 8 is dropped


def in_order_of_events(train, folder):
    """Rank 1 sends nothing of its gradients before rank 0 has run its first leaf of the step, and
    rank 0 does not begin its last leaf before it has sent its part of their sum."""

    def ordered(ctx):
        session = ctx._session
        launch, run_leaf, reduce = (
            DelayedGradient._launch,
            LeafRunner._run_leaf,
            BucketReduction.reduce,
        )
        reduced = []
        ran = []

        def file(step):
            return folder / f"rank 0 has run a leaf of step {step}"

        def launches(gradient):
            step = session.position.step + 1
            if session.world_size == 2 and session.rank == 1 and step > 3:
                eventually(file(step).exists)
            launch(gradient)
            reduced.clear()
            ran.clear()

        def reduces(exchange):
            reduced.append(exchange.bucket.number)
            reduce(exchange)

        def runs(leaves, turn, **given):
            step = turn.step
            if session.world_size == 2 and session.rank == 0 and step > 3:
                if ran:
                    file(step).touch()
                if len(ran) == 3:
                    eventually(lambda: leaves.between_leaves() or reduced)
                    with open(folder / "order", "a", encoding="utf-8") as order:
                        order.write(f"{step} {len(reduced)} of the sum, then leaf {len(ran)}\n")
                ran.append(turn.virtual_worker)
            run_leaf(leaves, turn, **given)

        DelayedGradient._launch, LeafRunner._run_leaf = launches, runs
        BucketReduction.reduce = reduces
        train(ctx)

    return ordered


def test_leaves_run_while_the_sum_of_the_step_before_is_in_flight(tmp_path):
    spec = spec_of(steps=6, workers=2, virtual=8, min_workers=2, staleness=1)
    outcome, _ = group(spec, in_order_of_events(plain, tmp_path))
    order = (tmp_path / "order").read_text(encoding="utf-8").splitlines()
    assert order == [f"{step} 1 of the sum, then leaf 3" for step in (4, 5, 6)]
    assert outcome.digest == local(spec, plain).digest


def scaled_by(what):
    def train(ctx):
        weight, model = Kept(0.0), classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        number, c = 0.0, ctx.carry(value=0.0)
        losses = {
            "state": lambda m, b: cross_entropy(m, b) * weight.value,
            "carry": lambda m, b: cross_entropy(m, b) * c.value,
            "lr": lambda m, b: cross_entropy(m, b) * optimizer.param_groups[0]["lr"],
            "scheduler": lambda m, b: cross_entropy(m, b) * scheduler.get_last_lr()[0],
            "variable of the body": lambda m, b: cross_entropy(m, b) * number,
        }
        inner = {}
        if what == "inner optimizer":
            inner["inner_optimizer"] = lambda model, step: torch.optim.SGD(
                model.parameters(), lr=optimizer.param_groups[0]["lr"]
            )
        loss_fn = losses.get(what, cross_entropy)
        given = {"scheduler": scheduler, "state": {"weight": weight}, **inner}
        for step in ctx.steps(model, optimizer, loss_fn, **given):
            number = float(step.number)

    return train


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("state", "weight, which is state['weight']"),
        ("carry", "c, which is state['carry']"),
        ("lr", "optimizer, which is optimizer 0"),
        ("inner optimizer", "optimizer, which is optimizer 0"),
        ("scheduler", "scheduler, which is scheduler="),
        ("variable of the body", "number, which was changed by the body"),
    ],
)
def test_leaf_of_delayed_gradients_refers_to_nothing_that_changes_before_it_runs_again(what, words):
    inner_steps = 2 if what == "inner optimizer" else None
    spec = spec_of(steps=4, workers=1, staleness=1, inner_steps=inner_steps)
    with pytest.raises(LossError, match=r"With staleness=1") as refused:
        local(spec, scaled_by(what))
    assert words in str(refused.value)


class Unnamed:
    """Changes what it returns, and no code names where it is."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def __call__(self, m, b):
        return cross_entropy(m, b) * (1 + self.count)


@pytest.mark.parametrize(("staleness", "step"), [(1, 2), ({0: 0, 2: 1}, 4)])
def test_loss_that_depends_on_the_body_in_a_way_that_is_not_seen_is_refused(staleness, step):
    """In the third delayed step, and not only after the loss of a worker."""

    def train(ctx):
        model, loss_fn = classifier(), Unnamed()
        for _ in ctx.steps(model, adamw(model), loss_fn):
            loss_fn.count += 1

    spec = spec_of(steps=6, staleness=staleness)
    with pytest.raises(LossError, match=rf"loss of step {step} on virtual worker 0 .* staleness=1"):
        local(spec, train)


def test_a_model_may_be_changed_when_its_loss_function_was_refused():
    """By a check that comes after the model is watched."""
    model = classifier()

    def train(ctx):
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

        def loss_fn(m, batch):
            return cross_entropy(m, batch) + 0 * scheduler.last_epoch

        for _ in ctx.steps(model, optimizer, loss_fn, scheduler=scheduler):
            pass

    with pytest.raises(LossError, match="refers to scheduler"):
        local(spec_of(steps=2, staleness=1), train)
    model.add_module("more", torch.nn.Identity())


def test_leaves_of_the_step_before_have_its_loss_scale_each_time_that_they_run_again():
    model, scale = classifier(), LossScale(8.0)
    previous = PreviousStep(model, scale)
    buffers = ModuleBuffers(model, lambda step: 4, lambda point, step: None)
    previous.record(1, 1.0, {}, buffers)
    scale.step_ended(overflow=True)
    for _ in range(2):
        with previous.weights(buffers):
            assert scale.scale == 8.0
        assert scale.scale == 4.0


def test_noise_scale_is_refused_before_the_first_step():
    train = partial(classify, noise_scale_every=1)
    with pytest.raises(SpecError, match=r"noise_scale_every needs .* staleness=1"):
        local(spec_of(steps=2, staleness=1), train)
    with pytest.raises(SpecError, match=r"staleness=\{0: 0, 9: 1\}"):
        local(spec_of(steps=2, staleness={0: 0, 9: 1}), train)
