"""A small LightningModule and its data, made from nothing."""

from __future__ import annotations

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
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log_dict({"train_accuracy": hits}, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, hits = self._loss(batch)
        self.log("val_loss", loss)
        self.log("val_accuracy", hits)
        self.log("val_batch", float(batch_idx))

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
    "two": lambda optimizer, module: (
        [optimizer],
        [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                "interval": "step",
                "frequency": 8,
            },
        ],
    ),
    "not strict": lambda optimizer, module: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "monitor": "nothing",
            "strict": False,
        },
    },
}


class Curve(pl.Callback):
    """The mean loss over the accumulated batches of a step, which Lightning itself does not log,
    and the learning rate of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.batches: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(float(outputs["loss"]))
        if (batch_idx + 1) % 4 == 0:
            self.losses.append(sum(self.batches))  # each is divided by their number
            self.batches = []


class FailsOnce(Classifier):
    def __init__(self, folder: Path, schedule: str = "step") -> None:
        super().__init__(schedule=schedule)
        self.folder = str(folder)

    def training_step(self, batch, batch_idx):
        failed = Path(self.folder, "failed")
        if self.global_step == 9 and not failed.exists():
            failed.touch()
            raise RuntimeError("once")
        return super().training_step(batch, batch_idx)


class LeavesOut(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss if float(batch[1].sum()) % 2 else None}


class Frozen(Classifier):
    """A part of it stays in its mode of evaluation."""

    def __init__(self):
        super().__init__(dropout=0.9)
        self.net[2].eval()

    def training_step(self, *batch_and_number):
        rates = self.lr_schedulers().get_last_lr()
        assert rates == [self.optimizers().param_groups[0]["lr"]]
        return super().training_step(*batch_and_number)


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


class Empty(PointsData):
    def val_dataloader(self):
        return DataLoader(Pairs(0), batch_size=4)


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


class MisspellsLog(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("loss", 2.0, on_steps=True)


class ForgetsLoss(Classifier):
    def training_step(self, batch, batch_idx):
        return {"los": super().training_step(batch, batch_idx)}


class LogsBatches(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0, on_step=True)


class MonitorsNothing(Classifier):
    def __init__(self):
        super().__init__(schedule="plateau")

    def configure_optimizers(self):
        return super().configure_optimizers() | {"monitor": "nothing"}
