"""The Python code on the pages of docs/ runs as it stands, with a small model, local data and a few
steps in this process. What needs more than that is used by other tests."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import elastic_dp as edp

DOCS = Path(__file__).parent.parent / "docs"
CODE = re.compile(r"```python\n(.*?)```", re.S)
PAGES = sorted(path.name for path in DOCS.glob("*.md") if CODE.search(path.read_text()))
# Code that needs more than this process has, by a word of it, and a test that uses the same.
ELSEWHERE = {
    "deltalake": "tests/dataprep/test_write_shards.py",
    "DeltaTable": "tests/dataprep/test_write_shards.py",
    "load_catalog": "tests/dataprep/test_write_shards.py",
    "torchao": "tests/train/test_precision.py",
    "run = ": "tests/ray/test_run.py",
    "elastic_dp.dataprep": "tests/data/test_readme.py",
    "class Squares": "tests/test_docs.py",
    "AveragedModel(MyModel())": "tests/train/test_restarts.py",
}
A_RUN = "s3://bucket/runs/mine"
ROWS, STEPS = 1024, 2


class MyModel(nn.Module):
    """Stands for the model of a page. A loss function may also ask for the loss of its output."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        y.loss = y.square().mean()
        return y


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def plain(ctx: edp.TrainContext) -> None:
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rows")
    values = pa.array(np.random.default_rng(0).random((ROWS, 4), dtype=np.float32).tolist())
    table = pa.table({"x": values, "tokens": values, "lang": ["en"] * ROWS})
    pq.write_table(table, place / "0.parquet", row_group_size=64)
    return place


def names_of_a_page(folder: Path) -> dict[str, Any]:
    """What a page takes as given."""
    model = MyModel()
    data = edp.DataConfig(str(folder), micro_batch_size=1, columns=["x", "tokens"], epochs=1)
    modules = {"math": math, "torch": torch, "nn": nn, "F": F, "dist": dist, "edp": edp, "pc": pc}
    functions = {"loss_fn": loss_fn, "train": plain, "decay": lambda step: 1.0, "pad": dict}
    return (
        modules
        | functions
        | {
            "DataConfig": edp.DataConfig,
            "MyModel": MyModel,
            "join_title_and_body": lambda batch, rng: batch,
            "lr": 1e-3,
            "math": math,
            "model": model,
            "netD": MyModel(),
            "netG": MyModel(),
            "optimizer": torch.optim.AdamW(model.parameters()),
            "noise": edp.NoiseScale(),
            "data": data,
            "scaling": edp.ScalingConfig(max_workers=1, virtual_workers=2),
        }
    )


def as_train(code: str) -> str:
    """The code of a loop that stands for itself, as a train function."""
    inside = re.search(r"^for .* in ctx\.steps", code, re.M)
    return "def train(ctx):\n" + textwrap.indent(code, "    ") if inside else code


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    names, made, ran, numbers = names_of_a_page(folder), [], [], itertools.count()
    arguments = {"data": names["data"]}  # of the last trainer on the page
    data, init, fit = names["data"], edp.ElasticTrainer.__init__, edp.ElasticTrainer.fit

    def here(trainer: edp.ElasticTrainer, train: Callable[..., None], **given: Any) -> None:
        """With the rows of this test, and on the CPU."""
        init(trainer, train, **{"name": "page"} | given)
        scaling = dataclasses.replace(trainer.spec.scaling, resources_per_worker={"CPU": 1})
        config = {
            name: data if name == "eval" else one for name, one in trainer.spec.config.items()
        }
        mine = {"data": data, "scaling": scaling, "max_steps": STEPS, "config": config}
        place = {"name": f"run-{next(numbers)}", "storage_path": tmp_path}
        init(trainer, train, **given | mine | place)
        made.append(trainer)
        arguments.update(given)

    def fit_here(trainer: edp.ElasticTrainer) -> None:
        ran.append(trainer)
        assert fit(trainer, local=True).step == STEPS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edp.ElasticTrainer, "__init__", here)
    monkeypatch.setattr(edp.ElasticTrainer, "fit", fit_here)
    for code in CODE.findall((DOCS / page).read_text()):
        if any(word in code for word in ELSEWHERE):
            continue
        if A_RUN in code:
            edp.ElasticTrainer(plain, data=data).fit()
            code = code.replace(A_RUN, made[-1].url)
        code = as_train(code)
        names["model"] = MyModel()  # a model of a run that has ended has its hooks
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        made.clear()
        ran.clear()
        exec(compile(code, page, "exec"), names)
        if "def train" in code and not made:
            edp.ElasticTrainer(names["train"], **arguments | {"scaling": names["scaling"]})
        if made and not ran and made[-1].spec.scaling.processes_per_worker == 1:
            made[-1].fit()


def test_code_that_is_not_run_here_is_on_a_page_and_its_tests_exist() -> None:
    pages = "".join((DOCS / page).read_text() for page in PAGES)
    for word, test in ELSEWHERE.items():
        assert word in pages and (DOCS.parent / test).exists(), (word, test)
