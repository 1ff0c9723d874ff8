"""A small convolutional net on real handwritten digits, with BatchNorm, dropout and evaluation as
it trains.

    python jobs/digits.py                 about 20 seconds on one core, 98 to 99 % of the test
                                          digits right
    python jobs/digits.py --workers 2     the same weights, to the last bit

The 1,797 digits of 8 x 8 pixels come with scikit-learn (`pip install 'elastic_dp[jobs]'`), nothing
is downloaded. BatchNorm's statistics are those of one micro-batch, whatever the number of workers;
so is the dropout.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic_dp as edp

CACHE = Path("~/.cache/elastic_dp").expanduser()


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def make_model(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        convolution(1, width),
        convolution(width, width),
        nn.MaxPool2d(2),  # 4 x 4
        convolution(width, 2 * width),
        nn.MaxPool2d(2),  # 2 x 2
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, 10),
    )


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    """(mean loss, what it weighs, metrics). Training and `ctx.evaluate` call it alike."""
    images, labels = batch["image"].float().unsqueeze(1) / 16, batch["label"]
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels), len(labels), {"accuracy": accuracy}


def train(ctx: edp.TrainContext) -> None:
    """Runs in every worker."""
    config = ctx.config
    model = make_model(config["width"], config["dropout"]).to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.total_steps)
    for step in ctx.steps(model, optimizer, loss_fn, scheduler=scheduler):
        if step.epoch_end:
            seen = {"loss": step.loss, "accuracy": step.metrics["accuracy"]}
            ctx.log(seen | ctx.evaluate(loss_fn, config["eval"]))


def write_shards(folder: Path) -> None:
    """Every fifth digit is for the test. Written aside first: a crash leaves nothing half."""
    if folder.exists():
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    is_test = np.arange(len(digits.target)) % 5 == 0
    for part, chosen in (("train", ~is_test), ("test", is_test)):
        (aside / part).mkdir(parents=True)
        pixels = pa.array(digits.images[chosen].astype(np.uint8).reshape(-1))
        rows = pa.FixedSizeListArray.from_arrays(pixels, 8)
        images = pa.FixedSizeListArray.from_arrays(rows, 8)
        table = pa.table({"image": images, "label": digits.target[chosen].astype(np.int64)})
        pq.write_table(table, aside / part / "part-0.parquet", row_group_size=128)
    try:
        aside.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(aside)


def make_trainer(
    *,
    name: str | None = None,
    storage_path: str | None = None,
    data: str | None = None,
    workers: int = 1,
    min_workers: int = 1,
    virtual_workers: int = 4,
    epochs: int = 20,
    seed: int = 0,
    **options: object,
) -> edp.ElasticTrainer:
    """The job as a value. `options` go to `ElasticTrainer` as they are."""
    folder = Path(data) if data else CACHE / "digits-v1"
    write_shards(folder)
    test = edp.DataConfig(str(folder / "test"), micro_batch_size=90)
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=storage_path,
        config={"width": 32, "dropout": 0.3, "lr": 4e-3, "eval": test},
        data=edp.DataConfig(
            str(folder / "train"), micro_batch_size=16, epochs=epochs, seed=seed, tail="short"
        ),
        scaling=edp.ScalingConfig(
            min_workers=min_workers, max_workers=workers, virtual_workers=virtual_workers
        ),
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--min-workers", type=int, default=1)
    parser.add_argument("--virtual-workers", type=int, default=4, help="fixes the global batch")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the run; the same name again continues it")
    parser.add_argument("--storage-path", help="where runs are kept: a folder or any fsspec URL")
    parser.add_argument("--data", help="folder for the shards, shared by all machines")
    parser.add_argument("--local", action="store_true", help="in this process, without Ray")
    args = vars(parser.parse_args())
    local = args.pop("local")
    result = make_trainer(**args).fit(local=local)
    print(f"test accuracy {result.metrics['eval_accuracy']:.2%} after {result.step} steps")
    print(f"weights sha256 {result.weights_sha256}")


if __name__ == "__main__":
    main()
