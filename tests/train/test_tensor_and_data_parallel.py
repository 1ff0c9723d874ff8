"""Workers of four processes, of which each two have the same rows: torch's tensor parallelism and
`fully_shard` within a worker, our sums between them. The weights are the same for any number of
workers, whatever happens to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun, preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import ENDLESS, group, losses_of
from tests.train.jobs import adamw, cross_entropy, hold
from tests.train.test_gangs import (
    assert_as_one_process,
    digest_of_export,
    each_process_of_each_rank,
    gangs,
)
from tests.train.test_kills import IN_A_STEP, with_faults
from tests.train.test_tensor_parallel import GPT, HEADS, WIDTH, split_layers

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

STEPS = 8


class Model(GPT):
    """A model whose parameters are divided in each way: over both dimensions of the mesh, along one
    dimension of the tensor or two; over one of them, with the whole or nothing on the other; and
    into parts of different sizes, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.head_norm = nn.LayerNorm(WIDTH // HEADS)
        self.odd, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.scale
        return y + self.odd(y).mean(1, keepdim=True)


def split_all_layers() -> dict[str, Any]:
    """With the normalization of single heads: each process has the whole of it, for a part of the
    heads."""
    by_heads = parallel.SequenceParallel(sequence_dim=1, use_local_output=True)
    return split_layers() | {"layer.head_norm": by_heads}


def sharded(ctx: Any) -> Any:
    model = parallel.parallelize_module(Model(), ctx.mesh["tp"], split_all_layers())
    fsdp.fully_shard(model.layer, mesh=ctx.mesh["dp"])
    return fsdp.fully_shard(model, mesh=ctx.mesh["dp"])


def run(ctx: Any, model: nn.Module, loss_fn: Any = cross_entropy) -> None:
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in ctx.steps(model, optimizer, loss_fn, scheduler=scheduler, clip_norm=0.5):
        if step.number % 3 == 0:
            ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"]))
        ctx.log({"norm": step.grad_norm, "loss": step.loss})
        hold(ctx, step)


def trains(ctx: Any) -> None:
    run(ctx, Model() if ctx._session.gang is None else sharded(ctx))


def of_four(workers: int, **options: Any) -> JobSpec:
    spec = gangs(workers, tensor_parallel_size=2, **options)
    return dataclasses.replace(
        spec, scaling=dataclasses.replace(spec.scaling, processes_per_worker=4)
    )


@pytest.fixture(scope="module")
def calm() -> tuple[RunOutcome, ProcessRun]:
    outcome, run = group(of_four(1), trains)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(run)
    return outcome, run


@pytest.fixture
def undisturbed(calm: tuple[RunOutcome, ProcessRun]) -> RunOutcome:
    return calm[0]


def test_gang_of_four_trains_as_one_process_does_on_the_same_rows(
    calm: tuple[RunOutcome, ProcessRun],
) -> None:
    """Two times two processes with four virtual workers, and one process with eight: losses, norms
    and evaluations, dropout of whole activations included."""
    alone = {"tensor_parallel_size": 1, "virtual_workers": 8}
    assert_as_one_process(calm[1], of_four(1), trains, **alone)


def test_loss_of_a_process_costs_its_gang_and_no_step(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=3, once=once)
    outcome, run = group(of_four(2, config={"body_s": 0.05}), trains, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (undisturbed.digest, ())


# -------------------------------------------------------------------------------------- refusals


def without_a_plan(ctx: Any) -> None:
    run(ctx, fsdp.fully_shard(Model(), mesh=ctx.mesh["dp"]))


def without_fully_shard(ctx: Any) -> None:
    run(ctx, parallel.parallelize_module(Model(), ctx.mesh["tp"], split_all_layers()))


def with_rows_of_their_own(ctx: Any) -> None:
    run(ctx, fsdp.fully_shard(Model(), mesh=ctx.mesh))


def with_fully_shard_of_the_layer_only(ctx: Any) -> None:
    model = parallel.parallelize_module(Model(), ctx.mesh["tp"], split_all_layers())
    fsdp.fully_shard(model.layer, mesh=ctx.mesh["dp"])
    run(ctx, model)


def with_fully_shard_over_the_same_rows(ctx: Any) -> None:
    run(ctx, fsdp.fully_shard(Model(), mesh=ctx.mesh["tp"]))


def with_other_values(ctx: Any) -> None:
    model = Model()
    with torch.no_grad():
        model.norm.bias += ctx.mesh.get_local_rank("tp")
    parallel.parallelize_module(model, ctx.mesh["tp"], split_all_layers())
    run(ctx, fsdp.fully_shard(model, mesh=ctx.mesh["dp"]))


def with_other_losses(ctx: Any) -> None:
    """Those of the second pair of processes differ, and those of the first do not."""

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        place = ctx.mesh.get_local_rank("dp") * ctx.mesh.get_local_rank("tp")
        return cross_entropy(model, batch) * (1 + place)

    run(ctx, sharded(ctx), loss_fn)


def with_heads_that_are_normalized_apart(ctx: Any) -> None:
    """The gradient of the plain normalization is that of the heads of one process."""
    model = parallel.parallelize_module(Model(), ctx.mesh["tp"], split_layers())
    run(ctx, fsdp.fully_shard(model, mesh=ctx.mesh["dp"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "named"),
    [
        (without_a_plan, 'no parameter of the model is sharded over ctx.mesh["tp"]'),
        (without_fully_shard, 'is not sharded over ctx.mesh["dp"]: call fully_shard(model, mesh'),
        (with_fully_shard_of_the_layer_only, 'model.scale is not sharded over ctx.mesh["dp"]'),
        (with_fully_shard_over_the_same_rows, 'model.scale is not sharded over ctx.mesh["dp"]'),
        # torch's hybrid sharding: over one dimension, with copies over the other
        (with_rows_of_their_own, 'model.scale is not sharded over ctx.mesh["dp"]'),
        (with_other_values, "model.norm.bias is not sharded by tensor parallelism, and"),
        (with_other_losses, "on process 2 of its worker, and"),
        (with_heads_that_are_normalized_apart, "different gradients for model.layer.head_norm."),
    ],
)
def test_job_that_cannot_run_on_two_dimensions_ends_with_its_error(train: Any, named: str) -> None:
    outcome, _ = group(of_four(1), train)
    assert outcome.error is not None
    assert named in outcome.error, outcome.error


# --------------------------------------------------------------------------------- the kill matrix


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_gangs_of_four_has_the_digest_of_one(
    workers: int, undisturbed: RunOutcome
) -> None:
    outcome, run = group(of_four(workers), trains)
    assert outcome.digest == undisturbed.digest, losses_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in IN_A_STEP if p != "buffers"])
def test_any_of_four_processes_may_die_at_any_point_of_a_step(point: str, tmp_path: Any) -> None:
    faults = each_process_of_each_rank(point, 2, tmp_path, processes=4)
    spec = of_four(2, steps=ENDLESS, min_workers=1, standby=1, config={"body_s": 0.05})
    outcome, run = with_faults(spec, trains, faults)
    assert outcome.workers_lost == len(faults), losses_of(run)
    expected, _ = group(of_four(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forming", "sending_state", "receiving_state"])
def test_process_of_four_may_die_while_a_joiner_gets_the_state(point: str, tmp_path: Any) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    faults = (
        WorkerFault("backward", rank=2, world_size=3, once=first, settled=True),
        WorkerFault(point, world_size=3, process=3, once=second, after=(first,)),
    )
    spec = of_four(3, steps=ENDLESS, min_workers=1, standby=1, config={"body_s": 0.05})
    outcome, run = with_faults(spec, trains, faults)
    assert (outcome.error, outcome.workers_lost) == (None, 2), losses_of(run)
    expected, _ = group(of_four(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
def test_run_of_gangs_of_four_goes_on_with_another_number_of_them(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    """Exports have the whole of its last checkpoint, and other rows for the processes are
    refused."""
    checkpoint = CheckpointConfig(every_steps=2)
    first = dataclasses.replace(of_four(2, steps=4), checkpoint=checkpoint)
    outcome, run = group(first, trains, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(of_four(1), trains, url=str(tmp_path))
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed.digest), losses_of(run)
    assert digest_of_export(str(tmp_path), Model()) == undisturbed.digest
    scaling = dataclasses.replace(of_four(1).scaling, tensor_parallel_size=1)
    other = dataclasses.replace(of_four(1), scaling=scaling)
    outcome, _ = group(other, with_rows_of_their_own, url=str(tmp_path))
    assert "tensor_parallel_size is 1, but the newest checkpoint" in str(outcome.error)
