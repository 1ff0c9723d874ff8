"""Workers of four processes, of which each two have the same rows: torch's tensor parallelism and
`fully_shard` within a worker, our sums between them. The weights are the same for any number of
workers, whatever happens to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_dp.testing.process_worker_group import preload
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import group
from tests.train.gang.parallelisms import (
    Model,
    of_four,
    run,
    sharded_twice,
    split_all_layers,
    split_layers,
)
from tests.train.jobs import cross_entropy

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

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

    run(ctx, sharded_twice(ctx), loss_fn)


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
