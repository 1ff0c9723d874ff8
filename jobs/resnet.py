"""A ResNet on shards of images: decoded ahead of the step, cropped and flipped at random.

    python jobs/resnet.py                                 small drawn images, a narrow net
    python jobs/resnet.py --images /data/imagenet/train --size 224 --width 64 --gpu
                                                          a ResNet-18 with one worker per GPU
    python jobs/resnet.py --local                         no Ray, in this process

`--images` has a folder per class. Its images become Parquet shards once (as by `elastic-dp data
convert`), in a folder that all machines must see. Without it, images are drawn, and nothing is
downloaded. Crops and flips are a function of the seed, the step and the virtual worker, so they do
not depend on the number of workers. Needs `pip install 'elastic_dp[images]'`.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import elastic_dp as edp
from elastic_dp.dataprep import convert

CACHE = Path("~/.cache/elastic_dp").expanduser()


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            project = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def resnet18(classes: int, width: int) -> nn.Module:
    """With width 64 the ResNet-18 of He et al. 2015 (https://arxiv.org/abs/1512.03385)."""
    stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage in range(4):
        wider = width << stage
        layers += [Block(channels, wider, 1 if stage == 0 else 2), Block(wider, wider, 1)]
        channels = wider
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class RandomCrop:
    """A random part of each image, scaled to `size` x `size` and flipped half of the time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, batch: dict, rng: np.random.Generator) -> dict:
        return batch | {"image": np.stack([self.crop(image, rng) for image in batch["image"]])}

    def crop(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:  # [height, width, 3]
        height, width, _ = image.shape
        side = int(min(height, width) * rng.uniform(0.7, 1.0))
        top, left = rng.integers(height - side + 1), rng.integers(width - side + 1)
        box = (left, top, left + side, top + side)
        small = Image.fromarray(image).resize((self.size, self.size), Image.BILINEAR, box)
        return np.asarray(small)[:, :: rng.choice((-1, 1))]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
    images = batch["image"].permute(0, 3, 1, 2).float() / 127.5 - 1
    logits, labels = model(images), batch["label"].long()
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels), len(labels), {"accuracy": accuracy}


def train(ctx: edp.TrainContext) -> None:
    """Runs in every worker."""
    config = ctx.config
    torch.manual_seed(ctx.seed)
    model = resnet18(config["classes"], config["width"]).to(ctx.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.total_steps)
    how = {"scheduler": scheduler, "precision": config["precision"]}
    for step in ctx.steps(model, optimizer, loss_fn, **how):
        if step.number % 10 == 0:
            ctx.log({"loss": step.loss} | step.metrics)


def draw_images(folder: Path, classes: int = 4, of_each: int = 64, size: int = 40) -> None:
    """A bright bar on noise. Its direction is the class."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] - size / 2
    for label in range(classes):
        (folder / f"class-{label}").mkdir(parents=True)
        angle = np.pi * label / classes
        for number in range(of_each):
            distance = np.abs(x * np.sin(angle) + y * np.cos(angle) - rng.uniform(-6, 6))
            pixels = rng.integers(0, 90, (size, size, 3)) + (distance < 4)[..., None] * 150
            image = Image.fromarray(pixels.astype(np.uint8))
            image.save(folder / f"class-{label}" / f"{number}.png")


def make_trainer(
    *,
    images: str | None = None,
    data: str | None = None,
    size: int = 32,
    width: int = 8,
    workers: int = 2,
    virtual_workers: int = 4,
    micro_batch_size: int = 16,
    data_workers: int = 0,
    gpu: bool = False,
    epochs: int = 10,
    lr: float = 0.1,
    name: str | None = None,
    storage_path: str | None = None,
) -> edp.ElasticTrainer:
    """The job as a value."""
    folder = Path(data) if data else CACHE / "resnet"
    shards = folder / "shards"
    if not shards.exists():
        source = Path(images) if images else folder / "drawn"
        if not source.exists():
            draw_images(source)
        aside = folder / f"shards.{os.getpid()}"
        convert(str(source), str(aside))
        aside.rename(shards)
    classes = sum(1 for one in Path(images or folder / "drawn").iterdir() if one.is_dir())
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=storage_path,
        config={"classes": classes, "width": width, "lr": lr, "precision": "bf16" if gpu else None},
        data=edp.DataConfig(
            str(shards),
            micro_batch_size=micro_batch_size,
            columns=["image", "label"],
            decode={"image": "rgb"},
            transform=RandomCrop(size),
            workers=data_workers,
            epochs=epochs,
        ),
        scaling=edp.ScalingConfig(
            max_workers=workers,
            virtual_workers=virtual_workers,
            resources_per_worker={"CPU": 1, "GPU": 1} if gpu else {"CPU": 1},
        ),
        checkpoint=edp.CheckpointConfig(every_s=600),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", help="a folder of images, with a folder per class")
    parser.add_argument("--data", help="folder for the shards, shared by all machines")
    parser.add_argument("--size", type=int, default=32, help="pixels of a crop")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--virtual-workers", type=int, default=4, help="fixes the global batch")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--data-workers", type=int, default=0, help="processes that decode")
    parser.add_argument("--gpu", action="store_true", help="one for each worker, and bf16")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--name", help="of the run; the same name again continues it")
    parser.add_argument("--storage-path", help="where runs are kept: a folder or any fsspec URL")
    parser.add_argument("--local", action="store_true", help="in this process, without Ray")
    args = vars(parser.parse_args())
    local = args.pop("local")
    result = make_trainer(**args).fit(local=local)
    print(f"accuracy {result.metrics['accuracy']:.1%} after {result.step} steps")
    print(f"weights sha256 {result.weights_sha256}")


if __name__ == "__main__":
    main()
