"""Moments of an inner optimizer that go on (`edp.InnerMoments`): the weights of a loop in plain
PyTorch; one digest for any number of workers, and after kills, joins and restarts."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp.config import CheckpointConfig
from elastic_dp.data import open_data
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.errors import ModelError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, lines_of, local, resize, spec_of
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import classifier, cross_entropy, loop
from tests.train.test_finished_work import STEP
from tests.train.test_finished_work import job as job_of_three
from tests.train.test_inner_steps import INNER, logs_what_is_sent, put, with_inner
from tests.train.test_kills import IN_A_STEP
from tests.train.test_staleness import weights_of

SLOW = pytest.mark.slow
BETA = 0.9


def with_moments() -> nn.Module:
    model = classifier()
    model.moments = edp.InnerMoments(model)
    return model


def outer(model: Any, **changes: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.moments.outer_groups(**changes), lr=1.0)


def inner(model: Any, step: int) -> torch.optim.Optimizer:
    adam = torch.optim.Adam(model.moments.weights, lr=1e-2, betas=(BETA, 0.95))
    return model.moments.go_on(adam, step=(step - 1) * INNER)


def looks_ahead(model: Any, step: int) -> torch.optim.Optimizer:
    done = (step - 1) * INNER
    momenta = (BETA * (1 - 0.5 * 0.96 ** (i * 0.004)) for i in range(1, done + 1))
    nadam = torch.optim.NAdam(model.moments.weights, lr=1e-2, betas=(BETA, 0.95))
    return model.moments.go_on(nadam, step=done, mu_product=math.prod(momenta))


def trains(ctx: Any) -> None:
    model = with_moments()
    loop(ctx, model, outer(model), inner_optimizer=inner, inner_clip_norm=1.0)


def trains_delayed(ctx: Any) -> None:
    model = with_moments()
    loop(ctx, model, outer(model, momentum_lr=0.5), inner_optimizer=looks_ahead)


# ------------------------------------------------------------------------------- what is computed


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1)


def product(rows: torch.Tensor, columns: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (rows[:, None] * (columns / columns.mean().clamp_min(1e-30))).view_as(p)


def test_moments_are_those_of_a_loop_in_plain_torch() -> None:
    kept: list[tuple[list[torch.Tensor], Any]] = []

    def noted(ctx: Any) -> None:
        model: Any = with_moments()
        kept.append(([p.detach().clone() for p in model.moments.weights], None))
        for _ in ctx.steps(model, outer(model), cross_entropy, inner_optimizer=inner):
            weights = [p.detach().clone() for p in model.moments.weights]
            kept.append((weights, copy.deepcopy(model.moments.state_dict())))

    spec = with_inner(spec_of(steps=3, virtual=2, workers=1))
    local(spec, noted)
    data = open_data(spec.data, virtual_workers=2 * INNER)
    (weights, _), *after = kept
    model = classifier()
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(p) for p in weights]
    factors = [(torch.zeros(len(p)), torch.zeros(by_rows(p).shape[1])) for p in weights]
    for step, (expected, moments) in enumerate(after, 1):
        left = []
        for v in range(2):
            put(parameters, weights)
            optimizer = torch.optim.Adam(parameters, lr=1e-2, betas=(BETA, 0.95))
            for p, momentum, (rows, columns) in zip(parameters, momenta, factors, strict=True):
                optimizer.state[p] = {
                    "step": torch.tensor(float((step - 1) * INNER)),
                    "exp_avg": momentum.clone(),
                    "exp_avg_sq": product(rows, columns, p),
                }
            for key in range(v * INNER, (v + 1) * INNER):
                seed_everything(seed_for(spec.data.seed, step, key))
                optimizer.zero_grad()
                cross_entropy(model, data.batch(step, key)).backward()
                optimizer.step()
            left.append((weights_of(model), [optimizer.state[p] for p in parameters]))
        (one, of_one), (other, of_other) = left
        changes = zip(weights, one, other, strict=True)
        weights = [w - ((w - a) / 2 + (w - b) / 2) for w, a, b in changes]
        states = [*zip(of_one, of_other, strict=True)]
        momenta = [
            m - ((m - a["exp_avg"]) / 2 + (m - b["exp_avg"]) / 2)
            for m, (a, b) in zip(momenta, states, strict=True)
        ]
        second = [[by_rows(x["exp_avg_sq"]) for x in pair] for pair in states]
        factors = [((a.mean(1) + b.mean(1)) / 2, (a.mean(0) + b.mean(0)) / 2) for a, b in second]
        assert all(map(torch.equal, weights, expected)), step
        for number, (momentum, (rows, columns)) in enumerate(zip(momenta, factors, strict=True)):
            assert torch.equal(moments[f"momenta.{number}"], momentum), step
            assert torch.equal(moments[f"rows_{number}"], rows), step
            assert torch.equal(moments[f"columns_{number}"], columns), step


def test_second_moments_of_a_vector_are_kept_as_they_are() -> None:
    model: Any = nn.ParameterDict({"bias": nn.Parameter(torch.randn(5)), "scale": torch.ones(())})
    moments = edp.InnerMoments(model)
    optimizer = torch.optim.AdamW(moments.weights, lr=0.1)
    moments.go_on(optimizer, step=0)
    for p in moments.weights:
        p.grad = torch.randn_like(p)
    optimizer.step()
    again = torch.optim.AdamW(moments.weights, lr=0.1)
    moments.go_on(again, step=1)
    for p in moments.weights:
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(again.state[p][name], optimizer.state[p][name])
        assert again.state[p]["step"] == 1.0


def test_parameters_without_elements_have_no_moments() -> None:
    """Some configurations have a layer of size 0. Means over nothing would be NaN."""
    model = nn.ParameterDict(
        {"none": torch.zeros(0, 3), "row": torch.ones(3), "one": torch.ones([])}
    )
    moments = edp.InnerMoments(model)
    assert set(moments.weights) == {model["row"], model["one"]}


@pytest.mark.parametrize(
    "optimizer", [torch.optim.RMSprop, torch.optim.Adamax, partial(torch.optim.Adam, amsgrad=True)]
)
def test_optimizer_with_other_moments_is_refused_by_name(optimizer: Any) -> None:
    model: Any = with_moments()
    with pytest.raises(ModelError, match="keeps other moments than exp_avg and exp_avg_sq: use"):
        model.moments.go_on(optimizer(model.moments.weights, lr=0.1), step=0)


def test_missing_count_is_refused_by_name() -> None:
    model: Any = with_moments()
    nadam = torch.optim.NAdam(model.moments.weights, lr=0.1)
    with pytest.raises(ModelError, match=r"needs \['mu_product', 'step'\]: pass"):
        model.moments.go_on(nadam, step=0)


def halves_all_rates(model: Any) -> tuple[Any, Any]:
    optimizer = outer(model)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    "made",
    [
        lambda model: (torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9), None),
        lambda model: (torch.optim.SGD(model.moments.weights, lr=1.0), None),
        lambda model: (torch.optim.AdamW(model.moments.outer_groups(), lr=1.0), None),
        halves_all_rates,
    ],
    ids=["momentum", "left out", "AdamW", "scheduler"],
)
def test_outer_optimizer_that_does_not_take_the_mean_is_refused_by_name(made: Any) -> None:
    def train(ctx: Any) -> None:
        model = with_moments()
        optimizer, scheduler = made(model)
        loop(ctx, model, optimizer, scheduler=scheduler, inner_optimizer=inner)

    spec = with_inner(spec_of(steps=3, virtual=4))
    with pytest.raises(ModelError, match="does not take the mean of the momenta of InnerMoments"):
        local(spec, train)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [None, "int8"])
def test_momentum_takes_as_many_bytes_as_the_weights_and_is_rounded_as_they_are(wire):
    def sent(*, moves: bool) -> int:
        def train(ctx: Any) -> None:
            model: Any = nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 256), nn.Linear(256, 4))
            if moves:
                model.moments = edp.InnerMoments(model)
                loop(ctx, model, outer(model), inner_optimizer=inner)
            else:
                sgd = torch.optim.SGD(model.parameters(), lr=1.0)
                loop(ctx, model, sgd, inner_optimizer=fresh_adam)

        spec = with_inner(spec_of(steps=4, workers=2, min_workers=2, virtual=2), wire=wire)
        outcome, run = group(spec, logs_what_is_sent(train))
        assert outcome.error is None, outcome.traceback
        return [line["sent"] for line in lines_of(run) if "sent" in line][-1]

    def fresh_adam(model: Any, step: int) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    assert sent(moves=True) <= 2.2 * sent(moves=False)


# ----------------------------------------------------------------------------- any fleet, any loss


@pytest.mark.parametrize(
    ("wire", "staleness"),
    [
        ("int8", 0),
        *(
            pytest.param(*pair, marks=SLOW)
            for pair in ((None, 0), (None, 1), ("int8", 1), ("bf16", 0), ("bf16", 1))
        ),
    ],
)
def test_run_through_changing_sizes_has_the_local_digest(wire, staleness):
    """1 → 3 → 2 workers while it trains."""
    train = trains_delayed if staleness else trains
    sizes = {2: 3, 6: 2}
    spec = spec_of(steps=9, workers=1, virtual=6, config={"hold": sizes, "body_s": 0.02})
    spec = with_inner(spec, wire=wire, staleness=staleness)
    script = [resize(step, size) for step, size in sizes.items()]
    outcome, _ = group(spec, train, script=script)
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 2
    assert outcome.digest == local(spec, train).digest
    ordinary = with_inner(spec, wire=None, staleness=0)
    same = (wire, staleness) == (None, 0)
    assert (outcome.digest == local(ordinary, train).digest) == same


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "staleness"), [(None, 0), ("int8", 0), ("int8", 1)])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_any_number_of_workers_has_the_local_digest(workers, wire, staleness):
    train = trains_delayed if staleness else trains
    spec = with_inner(spec_of(steps=5, workers=workers, virtual=8), wire=wire, staleness=staleness)
    outcome, _ = group(spec, train)
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "staleness"), [(None, 0), ("int8", 1)])
@pytest.mark.parametrize("point", IN_A_STEP)
def test_worker_killed_anywhere_in_a_step_changes_no_bit(point, wire, staleness, tmp_path):
    train = trains_delayed if staleness else trains
    dead = WorkerFault(point, step=STEP, rank=1, once=str(tmp_path / "dead"))
    spec = with_inner(job_of_three(min_workers=2), wire=wire, staleness=staleness)
    outcome, _ = group(spec, train, faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest


@pytest.mark.slow
def test_run_on_a_simulated_device_has_the_local_digest_after_a_kill(tmp_path):
    dead = WorkerFault("backward", step=STEP, rank=2, once=str(tmp_path / "dead"))
    spec = with_inner(job_of_three(min_workers=2), wire="int8")
    outcome, _ = group(spec, trains, faults=(dead,), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, trains).digest


@pytest.mark.slow
def test_run_goes_on_from_a_checkpoint_after_all_workers_are_lost(tmp_path):
    url, gate = tmp_path / "run", tmp_path / "gate"
    spec = spec_of(steps=10, workers=2, config={"gates": {6: str(gate)}, "body_s": 0.02})
    spec = with_inner(spec, checkpoint=CheckpointConfig(every_steps=4), wire="int8")
    script = [(1, when_committed(url, 4, kill_all)), (1, lambda run: gate.touch())]
    outcome, _ = group(spec, trains, script=script, url=str(url))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= 2
    assert outcome.digest == local(dataclasses.replace(spec, config={}), trains).digest
