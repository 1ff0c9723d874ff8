"""The gradient noise scale: the textbook's on a model where it is known, the same bits for any
number of workers, and carried through joins and checkpoints."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.errors import LoopError, SpecError
from elastic_dp.extensions.noise_scale import SQUARE, TRACE, estimated
from elastic_dp.train.state.train_state import StepRecord
from tests.runs import PATIENT, local, spec_of
from tests.train.jobs import adamw, classifier, classify, cross_entropy, hold

FEATURES, ROWS = 20, 8192


class Gaussian(torch.utils.data.Dataset):
    """Row i is drawn from N(mean, diag(variances))."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.variances = torch.linspace(0.5, 2.0, FEATURES)
        noise = torch.randn((ROWS, FEATURES), generator=generator)
        self.x = 0.3 + noise * self.variances.sqrt()

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": self.x[i]}


class Point(nn.Module):
    """The loss ½·|θ - x|² of a row has the gradient θ - x: G = θ - mean(x), Σ = cov(x)."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        return 0.5 * (self.theta - x).square().sum(1).mean()


def measured(ctx):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = edp.NoiseScale(decay=ctx.config.get("decay", 0.99))
    options = {"noise_scale_every": 1, "state": {"noise": noise}, "clip_norm": 0.1}
    loss_fn = ctx.config.get("loss", lambda m, batch: m(batch["x"]))
    for step in ctx.steps(model, optimizer, loss_fn, **options):
        noise.update(step)
        square, trace = step.metrics[SQUARE], step.metrics[TRACE]
        ctx.log({"scale": noise.value, "square": square, "trace": trace})


def gaussian(steps, virtual, **config):
    return JobSpec(
        name="noise",
        data=MapStyleData(Gaussian(), micro_batch_size=4),
        config=config,
        scaling=ScalingConfig(virtual_workers=virtual, threads_per_worker=1),
        failure=PATIENT,
        max_steps=steps,
    )


@pytest.mark.parametrize(
    "virtual",
    [pytest.param(8, marks=pytest.mark.slow), {0: 4, 60: 16}],
    ids=["constant", "growing"],
)
def test_noise_scale_is_the_textbooks_within_a_tenth_for_a_gaussian(virtual):
    x = Gaussian().x.double()
    textbook = x.var(0).sum() / x.mean(0).square().sum()
    assert local(gaussian(200, virtual), measured).logged[-1]["scale"] == pytest.approx(
        float(textbook), rel=0.1
    )


def test_weights_are_the_unit_of_the_noise_scale():
    """Rows that count three times each: a third as noisy for each unit of weight, and three times
    as many units."""
    weighs = {"loss": lambda m, batch: (m(batch["x"]), 3.0 * len(batch["x"]))}
    plain = local(gaussian(5, 4), measured).logged
    threefold = local(gaussian(5, 4, **weighs), measured).logged
    for one, three in zip(plain, threefold, strict=True):
        assert three["scale"] == pytest.approx(3 * one["scale"])
        assert three["square"] == pytest.approx(one["square"])


def test_estimates_are_those_of_the_papers_equations():
    """Appendix A.1, for four micro-batches of 8 rows; and none of a single one."""
    leaves, big = [2.0, 3.0, 4.0, 7.0], 1.5
    found = estimated([(square, 8.0) for square in leaves], big)
    small, b, big_b = sum(leaves) / 4, 8.0, 32.0
    assert found[SQUARE] == pytest.approx((big_b * big - b * small) / (big_b - b))
    assert found[TRACE] == pytest.approx((small - big) / (1 / b - 1 / big_b))
    assert estimated([(2.0, 8.0)], 2.0) == {} == estimated([(math.inf, 8.0)] * 2, 1.0)


def logs(ctx):
    model, noise = classifier(), edp.NoiseScale()
    options = {"noise_scale_every": 2, "state": {"noise": noise}, "clip_norm": 0.5}
    for step in ctx.steps(model, adamw(model), cross_entropy, **options):
        assert {*step.metrics} == (set() if step.number % 2 else {SQUARE, TRACE})
        noise.update(step)
        ctx.log({"scale": noise.value})
        hold(ctx, step)


def job(**options):
    return spec_of(steps=10, virtual={0: 4, 7: 6}, rows=300, tail="short", **options)


def test_measuring_changes_no_bit_of_the_weights():
    assert local(job(), logs).digest == local(job(), partial(classify, clip_norm=0.5)).digest


def of(*, square, trace):
    return SimpleNamespace(metrics={SQUARE: square, TRACE: trace})


def test_step_noise_is_refused_with_what_to_write_instead():
    with pytest.raises(LoopError, match=r"write noise\.update\(step\)"):
        _ = edp.Step(StepRecord(1, 0, False, 0.0, 1.0, {}, 0.1), None).noise


def test_proposal_is_twice_the_batch_once_the_noise_scale_reaches_that():
    noise = edp.NoiseScale(decay=0.5)
    assert math.isnan(noise.value) and noise.proposes(8, 4) == 8
    noise.update(of(square=1.0, trace=63.0))
    noise.update(SimpleNamespace(metrics={"own": 1.0}))
    assert noise.value == pytest.approx(63.0) and noise.proposes(8, 4) == 8
    noise.update(of(square=1.0, trace=66.0))
    assert noise.proposes(8, 4) == 16
    noise.update(of(square=-9.0, trace=66.0))
    assert noise.value == math.inf and noise.proposes(8, 4) == 8


@pytest.mark.parametrize("decay", [1.0, -0.1, True, "x", math.nan])
def test_bad_decay_is_refused_by_name(decay):
    with pytest.raises(SpecError, match="decay is"):
        edp.NoiseScale(decay=decay)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_bad_interval_is_refused_by_name(every):
    with pytest.raises(SpecError, match="noise_scale_every is"):
        local(job(), partial(classify, noise_scale_every=every))


def test_mean_of_the_estimates_has_no_bias():
    """Over an epoch each row counts as often as any other, and the mean of |G|² and tr(Σ) is right
    to some per cent."""
    x = Gaussian().x.double()
    logged = local(gaussian(ROWS // 32, 8), measured).logged
    square, trace = (sum(s[name] for s in logged) / len(logged) for name in ("square", "trace"))
    assert trace == pytest.approx(float(x.var(0).sum()), rel=0.02)
    assert square == pytest.approx(float(x.mean(0).square().sum()), rel=0.1)
