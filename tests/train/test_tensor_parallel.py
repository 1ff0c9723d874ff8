"""Workers of several processes with the same rows: torch's tensor parallelism within a worker, our
sums between them. The weights are the same for any number of workers, whatever happens to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from elastic_dp.testing.process_worker_group import preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import group, losses_of
from tests.train.gang.parallelisms import (
    GPT,
    HEADS,
    STEPS,
    TENSOR_PARALLEL,
    WIDTH,
    of_features,
    run,
    split_layers,
    trains_features,
)
from tests.train.gang.test_parallelisms import assert_as_one_process
from tests.train.jobs import cross_entropy

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
tensor = ImportedWhenUsed("torch.distributed.tensor")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

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


@pytest.mark.slow
def test_sequence_parallelism_and_a_loss_of_sharded_logits_train_as_one_process_does() -> None:
    """Gradients of replicated parameters come in parts, and are added up."""
    outcome, one = group(of_features(1), of_sequences)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(one)
    assert_as_one_process(one, TENSOR_PARALLEL, of_sequences)
    expected = outcome.digest
    outcome, two = group(of_features(2), of_sequences)
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
    outcome, _ = group(of_features(1), train)
    assert outcome.error is not None
    assert named in outcome.error, outcome.error


@pytest.mark.slow
def test_bit_that_flips_in_a_parameter_of_all_processes_ends_the_run(tmp_path: Any) -> None:
    """In one process of it alone: its losses are others than those of the other process."""
    fault = WorkerFault("before_forward", 3, 1, process=1, action="flip", once=str(tmp_path / "x"))
    outcome, run = group(of_features(2), trains_features, faults=(fault,))
    assert "the loss of step 3 on virtual worker" in str(outcome.error), losses_of(run)
