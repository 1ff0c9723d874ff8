"""Workers of several processes: torch's `fully_shard` within a worker, our sums between them. The
weights are the same for any number of workers, whatever happens to them."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from elastic_dp.config import CheckpointConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.errors import SpecError
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun, preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import ENDLESS, Points, group, lines_of, local, losses_of, resize, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy
from tests.train.test_kills import IN_A_STEP, with_faults

preload("torch.distributed.fsdp", "torch.distributed.tensor")

STEPS = 8
KEYS = ("step", "norm", "average", "eval_loss")


def model_of(ctx: Any) -> nn.Module:
    model = classifier()
    if ctx._session.gang is None:
        return model
    for layer in model:
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            fully_shard(layer, mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


def trains(ctx: Any) -> None:
    """With clipping, a scheduler, an evaluation in a body, and an average of the losses in
    `state=`."""
    model = model_of(ctx)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    average = Average()
    for step in ctx.steps(
        model,
        optimizer,
        cross_entropy,
        scheduler=scheduler,
        clip_norm=0.5,
        state={"average": average},
    ):
        average.value = 0.9 * average.value + 0.1 * step.loss
        if step.number % 3 == 0:
            ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"]))
        ctx.log({"norm": step.grad_norm, "average": average.value})
        time.sleep(ctx.config.get("body_s", 0.0))


class Average:
    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def gangs(workers: int, *, steps: int = STEPS, **options: Any) -> JobSpec:
    config = {"eval": MapStyleData(Points(24), micro_batch_size=4)} | options.pop("config", {})
    options.setdefault("min_workers", workers)
    return spec_of(
        steps=steps,
        workers=workers,
        virtual=4,
        micro_batch_size=2,
        processes_per_worker=2,
        config=config,
        **options,
    )


@pytest.fixture(scope="module")
def calm() -> tuple[RunOutcome, ProcessRun]:
    outcome, run = group(gangs(1), trains)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(run)
    return outcome, run


@pytest.fixture
def undisturbed(calm: tuple[RunOutcome, ProcessRun]) -> RunOutcome:
    return calm[0]


def test_gang_trains_as_one_process_does_on_the_same_rows(
    calm: tuple[RunOutcome, ProcessRun],
) -> None:
    """Two processes with four virtual workers, and one with eight: losses, norms and evaluations of
    the same micro-batches, dropout included."""
    logged = [{k: v for k, v in x.items() if k in KEYS} for x in lines_of(calm[1])]
    logged = [line for line in logged if "norm" in line or "eval_loss" in line]
    scaling = dataclasses.replace(gangs(1).scaling, processes_per_worker=1, virtual_workers=8)
    alone = local(dataclasses.replace(gangs(1), scaling=scaling), trains).logged
    assert [line.keys() for line in logged] == [line.keys() for line in alone]
    for one, other in zip(logged, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_two_gangs_have_the_digest_of_one(undisturbed: RunOutcome) -> None:
    outcome, run = group(gangs(2), trains)
    assert outcome.digest == undisturbed.digest, losses_of(run)
    assert outcome.inexact_because == ()


@pytest.mark.parametrize("process", [0, 1])
def test_loss_of_a_process_costs_its_gang_and_no_step(
    process: int, undisturbed: RunOutcome, tmp_path: Any
) -> None:
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=process, once=once)
    outcome, run = group(gangs(2, config={"body_s": 0.05}), trains, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert outcome.digest == undisturbed.digest


def test_run_that_was_stopped_goes_on_with_another_number_of_gangs(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    checkpoint = CheckpointConfig(every_steps=2)
    first = dataclasses.replace(gangs(2, steps=4), checkpoint=checkpoint)
    outcome, run = group(first, trains, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(gangs(1), trains, url=str(tmp_path))
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed.digest), losses_of(run)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"exact": False}, "exact is False"),
        ({"wire": "bf16"}, "wire is 'bf16'"),
        ({"sharding": "optimizer"}, "sharding is 'optimizer'"),
    ],
)
def test_gangs_with_other_strategies_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=f"processes_per_worker is 2 and {named}"):
        dataclasses.replace(gangs(2), **given)


def test_gangs_on_gpus_and_short_batches_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="does not work on GPUs yet"):
        ScalingConfig(processes_per_worker=2, resources_per_worker={"GPU": 2})
    with pytest.raises(SpecError, match="tail is 'short'"):
        gangs(2, tail="short")


def in_parts(ctx: Any) -> None:
    model = classifier()
    fully_shard(model[0], mesh=ctx.mesh)
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def tensor_parallel(ctx: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    parallelize_module(model, ctx.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def batch_norm(ctx: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    fully_shard(model, mesh=ctx.mesh)
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def raises_on_one(ctx: Any) -> None:
    model = model_of(ctx)

    def loss_fn(m: nn.Module, batch: Any) -> Any:
        if ctx.mesh.get_local_rank() == 1:
            raise KeyError("on one process")
        return cross_entropy(m, batch)

    for _ in ctx.steps(model, adamw(model), loss_fn):
        pass


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (in_parts, "not sharded over ctx.mesh"),
        (tensor_parallel, "tensor parallelism"),
        (batch_norm, "a buffer of the model changed"),
        (raises_on_one, "on one process"),
    ],
)
def test_job_that_cannot_run_ends_with_its_error(train: Any, named: str) -> None:
    outcome, _ = group(gangs(1), train)
    assert outcome.error is not None
    assert named in outcome.error, outcome.error


def with_a_mesh_of_its_own(ctx: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(classifier(), mesh=init_device_mesh("cpu", (1,)))
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def test_sharded_model_without_a_gang_is_refused() -> None:
    outcome, _ = group(spec_of(steps=2, workers=1), with_a_mesh_of_its_own)
    assert outcome.error is not None
    assert "is a DTensor" in outcome.error and "processes_per_worker" in outcome.error


# --------------------------------------------------------------------------------- the kill matrix


def each_process_of_each_rank(point: str, workers: int, tmp_path: Any) -> tuple[WorkerFault, ...]:
    """One after another dies at `point`, with all gangs there."""
    victims = [(rank, process) for rank in range(workers) for process in (0, 1)]
    files = [str(tmp_path / f"{rank}-{process}") for rank, process in victims]
    return tuple(
        WorkerFault(
            point,
            rank=rank,
            process=process,
            world_size=workers,
            once=file,
            after=tuple(files[:number]),
            settled=True,
        )
        for number, ((rank, process), file) in enumerate(zip(victims, files, strict=True))
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_gangs_has_the_digest_of_one(workers: int, undisturbed: RunOutcome) -> None:
    outcome, run = group(gangs(workers), trains)
    assert outcome.digest == undisturbed.digest, losses_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in IN_A_STEP if p != "buffers"])
def test_any_process_may_die_at_any_point_of_a_step(point: str, tmp_path: Any) -> None:
    faults = each_process_of_each_rank(point, 2, tmp_path)
    config = {"body_s": 0.05}
    spec = gangs(2, steps=ENDLESS, min_workers=1, standby=1, config=config)
    outcome, run = with_faults(spec, trains, faults)
    assert outcome.workers_lost == len(faults), losses_of(run)
    expected, _ = group(gangs(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
def test_gangs_join_and_leave_while_they_train() -> None:
    spec = gangs(1, steps=24, config={"body_s": 0.05})
    spec = dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, min_workers=1))
    outcome, run = group(spec, trains, script=[resize(2, 3), resize(12, 2)])
    expected, _ = group(gangs(1, steps=24), trains)
    assert outcome.digest == expected.digest, losses_of(run)
