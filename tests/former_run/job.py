"""The job whose run folders lie beside this file, made by an earlier commit of this project.

It uses public names alone, so that both the earlier commit and the present one can run it:

    python tests/former_run/job.py FOLDER

trains `alone` in one process and `workers` on a local Ray, where a worker is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import elastic_dp as edp

FORMER_STEPS = 6


class Waves(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.linspace(-1, 1, 8) * (1 + i % 7) + i / 48
        return {"x": x, "y": torch.tensor(i % 3)}


class Average:
    """An average of the weights, and how many steps it is of."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.steps = state["shadow"], state["steps"]


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(ctx: edp.TrainContext) -> None:
    model = nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    average = Average(model)
    state = {"average": average}
    for step in ctx.steps(
        model, optimizer, loss_fn, scheduler=schedule, clip_norm=1.0, state=state
    ):
        average.update(model)
        shadow = sum(t.double().sum().item() for t in average.shadow.values())
        ctx.log({"loss": step.loss, "average": shadow, "averaged": average.steps})
        victim = ctx.config.get("victim")
        if victim and (step.number, ctx.rank) == (3, 1) and not os.path.exists(victim):
            open(victim, "w").close()  # once in the run
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(
    folder: str,
    name: str,
    max_steps: int,
    min_workers: int = 1,
    config: dict[str, Any] | None = None,
) -> edp.ElasticTrainer:
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=folder,
        config=config,
        data=edp.MapStyleData(Waves(), micro_batch_size=3, seed=5),
        scaling=edp.ScalingConfig(
            min_workers=min_workers, max_workers=2, virtual_workers=4, threads_per_worker=1
        ),
        checkpoint=edp.CheckpointConfig(every_steps=2, num_to_keep=2),
        max_steps=max_steps,
    )


def main(folder: str) -> None:
    print(trainer(folder, "alone", FORMER_STEPS).fit(local=True))
    with tempfile.TemporaryDirectory() as temporary:
        config = {"victim": os.path.join(temporary, "victim")}
        print(trainer(folder, "workers", FORMER_STEPS, 2, config).fit())


if __name__ == "__main__":
    main(sys.argv[1])
