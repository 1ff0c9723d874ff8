"""A small network with BatchNorm and dropout, half a second a step until there is a file `finish`
beside the data: no fault comes too late. With `--local` in this process, and at full speed.

The pods read it from the run's volume, so it imports nothing of this repository."""

import argparse
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import elastic_dp as edp

ROWS, EPOCHS = 2048, 200


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def train(ctx: edp.TrainContext) -> None:
    model = nn.Sequential(
        *(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3)),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in ctx.steps(model, optimizer, loss_fn):
        ctx.log({"loss": step.loss, "size": ctx.world_size})
        if "finish" in ctx.config and not Path(ctx.config["finish"]).exists():
            time.sleep(0.5)


def write_rows(path: Path) -> None:
    """Write them aside first: a head that is lost meanwhile leaves nothing half."""
    chance = np.random.default_rng(0)
    pixels = pa.array(chance.random(ROWS * 64, dtype=np.float32))
    images = pa.FixedSizeListArray.from_arrays(pixels, 64)
    labels = pa.array(chance.integers(0, 10, ROWS))
    path.parent.mkdir(exist_ok=True)
    aside = path.with_suffix(".aside")
    pq.write_table(pa.table({"image": images, "label": labels}), aside, row_group_size=128)
    aside.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
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
        data=edp.DataConfig(str(options.data), micro_batch_size=16, epochs=EPOCHS, seed=0),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=4),
    )
    result = trainer.fit(local=options.local)
    print(f"weights sha256 {result.weights_sha256} after {result.step} steps")


if __name__ == "__main__":
    main()
