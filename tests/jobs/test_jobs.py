"""The complete jobs: their data sets are written once and whole, they learn, and V sets the
math."""

import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.runs import group, lines_of, local

OTHERS = pytest.param((1, 2, 3, 4, 5, 8), marks=pytest.mark.slow)
SMALL = {"width": 32, "heads": 2, "layers": 1, "lr": 2e-2}


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    return importlib.import_module("jobs.gpt")


@pytest.fixture(scope="module")
def text(gpt, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "bytes"
    gpt.write_shards(folder)
    return folder


def test_text_shards_have_blocks_in_several_row_groups(gpt, text):
    shards = sorted(text.iterdir())
    assert len(shards) == 8
    assert pq.ParquetFile(shards[0]).num_row_groups > 3
    table = pq.read_table(shards[0])
    assert table.schema.field("tokens").type.list_size == gpt.BLOCK + 1
    first = bytes(table["tokens"][0].as_py()).decode()
    assert "import" in first or '"""' in first
    gpt.write_shards(text)  # is there already: nothing happens
    assert [path.name for path in text.parent.iterdir()] == ["bytes"], "something half was left"


def test_gpt_learns_and_samples(gpt, text, tmp_path):
    """The loss falls well below what any model could reach that does not look at the context."""
    trainer = gpt.make_trainer(
        name="a",
        storage_path=str(tmp_path),
        data=str(text),
        virtual_workers=1,
        workers=1,
        steps=160,
        config=SMALL,
    )
    result = trainer.fit(local=True)
    assert result.step == 160
    assert result.exact, result.inexact_because
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert np.mean(losses[-5:]) < entropy_of_bytes(text) - 0.3  # 3.12 less 0.3
    assert result.metrics["sample"].startswith("def main(")


def entropy_of_bytes(folder: Path) -> float:
    """In nats: the best loss without context."""
    rows = [pq.read_table(shard)["tokens"].combine_chunks() for shard in folder.iterdir()]
    share = np.bincount(np.concatenate([r.flatten().to_numpy() for r in rows]))
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum())


def same_everywhere(trainer, sizes):
    """One digest and one log in this process and on these numbers of workers."""
    scaling = dataclasses.replace(trainer.spec.scaling, virtual_workers=8)
    trainer.spec = dataclasses.replace(trainer.spec, scaling=scaling)
    calm = local(trainer.spec, trainer.train)
    for workers in sizes:
        scaling = dataclasses.replace(scaling, min_workers=workers, max_workers=workers)
        outcome, run = group(dataclasses.replace(trainer.spec, scaling=scaling), trainer.train)
        assert (outcome.step, outcome.digest) == (trainer.spec.max_steps, calm.digest)
        lines = lines_of(run)
        logged = [x for x in lines if "event" not in x and "command" not in x]
        assert [{k: v for k, v in x.items() if k != "time"} for x in logged] == calm.logged


@pytest.mark.parametrize("sizes", [(3,), OTHERS], ids=str)
def test_gpt_is_the_same_for_any_number_of_workers(gpt, text, tmp_path, sizes):
    options = {"storage_path": str(tmp_path), "data": str(text)}
    same_everywhere(gpt.make_trainer(steps=6, config=SMALL, **options), sizes)


def test_llama_is_tuned_from_hugging_face_files_to_hugging_face_files(tmp_path):
    llama = importlib.import_module("jobs.llama")
    options = {"data": str(tmp_path / "data"), "storage_path": str(tmp_path), "length": 32}
    trainer = llama.make_trainer(**options, name="a", steps=12)
    result = trainer.fit(local=True)
    assert result.exact and result.metrics["loss"] < 5.0  # 5.5 is chance
    llama.save(trainer, result, str(tmp_path / "tuned"))
    tuned, state = llama.load(str(tmp_path / "tuned")), result.load_state().model
    assert all(torch.equal(tuned.state_dict()[name], value) for name, value in state.items())
    assert (tmp_path / "tuned" / "tokenizer.json").exists()


def test_resnet_learns_from_shards_of_images(tmp_path):
    resnet = importlib.import_module("jobs.resnet")
    options = {"data": str(tmp_path / "data"), "storage_path": str(tmp_path), "width": 4}
    result = resnet.make_trainer(**options, name="a", epochs=6).fit(local=True)
    assert result.exact and result.metrics["accuracy"] > 0.6  # 0.25 is chance
    short = resnet.make_trainer(**options, micro_batch_size=8, epochs=1)
    short.spec = dataclasses.replace(short.spec, max_steps=4)
    same_everywhere(short, (2,))


def test_digits_reach_97_per_cent(tmp_path):
    digits = importlib.import_module("jobs.digits")
    result = digits.make_trainer(
        name="a", storage_path=str(tmp_path), data=str(tmp_path / "digits"), epochs=6
    ).fit(local=True)
    assert result.metrics["eval_accuracy"] >= 0.97
    assert result.exact, result.inexact_because
