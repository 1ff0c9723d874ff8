"""Whole runs with rounded gradients (`wire="bf16"` and `wire="int8"`): one digest for any number of
workers, and after kills, joins and restarts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from elastic_dp.config import JobSpec
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.errors import ModelError
from elastic_dp.sampling.seeds import rounding_seed
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, spec_of
from tests.train.jobs import (
    adamw,
    bf16_parameters,
    classifier,
    loop,
    plain,
)
from tests.train.test_finished_work import (
    LARGE_LOSS,
    SMALL_LOSS,
    counted,
)
from tests.train.test_finished_work import job as job_of_three

WIRES = ("bf16", "int8")
of_each_wire = pytest.mark.parametrize("wire", WIRES)


def with_wire(spec: JobSpec, wire: str) -> JobSpec:
    return dataclasses.replace(spec, wire=wire)


@pytest.mark.slow
@of_each_wire
@pytest.mark.parametrize("step", [LARGE_LOSS, SMALL_LOSS], ids=["overflows", "smaller scale"])
def test_overflow_is_seen_through_the_rounding_and_halves_the_loss_scale(step, wire, tmp_path):
    dead = WorkerFault("backward", step=step, rank=1, nth=4, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2), wire)
    train = counted(tmp_path, precision="fp16", large_loss=LARGE_LOSS)
    outcome, _ = group(spec, train, faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest
    scales = dict(line.split() for line in (tmp_path / "scales").read_text().splitlines())
    assert float(scales[str(SMALL_LOSS)]) == float(scales[str(LARGE_LOSS)]) / 2


def test_each_step_and_seed_rounds_its_own_way(monkeypatch):
    """What is drawn for `wire="int8"`."""
    begun = []
    begin = GradientReducer.begin

    def recorded(self, seed=0, **options):
        begun.append(seed)
        begin(self, seed, **options)

    monkeypatch.setattr(GradientReducer, "begin", recorded)
    for seed in (0, 1):
        spec = with_wire(spec_of(steps=3), "int8")
        local(dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=seed)), plain)
    assert begun == [rounding_seed(seed, step) for seed in (0, 1) for step in (1, 2, 3)]
    assert len(set(begun)) == 6


@of_each_wire
def test_model_in_bf16_has_nothing_to_round(wire):
    spec = spec_of(steps=4)
    rounded = with_wire(spec, wire)
    assert local(rounded, bf16_parameters).digest == local(spec, bf16_parameters).digest


def test_model_in_fp64_is_refused_before_the_first_step():
    def train(ctx):
        model = classifier().to(torch.float64)
        loop(ctx, model, adamw(model))

    with pytest.raises(ModelError, match=r"model\.0\.weight is of torch\.float64, and wire='bf16'"):
        local(with_wire(spec_of(steps=2), "bf16"), train)
