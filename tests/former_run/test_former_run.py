"""A run of an earlier version is refused by name, with the way out, and nothing of it changes.

`run/` was made by commit 9038db74, whose checkpoints have format 3. Only its checkpoints are kept:

    git worktree add --detach ../before 9038db74
    PYTHONPATH=../before python tests/former_run/test_former_run.py tests/former_run run
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import elastic_dp as edp
from elastic_dp.errors import CheckpointError


class Waves(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.linspace(-1, 1, 4) * (1 + i % 7), "y": torch.tensor(i % 3)}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(ctx: edp.TrainContext) -> None:
    model = torch.nn.Linear(4, 3)
    for step in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn):
        ctx.log({"loss": step.loss})


def trainer(folder: str, name: str, max_steps: int) -> edp.ElasticTrainer:
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=folder,
        data=edp.MapStyleData(Waves(), micro_batch_size=3, seed=5),
        scaling=edp.ScalingConfig(
            min_workers=1, max_workers=2, virtual_workers=4, threads_per_worker=1
        ),
        checkpoint=edp.CheckpointConfig(every_steps=2, num_to_keep=1),
        max_steps=max_steps,
    )


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("checkpoints/**/*")
        if path.is_file() and "claim" not in path.name.partition(".")[0]
    }


def test_run_of_an_earlier_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = Path(shutil.copytree(Path(__file__).parent / "run", tmp_path / "run"))
    before = files(run)
    with pytest.raises(CheckpointError, match=r"format 3: .* Export it with the version"):
        trainer(str(tmp_path), "run", 12).fit(local=True)
    with pytest.raises(CheckpointError, match="load the file into the model"):
        edp.load_state(str(run))
    assert files(run) == before != {}


if __name__ == "__main__":
    print(trainer(sys.argv[1], sys.argv[2], 6).fit(local=True))
