"""Workers of several processes: torch's `fully_shard` within a worker, our sums between them. The
weights are the same for any number of workers, whatever happens to them."""

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.errors import SpecError
from elastic_dp.testing.process_worker_group import preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.cluster.test_budgets import is_first
from tests.imported_when_used import ImportedWhenUsed
from tests.patience import eventually
from tests.runs import ENDLESS, goes_on, group, losses_of, never_put_off, resize, spec_of
from tests.train.checkpointing.test_worker_checkpointer import times_lost, when_committed
from tests.train.gang.jobs import STEPS, fully_sharded, gangs, trains
from tests.train.gang.test_kills_of_processes import calm
from tests.train.jobs import adamw, classifier, classify, cross_entropy, loop

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
tensor = ImportedWhenUsed("torch.distributed.tensor")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor")


def undisturbed(steps=STEPS):
    return calm(steps)[0].digest


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"exact": False}, "exact is False"),
        ({"wire": "bf16"}, "wire is 'bf16'"),
        ({"sharding": "optimizer"}, "sharding is 'optimizer'"),
    ],
)
def test_gangs_with_other_strategies_are_refused_by_name(given, named):
    with pytest.raises(SpecError, match=f"processes_per_worker is 2 and {named}"):
        dataclasses.replace(gangs(2), **given)


def test_gangs_with_short_batches_are_refused_by_name():
    with pytest.raises(SpecError, match="tail is 'short'"):
        gangs(2, tail="short")


def in_parts(ctx):
    model = classifier()
    fsdp.fully_shard(model[0], mesh=ctx.mesh)
    loop(ctx, model, adamw(model))


def tensor_parallel(ctx):
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    parallel.parallelize_module(
        model, ctx.mesh, {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    )
    loop(ctx, model, adamw(model))


def partly_sharded_by_hand(ctx):
    """A parameter that is sharded over the mesh, and whose gradient nobody averages."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    parts = tensor.distribute_tensor(model[1].bias.detach(), ctx.mesh, [tensor.Shard(0)])
    model[1].bias = nn.Parameter(parts)
    fsdp.fully_shard(model, mesh=ctx.mesh, ignored_params={model[1].bias})
    loop(ctx, model, adamw(model))


class Routed(nn.Module):
    """Two layers of equal size, of which a batch takes one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x, taken):
        y = self.layers[taken](x)
        return y


def other_layers_for_other_rows(ctx):
    model = Routed()
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=ctx.mesh)
    fsdp.fully_shard(model, mesh=ctx.mesh)

    def loss_fn(m, batch):
        taken = ctx.mesh.get_local_rank()
        return nn.functional.cross_entropy(m(batch["x"], taken), batch["y"])

    loop(ctx, model, adamw(model), loss_fn)


def evaluates_on_one(ctx):
    model = fully_sharded(ctx)
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        if ctx.mesh.get_local_rank() == 1:
            ctx.evaluate(cross_entropy, ctx.config["eval"])


def batch_norm(ctx):
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    fsdp.fully_shard(model, mesh=ctx.mesh)
    loop(ctx, model, adamw(model))


def raises_on_one(ctx):
    model = fully_sharded(ctx)

    def loss_fn(m, batch):
        if ctx.mesh.get_local_rank() == 1:
            raise KeyError("on one process")
        return cross_entropy(m, batch)

    loop(ctx, model, adamw(model), loss_fn)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (in_parts, "not sharded over ctx.mesh"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (classify, "not sharded over ctx.mesh"),
                (tensor_parallel, "is a DTensor over ctx.mesh, but not one of fully_shard"),
                (partly_sharded_by_hand, "1.bias is a DTensor over ctx.mesh, but not one of"),
                (other_layers_for_other_rows, "runs other layers for other rows"),
                (evaluates_on_one, "all processes of a worker must run the same program"),
                (batch_norm, "a buffer of the model changed"),
                (raises_on_one, "on one process"),
            )
        ),
    ],
)
def test_job_that_cannot_run_ends_with_its_error(train, named):
    outcome, _ = group(gangs(1), train, fails=True)
    assert outcome.error is not None
    assert named in outcome.error, outcome.error


def with_a_mesh_of_its_own(ctx):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fsdp.fully_shard(classifier(), mesh=init_device_mesh("cpu", (1,)))
    loop(ctx, model, adamw(model))


def test_sharded_model_without_a_gang_is_refused():
    outcome, _ = group(spec_of(steps=2, workers=1), with_a_mesh_of_its_own, fails=True)
    assert outcome.error is not None
    assert "is a DTensor" in outcome.error and "processes_per_worker" in outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_process_may_die_while_a_checkpoint_is_taken_or_read(process, tmp_path):
    """One dies while the state is gathered for a checkpoint, then each worker loses one at once,
    and one dies while the state is restored."""
    url, gate = str(tmp_path / "run"), tmp_path / "gate"
    taking, reading = str(tmp_path / "taking"), str(tmp_path / "reading")
    faults = (
        WorkerFault("keeping", 2, rank=1, world_size=2, process=process, once=taking),
        WorkerFault("restoring", process=process, once=reading, after=(taking,)),
    )

    def each_loses_one(run):
        before = times_lost(run)
        for worker, first in list(run.worker_group.processes.items()):
            (first, *run.worker_group.followers[worker])[process].kill()
        eventually(lambda: times_lost(run) > before, run.controller.status)
        gate.touch()

    every = CheckpointConfig(every_steps=2)
    spec = gangs(2, steps=12, config={"gates": {9: str(gate)}}, checkpoint=every)
    script = [(8, when_committed(url, 8, each_loses_one))]
    outcome, run = group(spec, never_put_off(trains), faults=faults, script=script, url=url)
    assert (outcome.error, outcome.workers_lost) == (None, 4), losses_of(run)
    assert outcome.digest == undisturbed(12)


@pytest.mark.slow
def test_gangs_join_and_leave_while_they_train():
    spec = gangs(1, steps=24, config={"body_s": 0.05})
    outcome, run = group(spec, trains, script=[resize(2, 3), resize(12, 2)])
    assert outcome.digest == undisturbed(24), losses_of(run)


def dies_in_a_collective(ctx):
    """In each generation of two, process ctx.config["process"] of some worker dies in a step while
    the others of its worker wait for it in the forward pass: DEATHS times."""
    model = fully_sharded(ctx)
    folder = Path(ctx.config["folder"])

    def loss_fn(m, batch):
        session = ctx._session
        if (
            (session.world_size, ctx.mesh.get_local_rank()) == (2, ctx.config["process"])
            and len(list(folder.iterdir())) < DEATHS
            and is_first(folder / str(session.generation))
        ):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(m, batch)

    loop(ctx, model, adamw(model), loss_fn, clip_norm=0.5)


DEATHS = 4


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_death_within_a_collective_of_torch_is_no_error_of_user_code(process, tmp_path):
    """The process that waits for the dead one there gets an exception."""

    def all_died(run):
        eventually(lambda: len(list(tmp_path.iterdir())) == DEATHS or run.controller.ended.is_set())

    config = {"body_s": 0.02, "process": process, "folder": str(tmp_path)}
    spec = gangs(2, steps=ENDLESS, min_workers=1, standby=1, config=config)
    script = [(0, all_died), (0, goes_on), (0, StopRequested("enough"))]
    outcome, run = group(spec, dies_in_a_collective, script=script)
    assert (outcome.error, outcome.workers_lost) == (None, DEATHS), losses_of(run)
    expected, _ = group(gangs(1, steps=outcome.step, config=config), dies_in_a_collective)
    assert outcome.digest == expected.digest
