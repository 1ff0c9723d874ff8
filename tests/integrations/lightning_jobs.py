"""A small LightningModule and its data, made from nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
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


class Whole(Curve):
    """The mean loss over the accumulated batches of a step, which Lightning itself does not log."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(float(outputs["loss"]))
        if (batch_idx + 1) % 4 == 0:
            step = trainer.global_step
            self.losses[step] = sum(self.batches)  # each is divided by their number
            self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]
            self.batches = []


class LogsRate(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class FailsInHook(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 9 and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            raise RuntimeError("once")


class LeavesOut(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss if float(batch[1].sum()) % 2 else None}


class AsksTrainer(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, self.trainer.fit_loop)


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Metered(Classifier):
    def __init__(self):
        super().__init__()
        self.meter = torchmetrics.MeanMetric()


class Weighted(PointsData):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=2, sampler=WeightedRandomSampler([1.0] * 48, 48))


class Several(PointsData):
    def train_dataloader(self):
        return [super().train_dataloader()]


class Moves(PointsData):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class Streams(PointsData):
    def train_dataloader(self):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(())

        return DataLoader(Stream(), batch_size=2)


class TwoOptimizers(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class SumsLog(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("rows", 2.0, reduce_fx="sum")


class LogsBatches(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0, on_step=True)


class KeepsOutputs(Classifier):
    """Keeps what each batch gives until the end of the epoch, as Lightning advises since 2.0."""

    def __init__(self):
        super().__init__()
        self.outputs = {"logits": []}

    def validation_step(self, batch, batch_idx):
        self.outputs["logits"].append(self.net(batch[0]))


class MonitorsNothing(Classifier):
    def __init__(self):
        super().__init__(schedule="plateau")

    def configure_optimizers(self):
        return super().configure_optimizers() | {"monitor": "nothing"}
