"""A small LightningModule and its data, made from nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.functional import accuracy

from tests.runs import Points


class Pairs(torch.utils.data.Dataset):
    """`Points` as Lightning's users have them: (x, y)."""

    def __init__(self, rows: int = 48, first: int = 0) -> None:
        self.points, self.rows, self.first = Points(), rows, first

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[self.first + i]
        return point["x"], point["y"]


class PointsData(pl.LightningDataModule):
    def __init__(self, shuffle: bool = True, rows: int = 48) -> None:
        super().__init__()
        self.shuffle, self.rows = shuffle, rows

    def setup(self, stage: str) -> None:
        self.train, self.validation = Pairs(self.rows), Pairs(22, first=1000)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=2, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=4)


class Classifier(pl.LightningModule):
    """`schedule`: of SCHEDULES."""

    def __init__(self, dropout: float = 0.1, schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4)
        )

    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        logits = self.net(x)
        hits = accuracy(logits, y, task="multiclass", num_classes=4)
        return nn.functional.cross_entropy(logits, y), hits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, hits = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"train_accuracy": hits}, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, hits = self._loss(batch)
        self.log("val_loss", loss)
        self.log("val_accuracy", hits)
        self.log("val_batch", float(batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("val_double", 2 * self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return SCHEDULES[self.hparams.schedule](optimizer, self)


SCHEDULES = {
    "none": lambda optimizer, module: optimizer,
    "step": lambda optimizer, module: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 1e-2, total_steps=module.trainer.estimated_stepping_batches
            ),
            "interval": "step",
        },
    },
    "epoch": lambda optimizer, module: (
        [optimizer],
        [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)],
    ),
    "plateau": lambda optimizer, module: {
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.5
        ),
        "monitor": "val_loss",
    },
}


class Curve(pl.Callback):
    """The loss and the learning rate of each step, in this process."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.rates: dict[int, float] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        self.losses[step] = float(trainer.callback_metrics["train_loss_step"])
        self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]


class LightningDiary(pl.Callback):
    """Writes each hook to a file, with the process and whether it is the global zero."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "diary")

    def _write(self, hook: str, trainer: Any) -> None:
        who = "zero" if trainer.is_global_zero else "other"
        with open(self.path, "a") as file:
            file.write(
                f"{hook} {trainer.global_step} {trainer.current_epoch} {who} {os.getpid()}\n"
            )

    def lines(self) -> list[tuple[str, int, int, str, int]]:
        words = [line.split() for line in Path(self.path).read_text().splitlines()]
        return [(hook, int(s), int(e), who, int(pid)) for hook, s, e, who, pid in words]


def _writes(hook: str) -> Any:
    def method(self: Any, trainer: Any, *args: Any) -> None:
        self._write(hook, trainer)

    return method


for _hook in (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
):
    setattr(LightningDiary, _hook, _writes(_hook))
