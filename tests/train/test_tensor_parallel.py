"""Workers of several processes with the same rows: torch's tensor parallelism within a worker, our
sums between them. The weights are the same for any number of workers, whatever happens to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from elastic_dp.config import CheckpointConfig, JobSpec, ScalingConfig
from elastic_dp.errors import SpecError
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun, preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import (
    ENDLESS,
    group,
    losses_of,
)
from tests.train.jobs import adamw, cross_entropy, hold
from tests.train.test_gangs import (
    assert_as_one_process,
    digest_of_export,
    each_process_of_each_rank,
    gangs,
)
from tests.train.test_kills import IN_A_STEP, with_faults

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
tensor = ImportedWhenUsed("torch.distributed.tensor")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

STEPS, HEADS, WIDTH = 8, 2, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head_norm: nn.Module = nn.Identity()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, time, WIDTH]
        normed, size = self.norm1(x), WIDTH // HEADS
        q, k, v = (
            part(normed).unflatten(-1, (-1, size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = self.head_norm(q), self.head_norm(k)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    """A row is 16 numbers, of which each position has four."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(4, WIDTH), Layer()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, 16] -> [batch, 4]
        y: torch.Tensor = self.head(self.norm(self.layer(self.embed(x.unflatten(1, (4, 4))))))
        return y.mean(1)


def split_layers() -> dict[str, Any]:
    by_column, by_row = parallel.ColwiseParallel, parallel.RowwiseParallel
    return {
        "layer.q": by_column(),
        "layer.k": by_column(),
        "layer.v": by_column(),
        "layer.project": by_row(),
        "layer.mlp.0": by_column(),
        "layer.mlp.2": by_row(),
    }


def trains(ctx: Any) -> None:
    model = GPT()
    if ctx._session.gang is not None:
        parallel.parallelize_module(model, ctx.mesh, split_layers())
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler, clip_norm=0.5):
        if step.number % 3 == 0:
            ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"]))
        ctx.log({"norm": step.grad_norm, "loss": step.loss})
        hold(ctx, step)


def sharing(workers: int, **options: Any) -> JobSpec:
    return gangs(workers, tensor_parallel_size=2, **options)


@pytest.fixture(scope="module")
def calm() -> tuple[RunOutcome, ProcessRun]:
    outcome, run = group(sharing(1), trains)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(run)
    return outcome, run


@pytest.fixture
def undisturbed(calm: tuple[RunOutcome, ProcessRun]) -> RunOutcome:
    return calm[0]


def test_gang_with_the_same_rows_trains_as_one_process_does(
    calm: tuple[RunOutcome, ProcessRun],
) -> None:
    """Losses, norms and evaluations, dropout of whole activations included."""
    assert_as_one_process(calm[1], sharing(1), trains, tensor_parallel_size=1)


