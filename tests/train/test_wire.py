"""Whole runs with rounded gradients (`wire="bf16"` and `wire="int8"`): one digest for any number of
workers, and after kills, joins and restarts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.errors import ModelError
from elastic_dp.sampling.seeds import rounding_seed
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
from tests.train.test_finished_work import (
    LARGE_LOSS,
    SMALL_LOSS,
    STEP,
    VIRTUAL,
    counted,
    dies_last,
    passes,
)
from tests.train.test_finished_work import job as job_of_three
from tests.train.test_growing_batch import job as growing_job
from tests.train.test_kills import IN_A_STEP
from tests.train.test_nodes import on_nodes
from tests.train.test_noise_scale import logs, scales

SLOW = pytest.mark.slow
WIRES = ("bf16", "int8")
of_each_wire = pytest.mark.parametrize("wire", WIRES)


def with_wire(spec: JobSpec, wire: str) -> JobSpec:
    return dataclasses.replace(spec, wire=wire)


def as_is(train: Any) -> Any:
    return train


@pytest.mark.parametrize(
    ("workers", "cut"),
    [
        (3, in_small_buckets),
        *(pytest.param(n, as_is, marks=SLOW) for n in (1, 2, 4, 5, 6, 7, 8)),
    ],
)
@of_each_wire
def test_weights_and_noise_are_those_of_one_process_for_any_number_of_workers(
    workers: int, cut: Any, wire: Any
) -> None:
    """With clipping; 11 virtual workers, of which some have fewer rows in the last step of an
    epoch."""
    spec = spec_of(steps=10, virtual=11, rows=150, tail="short", workers=workers)
    spec = dataclasses.replace(
        spec, scaling=dataclasses.replace(spec.scaling, min_workers=workers), wire=wire
    )
    outcome, run = group(spec, cut(logs))
    assert outcome.error is None, outcome.traceback
    calm = local(spec, logs)
    assert outcome.digest == calm.digest
    assert scales(run) == {x["step"]: repr(x["scale"]) for x in calm.logged}
    assert calm.digest != local(dataclasses.replace(spec, wire=None), logs).digest


@of_each_wire
def test_lost_worker_only_its_leaves_run_again_and_the_weights_are_the_same(wire, tmp_path):
    """What the survivors have finished are rounded nodes."""
    dead = WorkerFault("backward", step=STEP, rank=1, nth=4, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2), wire)
    outcome, _ = group(spec, dies_last(counted(tmp_path), tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert sum(passes(tmp_path).values()) == VIRTUAL + 4
    assert outcome.digest == local(spec, counted(tmp_path)).digest


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


@pytest.mark.slow
@of_each_wire
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("point", IN_A_STEP)
def test_worker_killed_anywhere_in_a_step_changes_no_bit(point, rank, wire, tmp_path):
    dead = WorkerFault(point, step=STEP, rank=rank, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2), wire)
    outcome, _ = group(spec, counted(tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, counted(tmp_path)).digest


@pytest.mark.slow
@of_each_wire
@pytest.mark.parametrize("name", ZOO)
def test_zoo_model_through_changing_sizes_has_the_local_digest(name, wire):
    """1 → 3 → 2 workers while it trains."""
    sizes = {2: 3, 9: 2}
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = {"eval": evaluation(), "hold": sizes, "body_s": 0.02}
    spec = with_wire(spec_of(steps=18, workers=1, virtual=6, shape=shape, config=config), wire)
    script = [resize(step, size) for step, size in sizes.items()]
    outcome, _ = group(spec, ZOO[name], script=script)
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 2
    assert outcome.digest == local(spec, ZOO[name]).digest


@pytest.mark.slow
@of_each_wire
def test_growing_batch_on_two_nodes_with_a_kill_has_the_local_digest(wire, tmp_path):
    spec = with_wire(growing_job(config={"hold": dict.fromkeys(range(1, 5), 3)}), wire)
    dead = WorkerFault("backward", step=7, rank=2, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, batch_norm, faults=(dead,), location=on_nodes(2))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, batch_norm).digest


@pytest.mark.slow
@of_each_wire
def test_run_goes_on_from_a_checkpoint_after_all_workers_are_lost(wire, tmp_path):
    url, gate = tmp_path / "run", tmp_path / "gate"
    spec = spec_of(steps=10, workers=2, config={"gates": {6: str(gate)}, "body_s": 0.02})
    spec = with_wire(dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=4)), wire)
    script = [(1, when_committed(url, 4, kill_all)), (1, lambda run: gate.touch())]
    outcome, _ = group(spec, plain, script=script, url=str(url))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= 2
    assert outcome.digest == local(dataclasses.replace(spec, config={}), plain).digest


@pytest.mark.slow
@of_each_wire
@pytest.mark.parametrize("cut", [as_is, in_small_buckets])
def test_run_on_a_simulated_device_has_the_same_bits_after_a_kill(cut, wire, tmp_path):
    dead = WorkerFault("exchange", step=STEP, rank=2, once=str(tmp_path / "dead"))
    spec = with_wire(job_of_three(min_workers=2), wire)
    outcome, _ = group(spec, cut(batch_norm), faults=(dead,), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, batch_norm).digest


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
