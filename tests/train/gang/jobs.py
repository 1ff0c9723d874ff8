"""The job of the tests of gangs, whose workers have two processes."""

import torch
from torch import nn

from elastic_dp.config import MapStyleData
from elastic_dp.testing.process_worker_group import preload
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import Points, spec_of
from tests.train.jobs import Kept, adamw, classifier, cross_entropy, hold

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
preload("torch.distributed.fsdp")

STEPS = 8


def gangs(workers, *, steps=STEPS, **options):
    """Returns a job whose workers have two processes by default."""
    config = {"eval": MapStyleData(Points(24), micro_batch_size=4)} | options.pop("config", {})
    options = {"min_workers": workers, "processes_per_worker": 2} | options
    return spec_of(
        steps=steps, workers=workers, virtual=4, micro_batch_size=2, config=config, **options
    )


def run(ctx, model, loss_fn=cross_entropy):
    """With clipping, a scheduler, an evaluation in a body, and an average of the losses in
    `state=`."""
    optimizer, average = adamw(model), Kept(0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    state = {"average": average}
    for step in ctx.steps(
        model, optimizer, loss_fn, scheduler=scheduler, clip_norm=0.5, state=state
    ):
        average.value = 0.9 * average.value + 0.1 * step.loss
        if step.number % 3 == 0:
            ctx.log(ctx.evaluate(loss_fn, ctx.config["eval"]))
        told = {"loss": step.loss, "norm": step.grad_norm, "average": average.value}
        ctx.log(told | step.metrics)
        hold(ctx, step)


def fully_sharded(ctx):
    model = classifier()
    if ctx._session.gang is None:
        return model
    for layer in model:
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            fsdp.fully_shard(layer, mesh=ctx.mesh)
    sharded = fsdp.fully_shard(model, mesh=ctx.mesh)
    return sharded


def trains(ctx):
    run(ctx, fully_sharded(ctx))