def test_loss_of_a_process_costs_its_gang_and_no_step(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=1, once=once)
    outcome, run = group(sharing(2, config={"body_s": 0.05}), trains, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (undisturbed.digest, ())


# ----------------------------------------------------------------------------------- other plans


def of_sequences(ctx: Any) -> None:
    """Normalizations and dropout have a part of the positions on each process, a normalization of
    single heads has a part of the heads, and the loss is taken of sharded logits."""
    model = GPT()
    model.layer.head_norm = nn.LayerNorm(WIDTH // HEADS)
    model.layer.dropout = nn.Identity()  # of parts, so it would draw other numbers than one process
    if ctx._session.gang is None:
        return run(ctx, model, cross_entropy)
    whole, parts = tensor.Replicate(), tensor.Shard(1)
    prepare = parallel.PrepareModuleInput(
        input_layouts=whole, desired_input_layouts=parts, use_local_output=True
    )
    plan = {
        "layer": prepare,
        "layer.norm1": parallel.SequenceParallel(),
        "layer.norm2": parallel.SequenceParallel(),
        "layer.q": parallel.ColwiseParallel(input_layouts=parts),
        "layer.k": parallel.ColwiseParallel(input_layouts=parts),
        "layer.v": parallel.ColwiseParallel(input_layouts=parts),
        "layer.head_norm": parallel.SequenceParallel(sequence_dim=1, use_local_output=True),
        "layer.project": parallel.RowwiseParallel(output_layouts=parts),
        "layer.mlp.0": parallel.ColwiseParallel(input_layouts=parts),
        "layer.mlp.2": parallel.RowwiseParallel(output_layouts=parts),
        "norm": parallel.SequenceParallel(),
        "head": parallel.ColwiseParallel(input_layouts=parts, use_local_output=False),
    }
    parallel.parallelize_module(model, ctx.mesh, plan)
    with parallel.loss_parallel():
        run(ctx, model, cross_entropy)


def run(ctx: Any, model: nn.Module, loss_fn: Any) -> None:
    for step in ctx.steps(model, adamw(model), loss_fn, clip_norm=0.5):
        ctx.log({"norm": step.grad_norm, "loss": step.loss})
        hold(ctx, step)


@pytest.mark.slow
def test_sequence_parallelism_and_a_loss_of_sharded_logits_train_as_one_process_does() -> None:
    """Gradients of replicated parameters come in parts, and are added up."""
    outcome, one = group(sharing(1), of_sequences)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(one)
    assert_as_one_process(one, sharing(1), of_sequences, tensor_parallel_size=1)
    expected = outcome.digest
    outcome, two = group(sharing(2), of_sequences)
    assert outcome.digest == expected, losses_of(two)


# -------------------------------------------------------------------------------------- refusals


def sharded(ctx: Any) -> Any:
    return parallel.parallelize_module(GPT(), ctx.mesh, split_layers())


def without_a_plan(ctx: Any) -> None:
    run(ctx, GPT(), cross_entropy)


def with_fully_shard(ctx: Any) -> None:
    model = sharded(ctx)
    fsdp.fully_shard(model.head, mesh=ctx.mesh)
    run(ctx, model, cross_entropy)


def with_rows_of_their_own(ctx: Any) -> None:
    run(ctx, fsdp.fully_shard(GPT(), mesh=ctx.mesh), cross_entropy)


def with_a_mesh_of_its_own(ctx: Any) -> None:
    run(
        ctx,
        parallel.parallelize_module(GPT(), init_device_mesh("cpu", (2,)), split_layers()),
        cross_entropy,
    )


def with_other_values(ctx: Any) -> None:
    model = sharded(ctx)
    with torch.no_grad():
        model.norm.bias += ctx.mesh.get_local_rank()
    run(ctx, model, cross_entropy)


def with_other_losses(ctx: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch) * (1 + ctx.mesh.get_local_rank())

    run(ctx, sharded(ctx), loss_fn)


def with_other_weights(ctx: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = cross_entropy(model, batch)
        return loss, 1.0 + ctx.mesh.get_local_rank()

    run(ctx, sharded(ctx), loss_fn)


def with_heads_that_are_normalized_apart(ctx: Any) -> None:
    """The gradient of the plain normalization is that of the heads of one process."""
    model = GPT()
    model.layer.head_norm = nn.LayerNorm(WIDTH // HEADS)
    run(ctx, parallel.parallelize_module(model, ctx.mesh, split_layers()), cross_entropy)


def with_a_sharded_buffer(ctx: Any) -> None:
    model = sharded(ctx)
    model.register_buffer(
        "mask", tensor.distribute_tensor(torch.ones(4), ctx.mesh, [tensor.Replicate()])
    )
    run(ctx, model, cross_entropy)


def with_batch_norm(ctx: Any) -> None:
    run(ctx, nn.Sequential(nn.BatchNorm1d(16), sharded(ctx)), cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "named"),
    [
        (with_heads_that_are_normalized_apart, "different gradients for model.layer.head_norm."),
        (without_a_plan, "no parameter of the model is sharded over ctx.mesh"),
        (with_fully_shard, "with this tensor_parallel_size all have the same rows"),
        (with_a_mesh_of_its_own, "model.layer.q.weight is a DTensor, but neither sharded nor"),
        (with_other_values, "model.norm.bias is not sharded by tensor parallelism"),
        (with_other_losses, "the loss of step 1 on virtual worker 0 is"),
        (with_other_weights, "(weight 2) on process 1"),
        (with_a_sharded_buffer, "the buffer model.mask is a DTensor"),
        (with_batch_norm, "a buffer of the model changed"),
    ],
)
def test_job_that_cannot_run_with_the_same_rows_ends_with_its_error(train: Any, named: str) -> None:
    outcome, _ = group(sharing(1), train)
    assert outcome.error is not None
    assert named in outcome.error, outcome.error


def test_sizes_that_do_not_divide_the_processes_and_gpus_are_refused_by_name() -> None:
    for processes in (1, 3):
        with pytest.raises(SpecError, match="tensor_parallel_size is 2 and processes_per_worker"):
            ScalingConfig(processes_per_worker=processes, tensor_parallel_size=2)
    with pytest.raises(SpecError, match="tensor_parallel_size is 2, which does not work on GPUs"):
        ScalingConfig(
            processes_per_worker=2, tensor_parallel_size=2, resources_per_worker={"GPU": 2}
        )


# --------------------------------------------------------------------------------- the kill matrix


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_gangs_has_the_digest_of_one(workers: int, undisturbed: RunOutcome) -> None:
    outcome, run = group(sharing(workers), trains)
    assert outcome.digest == undisturbed.digest, losses_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in IN_A_STEP if p != "buffers"])
def test_any_process_may_die_at_any_point_of_a_step(point: str, tmp_path: Any) -> None:
    faults = each_process_of_each_rank(point, 2, tmp_path)
    config = {"body_s": 0.05}
    spec = sharing(2, steps=ENDLESS, min_workers=1, standby=1, config=config)
    outcome, run = with_faults(spec, trains, faults)
    assert outcome.workers_lost == len(faults), losses_of(run)
    expected, _ = group(sharing(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("point", ["forming", "sending_state", "receiving_state"])
def test_process_may_die_while_a_joiner_gets_the_state(
    point: str, process: int, tmp_path: Any
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    faults = (
        WorkerFault("backward", rank=2, world_size=3, once=first, settled=True),
        WorkerFault(point, world_size=3, process=process, once=second, after=(first,)),
    )
    spec = sharing(3, steps=ENDLESS, min_workers=1, standby=1, config={"body_s": 0.05})
    outcome, run = with_faults(spec, trains, faults)
    assert (outcome.error, outcome.workers_lost) == (None, 2), losses_of(run)
    expected, _ = group(sharing(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
def test_run_that_was_stopped_goes_on_with_another_number_of_gangs(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    """Exports have the whole of its last checkpoint, and rows of their own for the processes are
    refused."""
    checkpoint = CheckpointConfig(every_steps=2)
    first = dataclasses.replace(sharing(2, steps=4), checkpoint=checkpoint)
    outcome, run = group(first, trains, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(sharing(1), trains, url=str(tmp_path))
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed.digest), losses_of(run)
    assert digest_of_export(str(tmp_path), GPT()) == undisturbed.digest
    outcome, _ = group(gangs(1, steps=12), with_rows_of_their_own, url=str(tmp_path))
    assert "tensor_parallel_size is 1, but the newest checkpoint" in str(outcome.error)


@pytest.mark.slow
def test_bit_that_flips_in_a_parameter_of_all_processes_ends_the_run(tmp_path: Any) -> None:
    """In one process of it alone: its losses are others than those of the other process."""
    fault = WorkerFault("before_forward", 3, 1, process=1, action="flip", once=str(tmp_path / "x"))
    outcome, run = group(sharing(2), trains, faults=(fault,))
    assert "the loss of step 3 on virtual worker" in str(outcome.error), losses_of(run)
