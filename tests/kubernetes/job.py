"""A small GPT with dropout, half a second a step until there is a file `finish` in the data's
folder: no fault comes too late. With `--local` in this process, and at full speed.

The pods read it from the run's volume, so it imports nothing of this repository."""

import argparse
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_dp as edp

ROWS, TOKENS, WIDTH = 2048, 16, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            *(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
        )

    def forward(self, x: Tensor) -> Tensor:  # [rows, TOKENS, WIDTH]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layer, self.head = Layer(), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:  # [rows, TOKENS] -> [rows, TOKENS, 256]
        return self.head(self.layer(self.byte(tokens) + self.position.weight))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(ctx: edp.TrainContext) -> None:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in ctx.steps(model, optimizer, loss_fn, clip_norm=1.0):
        ctx.log({"loss": step.loss, "size": ctx.world_size})
        if "finish" in ctx.config and not Path(ctx.config["finish"]).exists():
            time.sleep(0.5)


def write_rows(path: Path) -> None:
    """Write them aside first: a head that is lost meanwhile leaves nothing half."""
    chance = np.random.default_rng(0)
    text = pa.array(chance.integers(0, 256, ROWS * (TOKENS + 1), dtype=np.uint8))
    tokens = pa.FixedSizeListArray.from_arrays(text, TOKENS + 1)
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".aside")
    pq.write_table(pa.table({"tokens": tokens}), aside, row_group_size=128)
    aside.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--local", action="store_true")
    options = parser.parse_args()
    rows = options.data / "rows.parquet"
    if not rows.exists():
        write_rows(rows)
    trainer = edp.ElasticTrainer(
        train,
        name="digits",
        storage_path=str(options.data / "runs") if options.local else None,
        config={} if options.local else {"finish": f"{options.data}/finish"},
        data=edp.DataConfig(str(options.data), micro_batch_size=16, epochs=options.epochs, seed=0),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=4),
    )
    result = trainer.fit(local=options.local)
    print(f"weights sha256 {result.weights_sha256} after {result.step} steps")


if __name__ == "__main__":
    main()
