"""Workers of several processes, each with a part of the positions of the same rows: attention over
all of them within a worker, `fully_shard` over its processes, our sums between workers. The weights
are the same for any number of workers, whatever happens to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from elastic_dp.config import CheckpointConfig, JobSpec, ScalingConfig
from elastic_dp.errors import SpecError
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun, preload
from elastic_dp.train.fault_injection import WorkerFault
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import ENDLESS, group, losses_of
from tests.train.jobs import adamw, hold
from tests.train.test_gangs import (
    assert_as_one_process,
    digest_of_export,
    each_process_of_each_rank,
    gangs,
)
from tests.train.test_kills import IN_A_STEP, with_faults

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

STEPS, HEADS, WIDTH, POSITIONS = 8, 2, 16, 4


class Gathered(torch.autograd.Function):
    """Takes [batch, heads, positions here, size], and returns it for all positions."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        ctx.group = group
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None


class Transformer(nn.Module):
    """A causal one of one layer, whose rows are 16 numbers: four for each position. `mesh`: its
    processes have a part of the positions each."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.embed, self.place = nn.Linear(4, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [batch, positions here, 4] and the numbers of these positions."""
        here = torch.arange(POSITIONS)
        if self.mesh is not None:
            here = here.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        h = self.embed(x.unflatten(1, (POSITIONS, 4))[:, here]) + self.place(here)
        normed = self.norm1(h)
        q, k, v = (
            part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.mesh is not None:
            k, v = (Gathered.apply(part.contiguous(), self.mesh.get_group()) for part in (k, v))
        mask = here[:, None] >= torch.arange(POSITIONS)[None, :]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        h = h + self.project(attended.transpose(1, 2).flatten(2))
        return self.head(self.norm2(h)), here


def of_positions(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """The mean over all positions but the first, and how many these are: other numbers in each
    process."""
    logits, here = model(batch["x"])
    told = batch["y"][:, None].expand(-1, len(here))
    counts = (here > 0).expand_as(told)
    losses = F.cross_entropy(logits.flatten(0, 1), told.flatten(), reduction="none")
    right = (logits.argmax(-1) == told)[counts].float().mean()
    return losses[counts.flatten()].mean(), float(counts.sum()), {"right": right}


def split_heads() -> dict[str, Any]:
    by_column = dict.fromkeys("qkv", parallel.ColwiseParallel())
    return by_column | {"project": parallel.RowwiseParallel()}


def trains(ctx: Any) -> None:
    mesh = None if ctx._session.gang is None else ctx.mesh["cp"]
    model = Transformer(mesh)
    if mesh is not None:
        if "tp" in ctx.mesh.mesh_dim_names:
            parallel.parallelize_module(model, ctx.mesh["tp"], split_heads())
        fsdp.fully_shard(model, mesh=mesh)
    for step in ctx.steps(model, adamw(model), of_positions, clip_norm=0.5):
        if step.number % 3 == 0:
            ctx.log(ctx.evaluate(of_positions, ctx.config["eval"]))
        ctx.log({"norm": step.grad_norm, "loss": step.loss, **step.metrics})
        hold(ctx, step)


def with_rows_of_their_own(ctx: Any) -> None:
    model = fsdp.fully_shard(Transformer(), mesh=ctx.mesh)
    for _ in ctx.steps(model, adamw(model), of_positions):
        pass


def with_noise(rows: Any) -> Any:
    """All processes of a worker draw the same."""
    batch = default_collate(rows)
    return batch | {"x": batch["x"] + torch.rand(batch["x"].shape)}


def of_parts(workers: int, **options: Any) -> JobSpec:
    spec = gangs(workers, context_parallel_size=2, **options)
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, collate_fn=with_noise))


@pytest.fixture(scope="module")
def calm() -> tuple[RunOutcome, ProcessRun]:
    outcome, run = group(of_parts(1), trains)
    assert (outcome.step, outcome.error) == (STEPS, None), losses_of(run)
    return outcome, run


@pytest.fixture
def undisturbed(calm: tuple[RunOutcome, ProcessRun]) -> RunOutcome:
    return calm[0]


def test_gang_with_parts_of_the_positions_trains_as_one_process_does(
    calm: tuple[RunOutcome, ProcessRun],
) -> None:
    """Losses, norms, metrics and evaluations, of parts with other weights, of rows to which random
    numbers are added."""
    assert_as_one_process(calm[1], of_parts(1), trains, context_parallel_size=1)


def test_loss_of_a_process_costs_its_gang_and_no_step(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=1, once=once)
    outcome, run = group(of_parts(2, config={"body_s": 0.05}), trains, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (undisturbed.digest, ())


def test_positions_of_other_than_all_processes_are_refused_by_name() -> None:
    for processes in (1, 3, 4):
        with pytest.raises(SpecError, match="context_parallel_size is 2 and processes_per_worker"):
            ScalingConfig(processes_per_worker=processes, context_parallel_size=2)
    with pytest.raises(SpecError, match=r"processes_per_worker 4 \(context_parallel_size times"):
        ScalingConfig(processes_per_worker=2, context_parallel_size=2, tensor_parallel_size=2)


@pytest.mark.slow
def test_positions_and_features_of_a_gang_of_four_train_as_one_process_does() -> None:
    """With tensor parallelism over the second dimension of the mesh."""
    both = {"processes_per_worker": 4, "tensor_parallel_size": 2}
    specs = [
        dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, **both))
        for spec in (of_parts(1), of_parts(2))
    ]
    (one, run), (other, _) = (group(spec, trains) for spec in specs)
    assert (one.step, one.error) == (STEPS, None), losses_of(run)
    assert_as_one_process(run, of_parts(1), trains, context_parallel_size=1)
    assert one.digest == other.digest


# --------------------------------------------------------------------------------- the kill matrix


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_gangs_has_the_digest_of_one(workers: int, undisturbed: RunOutcome) -> None:
    outcome, run = group(of_parts(workers), trains)
    assert outcome.digest == undisturbed.digest, losses_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in IN_A_STEP if p != "buffers"])
def test_any_process_may_die_at_any_point_of_a_step(point: str, tmp_path: Any) -> None:
    faults = each_process_of_each_rank(point, 2, tmp_path)
    spec = of_parts(2, steps=ENDLESS, min_workers=1, standby=1, config={"body_s": 0.05})
    outcome, run = with_faults(spec, trains, faults)
    assert outcome.workers_lost == len(faults), losses_of(run)
    expected, _ = group(of_parts(1, steps=outcome.step), trains)
    assert outcome.digest == expected.digest


@pytest.mark.slow
def test_run_with_parts_of_the_positions_goes_on_with_another_number_of_gangs(
    undisturbed: RunOutcome, tmp_path: Any
) -> None:
    """Exports have the whole of its last checkpoint, and rows of their own for the processes are
    refused."""
    checkpoint = CheckpointConfig(every_steps=2)
    first = dataclasses.replace(of_parts(2, steps=4), checkpoint=checkpoint)
    outcome, run = group(first, trains, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(of_parts(1), trains, url=str(tmp_path))
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed.digest), losses_of(run)
    assert digest_of_export(str(tmp_path), Transformer()) == undisturbed.digest
    outcome, _ = group(gangs(1), with_rows_of_their_own, url=str(tmp_path))
    assert "context_parallel_size is 1, but the newest checkpoint" in str(outcome.error)
