"""Whole runs with gradients rounded to bfloat16 (`wire="bf16"`): one digest for any number of
workers, and after kills, joins and restarts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.errors import ModelError
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, resize, spec_of
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import (
    ZOO,
    adamw,
    batch_norm,
    bf16_parameters,
    classifier,
    in_small_buckets,
    loop,
    plain,
)
from tests.train.test_exact import evaluation
from tests.train.test_finished_work import STEP, VIRTUAL, counted, passes
from tests.train.test_finished_work import job as job_of_three
from tests.train.test_kills import IN_A_STEP
from tests.train.test_noise_scale import logs, scales

SLOW = pytest.mark.slow


def with_wire(spec: JobSpec) -> JobSpec:
    return dataclasses.replace(spec, wire="bf16")


def as_is(train: Any) -> Any:
    return train


@pytest.mark.parametrize(
    ("workers", "cut"),
    [
        (3, in_small_buckets),
        *(pytest.param(n, as_is, marks=SLOW) for n in (1, 2, 4, 5, 6, 7, 8)),
    ],
)
def test_weights_and_noise_are_those_of_one_process_for_any_number_of_workers(
    workers: int, cut: Any
) -> None:
    """With clipping; 11 virtual workers, of which some have fewer rows in the last step of an
    epoch."""
    spec = spec_of(steps=10, virtual=11, rows=150, tail="short", workers=workers)
    spec = dataclasses.replace(
        spec, scaling=dataclasses.replace(spec.scaling, min_workers=workers), wire="bf16"
    )
    outcome, run = group(spec, cut(logs))
    assert outcome.error is None, outcome.traceback
    calm = local(spec, logs)
    assert outcome.digest == calm.digest
    assert scales(run) == {x["step"]: repr(x["scale"]) for x in calm.logged}
    assert calm.digest != local(dataclasses.replace(spec, wire=None), logs).digest


def test_lost_worker_only_its_leaves_run_again_and_the_weights_are_the_same(tmp_path):
    """What the survivors have finished are rounded nodes."""
    dead = WorkerFault("backward", step=STEP, rank=1, nth=4, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2))
    outcome, _ = group(spec, counted(tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert sum(passes(tmp_path).values()) == VIRTUAL + 4
    assert outcome.digest == local(spec, counted(tmp_path)).digest


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("point", IN_A_STEP)
def test_worker_killed_anywhere_in_a_step_changes_no_bit(point, rank, tmp_path):
    dead = WorkerFault(point, step=STEP, rank=rank, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2))
    outcome, _ = group(spec, counted(tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, counted(tmp_path)).digest


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_zoo_model_through_changing_sizes_has_the_local_digest(name):
    """1 → 3 → 2 workers while it trains."""
    sizes = {2: 3, 9: 2}
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = {"eval": evaluation(), "hold": sizes, "body_s": 0.02}
    spec = with_wire(spec_of(steps=18, workers=1, virtual=6, shape=shape, config=config))
    script = [resize(step, size) for step, size in sizes.items()]
    outcome, _ = group(spec, ZOO[name], script=script)
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 2
    assert outcome.digest == local(spec, ZOO[name]).digest


@pytest.mark.slow
def test_run_goes_on_from_a_checkpoint_after_all_workers_are_lost(tmp_path):
    url, gate = tmp_path / "run", tmp_path / "gate"
    spec = spec_of(steps=10, workers=2, config={"gates": {6: str(gate)}, "body_s": 0.02})
    spec = with_wire(dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=4)))
    script = [(1, when_committed(url, 4, kill_all)), (1, lambda run: gate.touch())]
    outcome, _ = group(spec, plain, script=script, url=str(url))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= 2
    assert outcome.digest == local(dataclasses.replace(spec, config={}), plain).digest


@pytest.mark.slow
@pytest.mark.parametrize("cut", [as_is, in_small_buckets])
def test_run_on_a_simulated_device_has_the_same_bits_after_a_kill(cut, tmp_path):
    dead = WorkerFault("exchange", step=STEP, rank=2, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2))
    outcome, _ = group(spec, cut(batch_norm), faults=(dead,), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, batch_norm).digest


def test_model_in_bf16_has_nothing_to_round():
    spec = spec_of(steps=4)
    assert local(with_wire(spec), bf16_parameters).digest == local(spec, bf16_parameters).digest


def test_model_in_fp64_is_refused_before_the_first_step():
    def train(ctx):
        model = classifier().to(torch.float64)
        loop(ctx, model, adamw(model))

    with pytest.raises(ModelError, match=r"model\.0\.weight is of torch\.float64, and wire='bf16'"):
        local(with_wire(spec_of(steps=2)), train)
