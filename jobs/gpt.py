"""A small GPT that learns to write Python, byte by byte, from the standard library of this very
interpreter.

    python jobs/gpt.py                    one worker
    python jobs/gpt.py --workers 2        two; kill one while it trains, the result stays the same
                                          to the last bit
    python jobs/gpt.py --workers 4 --sharding optimizer
                                          the optimizer's state divided among the workers, each part
                                          on two of them: the same weights
    python jobs/gpt.py --workers 2 --processes 2
                                          each worker is two processes, over which torch's
                                          fully_shard divides the model
    python jobs/gpt.py --workers 2 --processes 8 --gpu
                                          ... each with a GPU: two nodes of eight
    python jobs/gpt.py --workers 2 --inner-steps 10 --steps 40
                                          ten inner steps in each step (DiLoCo): gradients travel
                                          once in ten batches
    python jobs/gpt.py --local            no Ray, in this process: for a debugger

Nothing is downloaded. The first run writes the text as Parquet shards into a cache folder; to train
on several machines, give all of them one `--data` folder.
"""

import argparse
import math
import os
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_dp as edp

BLOCK = 128  # bytes of context
CACHE = Path("~/.cache/elastic_dp").expanduser()


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # [batch, heads, time, …]
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] -> logits [batch, time, 256]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.byte(tokens) + self.position(places))))

    @torch.no_grad()
    def continue_text(self, prompt: str, length: int, seed: int) -> str:
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())], device=device)
        for _ in range(length):
            top, choices = self(tokens[:, -BLOCK:])[0, -1].topk(40)
            pick = torch.multinomial((top / 0.8).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, choices[pick][None]], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()  # [rows, BLOCK + 1]
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(ctx: edp.TrainContext) -> None:
    """Runs in every worker."""
    config = ctx.config
    model = GPT(config["width"], config["heads"], config["layers"]).to(ctx.device)
    if config["processes"] > 1:
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        for layer in model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
    each = config["inner_steps"] or 1  # batches of a step

    def rate(batch: int) -> float:  # warm up, then a half cosine down to a tenth
        progress = min(batch / (ctx.total_steps * each), 1.0)
        return min(1.0, (batch + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * progress))

    def adamw(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95))

    def inner(model: nn.Module, step: int) -> torch.optim.AdamW:
        optimizer, first = adamw(model), (step - 1) * each
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate(first + i))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    if config["inner_steps"]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        how = {"inner_optimizer": inner, "inner_clip_norm": 1.0}
    else:
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        how = {"scheduler": scheduler, "clip_norm": 1.0}
    every = max(1, 10 // each)
    for step in ctx.steps(model, optimizer, loss_fn, **how):
        if step.number % every == 0 or step.number == ctx.total_steps:
            ctx.log({"loss": step.loss, "lr": step.lr})
    # The loop is over: every worker holds the final weights.
    ctx.log({"sample": model.continue_text("def main(", 300, ctx.seed)})


def write_shards(folder: Path, shards: int = 8) -> None:
    """The source of the standard library as rows of BLOCK + 1 bytes. Aside first: a crash leaves
    nothing half."""
    if folder.exists():
        return
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
    rows = text[: len(text) // (BLOCK + 1) * (BLOCK + 1)].reshape(-1, BLOCK + 1)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    for number, part in enumerate(np.array_split(rows, shards)):
        tokens = pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), BLOCK + 1)
        path = aside / f"part-{number:05d}.parquet"
        pq.write_table(pa.table({"tokens": tokens}), path, row_group_size=1024)
    try:
        aside.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(aside)


def make_trainer(
    *,
    name: str | None = None,
    storage_path: str | None = None,
    data: str | None = None,
    workers: int = 2,
    min_workers: int = 1,
    standby: int = 0,
    virtual_workers: int = 4,
    processes: int = 1,
    gpu: bool = False,
    steps: int = 400,
    inner_steps: int | None = None,
    seed: int = 0,
    config: dict | None = None,
    **options: object,
) -> edp.ElasticTrainer:
    """The job as a value. `options` go to `ElasticTrainer` as they are."""
    folder = Path(data) if data else CACHE / "stdlib-bytes-v1"
    write_shards(folder)
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=storage_path,
        config={"width": 128, "heads": 4, "layers": 3, "lr": 2e-3}
        | {"processes": processes, "inner_steps": inner_steps}
        | (config or {}),
        data=edp.DataConfig(str(folder), micro_batch_size=8, seed=seed),
        scaling=edp.ScalingConfig(
            min_workers=min_workers,
            max_workers=workers,
            virtual_workers=virtual_workers,
            standby=standby,
            processes_per_worker=processes,
            resources_per_worker={"CPU": processes, "GPU": processes} if gpu else {"CPU": 1},
        ),
        max_steps=steps,
        inner_steps=inner_steps,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--virtual-workers", type=int, default=4, help="fixes the global batch")
    parser.add_argument("--processes", type=int, default=1, help="of each worker")
    parser.add_argument("--gpu", action="store_true", help="one for each process")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--inner-steps", type=int, help="of each virtual worker in a step (DiLoCo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the run; the same name again continues it")
    parser.add_argument("--storage-path", help="where runs are kept: a folder or any fsspec URL")
    parser.add_argument("--data", help="folder for the shards, shared by all machines")
    parser.add_argument("--sharding", choices=["optimizer"], help="divide the optimizer's state")
    parser.add_argument("--local", action="store_true", help="in this process, without Ray")
    args = vars(parser.parse_args())
    local = args.pop("local")
    result = make_trainer(**args).fit(local=local)
    print(result.metrics["sample"])
    print(
        f"final loss {result.metrics['loss']:.4f} after {result.step} steps, {result.wall_s:.0f} s"
    )
    print(f"weights sha256 {result.weights_sha256}")


if __name__ == "__main__":
    main()
