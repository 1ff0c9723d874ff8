"""Whole runs with inner steps (`inner_steps=H`, DiLoCo): the weights of a loop in plain PyTorch;
one digest for any number of workers, and after kills, joins and restarts; only lost virtual workers
run again."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from elastic_dp.data import open_data
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import LossError, ModelError, SpecError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.sampling.step_schedule import StepSchedule
from tests.runs import local, spec_of
from tests.train.jobs import classifier, cross_entropy, hold, loop
from tests.train.test_bad_shards import GROUPS, ROWS, SHARDS, points
from tests.train.test_staleness import Moving, put, tree_sum, weights_of

INNER = 3  # steps
MOMENTS = ("exp_avg", "exp_avg_sq")  # as Adam names them


def outer(model):
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def inner(model, step):
    """With a rate that warms up in the inner steps of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 / (1 + step / 10))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 2))
    optimizer.register_step_post_hook(lambda *_: warm_up.step())
    return optimizer


HOW = {"inner_optimizer": inner, "inner_clip_norm": 1.0}


def trains_batch_norm(ctx):
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    loop(ctx, model, outer(model), **HOW)


def measuring(ctx):
    """With metrics of which one is on the device, and not all micro-batches have the other."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

    def loss_fn(model, batch):
        loss, first = cross_entropy(model, batch), int(batch["i"].min())
        metrics = {"twice": loss * 2} | ({"first": first} if first % 2 else {})
        return loss, float(first % 5), metrics

    for step in ctx.steps(model, outer(model), loss_fn, **HOW):
        ctx.log({"loss": step.loss, "weight": step.weight, **step.metrics})
        hold(ctx, step)


def some_without_weight(model, batch):
    """Losses with weights of their own; some have none."""
    first = int(batch["i"].min())
    return cross_entropy(model, batch), 0.0 if first % 5 == 0 else len(batch["y"]) + first % 3


def of_each_step(kept, loss_fn):
    def train(ctx):
        model = classifier()
        kept.append(weights_of(model))
        for step in ctx.steps(model, outer(model), loss_fn, **HOW):
            kept.append((*weights_of(model), step.grad_norm, step.loss, step.weight))

    return train


def in_plain_torch(spec, initial, loss_fn):
    """For each step the weights after it, the mean loss, and its weight."""
    virtual, each = spec.scaling.num_virtual_workers, StepSchedule(spec.inner_steps_by_step)
    assert spec.max_steps is not None
    data = open_data(spec.data, virtual_workers=spec.micro_batches_by_step)
    model = classifier()
    parameters = list(model.parameters())
    put(parameters, initial)
    optimizer, found = outer(model), []
    for step in range(1, spec.max_steps + 1):
        start, changes, weights, losses = weights_of(model), [], [], []
        inner_steps = each.at(step)
        for v in range(virtual):
            inner_optimizer, weight = inner(model, step), 0.0
            for key in range(v * inner_steps, (v + 1) * inner_steps):
                if data.rows(step, key) == 0:
                    continue
                seed_everything(seed_for(spec.data.seed, step, key))
                returned = loss_fn(model, data.batch(step, key))
                loss, own = returned if isinstance(returned, tuple) else (returned, None)
                own = float(data.rows(step, key) if own is None else own)
                if own == 0.0:
                    continue
                inner_optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                inner_optimizer.step()
                losses.append((float(loss.detach()), own))
                weight += own
            changes.append([s - p.detach() for s, p in zip(start, parameters, strict=True)])
            weights.append(weight)
            put(parameters, start)
        rows = [data.rows(step, key) for key in range(virtual * inner_steps)]
        expected = float(sum(rows))
        leaves = [
            [c * (w / expected) if w else torch.full_like(c, -0.0) for c in change]
            for change, w in zip(changes, weights, strict=True)
        ]
        for p, *of_leaves in zip(parameters, *leaves, strict=True):
            p.grad = tree_sum(of_leaves) * (expected / sum(weights))
        optimizer.step()
        total = math.fsum(w for _, w in losses)
        found.append((weights_of(model), math.fsum(x * w for x, w in losses) / total, total))
    return found


@pytest.mark.parametrize(
    ("inner_steps", "loss_fn"),
    [
        (INNER, cross_entropy),
        (INNER, some_without_weight),
        ({0: 1, 2: 3, 5: 2}, cross_entropy),
        ({0: 3, 2: 1}, cross_entropy),
    ],
)
def test_weights_after_each_step_are_those_of_a_loop_in_plain_torch(inner_steps, loss_fn):
    """With a last, shorter step of an epoch, in which one virtual worker makes fewer inner steps
    and others none."""
    kept = []
    spec = spec_of(steps=6, virtual=5, rows=160, tail="short", inner_steps=inner_steps)
    local(spec, of_each_step(kept, loss_fn))
    initial, *after = kept
    expected = in_plain_torch(spec, initial, loss_fn)
    assert len(after) == len(expected) == 6
    for step, ((weights, loss, weight), mine) in enumerate(zip(expected, after, strict=True), 1):
        for value, p in zip(weights, mine, strict=False):
            assert torch.equal(value, p), step
        assert mine[-2] == pytest.approx(loss, rel=1e-12) and mine[-1] == weight
        assert mine[-3] > 0.0


def test_each_row_is_used_once_in_an_epoch_and_in_micro_batches_of_its_size():
    used = []

    def noted(model, batch):
        used.append(batch["i"].tolist())
        return cross_entropy(model, batch)

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, outer(model), noted, **HOW):
            if step.number == 1:
                del used[: -4 * INNER]  # without those of the trial
            ctx.log({"epoch": step.epoch, "ends": step.epoch_end, "weight": step.weight})

    spec = spec_of(steps=6, virtual=4, rows=4 * 4 * INNER * 2 + 10, tail="short", inner_steps=INNER)
    logged = local(spec, train).logged
    half = len(used) // 2
    for epoch in (used[:half], used[half:]):
        assert sorted(i for rows in epoch for i in rows) == list(range(len(spec.data.dataset)))
        assert [len(rows) for rows in epoch] == [4] * 24 + [4, 4, 2]
    assert [x["epoch"] for x in logged] == [0, 0, 0, 1, 1, 1]
    assert [x["ends"] for x in logged] == [False, False, True] * 2
    assert [x["weight"] for x in logged] == [48.0, 48.0, 10.0] * 2


def test_each_row_is_used_once_in_an_epoch_where_the_number_of_inner_steps_changes():
    used = []
    steps_per_epoch = []

    def train(ctx):
        model = classifier()
        steps_per_epoch.append(ctx.steps_per_epoch)
        for step in ctx.steps(model, outer(model), cross_entropy, **HOW):
            ctx.log({"epoch": step.epoch, "ends": step.epoch_end, "weight": step.weight})
            used.append(ctx.inner_steps_before(step.number + 1) - sum(used))

    options = {"rows": 140, "tail": "short", "inner_steps": {0: 1, 2: 3, 5: 2}}
    logged = local(spec_of(steps=8, virtual={0: 2, 3: 4}, workers=1, **options), train).logged
    assert [x["weight"] for x in logged] == [8.0, 8.0, 24.0, 48.0, 48.0, 4.0, 32.0, 32.0]
    assert [x["epoch"] for x in logged] == [0] * 6 + [1] * 2
    assert [x["ends"] for x in logged] == [False] * 5 + [True] + [False] * 2
    assert used == [1, 1, 3, 3, 3, 2, 2, 2]
    assert steps_per_epoch == [6]


def test_buffers_move_in_each_inner_step_and_their_mean_over_virtual_workers_is_taken():
    moved = []

    def train(ctx):
        model = Moving()
        for _ in ctx.steps(model, outer(model), cross_entropy, **HOW):
            moved.append(model.mean.clone())

    spec = spec_of(steps=3, virtual=2, workers=1, inner_steps=INNER)
    local(spec, train)
    data = open_data(spec.data, virtual_workers=2 * INNER)
    mean = torch.zeros(16)
    for step, found in enumerate(moved, 1):
        left = [mean.clone(), mean.clone()]
        for key in range(2 * INNER):
            left[key // INNER].lerp_(data.batch(step, key)["x"].mean(0), 0.5)
        mean = (left[0] + left[1]) / 2
        assert torch.equal(found, mean), step


def with_moments():
    """A model with buffers for the moments of its inner optimizer."""
    model = classifier()
    for i, p in enumerate([*model.parameters()]):
        for name in MOMENTS:
            model.register_buffer(f"{name}_{i}", torch.zeros_like(p))
    return model


def moments_of(model):
    numbers = range(len([*model.parameters()]))
    return [{name: model.get_buffer(f"{name}_{i}") for name in MOMENTS} for i in numbers]


def goes_on(model, step):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for p, moments in zip(model.parameters(), moments_of(model), strict=True):
        optimizer.state[p] = {"step": torch.tensor(float((step - 1) * INNER))} | moments
    return optimizer


def trains_with_moments(ctx):
    model = with_moments()
    loop(ctx, model, torch.optim.SGD(model.parameters(), lr=1.0), inner_optimizer=goes_on)


def test_parameter_without_a_gradient_gets_none_from_the_inner_steps():
    """The outer optimizer would let it decay otherwise."""
    kept = []

    def train(ctx):
        model = nn.ModuleDict({"used": nn.Linear(16, 4), "not": nn.Linear(4, 4)})
        model["used"].bias.requires_grad_(False)
        kept.extend([model["not"].weight.detach().clone(), model["used"].bias.detach().clone()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

        def loss_fn(model, batch):
            return cross_entropy(model["used"], batch)

        before = model["used"].weight.detach().clone()
        for _ in ctx.steps(model, optimizer, loss_fn, **HOW):
            assert not torch.equal(model["used"].weight, before)
        kept.extend([model["not"].weight.detach(), model["used"].bias.detach()])

    local(spec_of(steps=3, inner_steps=INNER), train)
    assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3])


def test_weights_are_put_back_where_an_inner_step_fails():
    kept = []

    def train(ctx):
        model, calls = classifier(), Counter[str]()

        def loss_fn(model, batch):
            calls["all"] += 1
            if calls["all"] == 2 + 2:  # behind two of the trial: the second inner step
                kept.append(weights_of(model))
                raise ZeroDivisionError
            return cross_entropy(model, batch)

        kept.append(weights_of(model))
        try:
            for _ in ctx.steps(model, outer(model), loss_fn, **HOW):
                raise AssertionError
        finally:
            kept.append(weights_of(model))
            assert all(p.grad is None for p in model.parameters())

    with pytest.raises(ZeroDivisionError):
        local(spec_of(steps=3, inner_steps=INNER), train)
    before, inside, after = kept
    assert not any(map(torch.equal, before, inside))
    assert all(map(torch.equal, before, after))


def test_bf16_autocast_has_the_weights_of_the_step_in_each_inner_step():
    """Autocast keeps converted weights: those of the inner step before would be used again."""

    def by_hand(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return cross_entropy(model, batch)

    found = []
    for loss, precision in ((cross_entropy, "bf16"), (by_hand, None)):

        def train(ctx, loss=loss, precision=precision):
            model = classifier()
            for _ in ctx.steps(model, outer(model), loss, precision=precision, **HOW):
                pass
            found.append(weights_of(model))

        local(spec_of(steps=3, inner_steps=INNER), train)
    assert all(map(torch.equal, *found))


def test_inner_optimizer_leaves_no_memory_behind():
    """A scheduler and its optimizer keep each other until they are collected as garbage."""
    made = []

    def keeps(model, step):
        made.append(inner(model, step))
        return made[-1]

    local(spec_of(steps=2, inner_steps=INNER), trained_with(inner_optimizer=keeps))
    assert len(made) == 2 + 2 + 2 * 8  # the checks, the trial, the steps
    assert not any(optimizer.state for optimizer in made)


def test_row_group_that_cannot_be_decoded_is_left_out_in_each_inner_step(tmp_path):
    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, outer(model), cross_entropy, **HOW):
            ctx.log({"weight": step.weight})

    spec = spec_of(steps=8, virtual=2, workers=1, inner_steps=INNER, data=points(tmp_path))
    run = local(spec, train)  # an epoch
    assert sum(line["weight"] for line in run.logged) == SHARDS * GROUPS * ROWS - ROWS
    assert run._session is not None
    assert run._session.skipped == ("row group 2 of part-1.parquet",)


def trained_with(**options):
    def train(ctx):
        model = classifier()
        loop(ctx, model, outer(model), **options)

    return train


def of_another_parameter(model, step):
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])


def test_arguments_that_do_not_fit_are_refused_before_the_first_step():
    once = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for inner_steps, options, error, words in (
        (None, {"inner_optimizer": inner}, SpecError, "ctx.steps got inner_optimizer, and the job"),
        (None, {"inner_clip_norm": 1.0}, SpecError, "ctx.steps got inner_clip_norm, and the job"),
        (3, {}, SpecError, "inner_steps is 3, and ctx.steps got no inner_optimizer"),
        (3, HOW | {"inner_clip_norm": 0.0}, SpecError, "inner_clip_norm is 0.0, must be"),
        (3, HOW | {"precision": "fp16"}, SpecError, 'precision="fp16" scales'),
        (3, HOW | {"noise_scale_every": 1}, SpecError, "noise_scale_every needs"),
        (3, {"inner_optimizer": lambda model: None}, SpecError, "inner_optimizer takes (model)"),
        (3, {"inner_optimizer": lambda model, step: None}, ModelError, "returned a NoneType"),
        (3, {"inner_optimizer": lambda model, step: once}, ModelError, "the same optimizer twice"),
        (3, {"inner_optimizer": of_another_parameter}, ModelError, "the inner optimizer holds a"),
    ):
        with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
            local(spec_of(steps=2, inner_steps=inner_steps), trained_with(**options))


def test_parameter_that_only_the_inner_optimizer_trains_is_refused():
    def train(ctx):
        model = classifier()
        loop(ctx, model, torch.optim.SGD(model[0].parameters(), lr=0.7), **HOW)

    with pytest.raises(ModelError, match=r"inner optimizer trains model\.1\.weight, which the"):
        local(spec_of(steps=2, inner_steps=INNER), train)


def test_inner_optimizer_that_keeps_something_is_refused():
    rates = []

    def of_calls(model, step):
        rates.append(0.1)
        return torch.optim.SGD(model.parameters(), lr=sum(rates))

    with pytest.raises(LossError, match=r"run twice .* gave the pseudo-gradient of model\.0"):
        local(spec_of(steps=2, inner_steps=INNER), trained_with(inner_optimizer=of_calls))


def test_inner_loss_that_is_not_finite_is_named():
    def train(ctx):
        model = classifier()

        def loss_fn(model, batch):
            step = ctx._session.position.step + 1
            return cross_entropy(model, batch) * (math.nan if step == 2 and 7 in batch["i"] else 1)

        loop(ctx, model, outer(model), loss_fn, **HOW)

    spec = spec_of(steps=4, virtual=16, inner_steps=INNER)  # a step is an epoch
    words = r"loss of step 2 is nan on virtual worker \d+, inner step [123] \(row"
    with pytest.raises(LossError, match=words):
        local(spec, train)
