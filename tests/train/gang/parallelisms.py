"""The jobs of the tests of gangs: one for each way to divide a model over the processes of a
worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from elastic_dp.config import JobSpec, MapStyleData
from elastic_dp.testing.process_worker_group import preload
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import Points, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
parallel = ImportedWhenUsed("torch.distributed.tensor.parallel")
preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")

STEPS, HEADS, WIDTH, POSITIONS = 8, 2, 16, 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallelism:
    """A job whose workers are gangs of so many `processes`."""

    name: str
    spec: Callable[..., JobSpec]  # takes the number of workers, and options of `spec_of`
    train: Callable[[Any], None]
    whole: Callable[[], nn.Module]  # makes the model that is divided
    loss_fn: Callable[..., Any] = cross_entropy
    processes: int = 2
    alone: Mapping[str, int]  # with these fields of `ScalingConfig` one process has the same rows
    other_rows: Mapping[str, int]  # with these ones processes have others


def gangs(workers: int, *, steps: int = STEPS, **options: Any) -> JobSpec:
    """Returns a job whose workers have two processes, with rows of their own by default."""
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


def scaled(spec: JobSpec, **fields: int) -> JobSpec:
    """Returns the job with these other fields of `ScalingConfig`."""
    return replace(spec, scaling=replace(spec.scaling, **fields))


class Average:
    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def run(ctx: Any, model: nn.Module, loss_fn: Callable[..., Any] = cross_entropy) -> None:
    """With clipping, a scheduler, an evaluation in a body, and an average of the losses in
    `state=`."""
    optimizer, average = adamw(model), Average()
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


# ------------------------------------------------------------------------------------ fully_shard


def fully_sharded(ctx: Any) -> nn.Module:
    model = classifier()
    if ctx._session.gang is None:
        return model
    for layer in model:
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            fsdp.fully_shard(layer, mesh=ctx.mesh)
    sharded: nn.Module = fsdp.fully_shard(model, mesh=ctx.mesh)
    return sharded


def trains(ctx: Any) -> None:
    run(ctx, fully_sharded(ctx))


FULLY_SHARD = Parallelism(
    name="fully_shard",
    spec=gangs,
    train=trains,
    whole=classifier,
    alone={"virtual_workers": 8},
    other_rows={"processes_per_worker": 1},
)

# ----------------------------------------------------------------------------- tensor parallelism


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
        normed = self.norm1(x)
        q, k, v = (heads_of(part(normed)) for part in (self.q, self.k, self.v))
        q, k = self.head_norm(q), self.head_norm(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, time, width] -> [batch, heads, time, size]"""
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class GPT(nn.Module):
    """A row is 16 numbers, of which each position has four."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(4, WIDTH), Layer()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, 16] -> [batch, 4]
        h = self.embed(x.unflatten(1, (POSITIONS, 4)))
        y: torch.Tensor = self.head(self.norm(self.layer(h)))
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


def trains_features(ctx: Any) -> None:
    model = GPT()
    if ctx._session.gang is not None:
        parallel.parallelize_module(model, ctx.mesh, split_layers())
    run(ctx, model)


def of_features(workers: int, **options: Any) -> JobSpec:
    return gangs(workers, tensor_parallel_size=2, **options)


TENSOR_PARALLEL = Parallelism(
    name="tensor_parallel",
    spec=of_features,
    train=trains_features,
    whole=GPT,
    alone={"tensor_parallel_size": 1},
    other_rows={"tensor_parallel_size": 1},
)

# -------------------------------------------------------------- tensor parallelism and fully_shard


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


def sharded_twice(ctx: Any) -> Any:
    model = parallel.parallelize_module(Model(), ctx.mesh["tp"], split_all_layers())
    fsdp.fully_shard(model.layer, mesh=ctx.mesh["dp"])
    return fsdp.fully_shard(model, mesh=ctx.mesh["dp"])


def trains_on_two_dimensions(ctx: Any) -> None:
    run(ctx, Model() if ctx._session.gang is None else sharded_twice(ctx))


def of_four(workers: int, **options: Any) -> JobSpec:
    return scaled(of_features(workers, **options), processes_per_worker=4)


TENSOR_AND_DATA_PARALLEL = Parallelism(
    name="tensor_and_data_parallel",
    spec=of_four,
    train=trains_on_two_dimensions,
    whole=Model,
    processes=4,
    alone={"tensor_parallel_size": 1, "virtual_workers": 8},
    other_rows={"tensor_parallel_size": 1},
)

# ---------------------------------------------------------------------------- context parallelism


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
        every = torch.arange(POSITIONS, device=x.device)
        here = every
        if self.mesh is not None:
            here = every.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        h = self.embed(x.unflatten(1, (POSITIONS, 4))[:, here]) + self.place(here)
        normed = self.norm1(h)
        q, k, v = (heads_of(part(normed)) for part in (self.q, self.k, self.v))
        if self.mesh is not None:
            k, v = (Gathered.apply(part.contiguous(), self.mesh.get_group()) for part in (k, v))
        mask = here[:, None] >= every[None, :]
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


def trains_positions(ctx: Any) -> None:
    mesh = None if ctx._session.gang is None else ctx.mesh["cp"]
    model = Transformer(mesh)
    if mesh is not None:
        if "tp" in ctx.mesh.mesh_dim_names:
            parallel.parallelize_module(model, ctx.mesh["tp"], split_heads())
        fsdp.fully_shard(model, mesh=mesh)
    run(ctx, model, of_positions)


def with_noise(rows: Any) -> Any:
    """All processes of a worker draw the same."""
    batch = default_collate(rows)
    return batch | {"x": batch["x"] + torch.rand(batch["x"].shape)}


def of_parts(workers: int, **options: Any) -> JobSpec:
    spec = gangs(workers, context_parallel_size=2, **options)
    return replace(spec, data=replace(spec.data, collate_fn=with_noise))


CONTEXT_PARALLEL = Parallelism(
    name="context_parallel",
    spec=of_parts,
    train=trains_positions,
    whole=Transformer,
    loss_fn=of_positions,
    alone={"context_parallel_size": 1},
    other_rows={"context_parallel_size": 1},
)


def of_parts_and_features(workers: int, **options: Any) -> JobSpec:
    spec = of_parts(workers, **options)
    return scaled(spec, processes_per_worker=4, tensor_parallel_size=2)


CONTEXT_AND_TENSOR_PARALLEL = replace(
    CONTEXT_PARALLEL,
    name="context_and_tensor_parallel",
    spec=of_parts_and_features,
    processes=4,
    alone={"context_parallel_size": 1, "tensor_parallel_size": 1},
)

PARALLELISMS = (FULLY_SHARD, TENSOR_PARALLEL, TENSOR_AND_DATA_PARALLEL, CONTEXT_PARALLEL)
