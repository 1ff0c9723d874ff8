"""The complete jobs: their data sets are written once and whole, they learn, and V sets the math."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

JOBS = Path(__file__).parents[2] / "jobs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"jobs_{name}", JOBS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    return load("gpt")


@pytest.fixture(scope="module")
def text(gpt, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "bytes"
    gpt.write_shards(folder)
    return folder


def test_text_shards(gpt, text):
    shards = sorted(text.iterdir())
    assert len(shards) == 8
    assert pq.ParquetFile(shards[0]).num_row_groups > 3
    table = pq.read_table(shards[0])
    assert table.schema.field("tokens").type.list_size == gpt.BLOCK + 1
    first = bytes(table["tokens"][0].as_py()).decode()
    assert "import" in first or '"""' in first
    gpt.write_shards(text)  # is there already: nothing happens
    assert [path.name for path in text.parent.iterdir()] == ["bytes"], "something half was left"


def test_a_crash_leaves_nothing_half(gpt, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.pq, "write_table", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gpt.write_shards(tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()


def test_gpt_learns_and_samples(gpt, text, tmp_path):
    small = {"width": 32, "heads": 2, "layers": 1, "lr": 1e-2}
    trainer = gpt.make_trainer(
        name="a", storage_path=str(tmp_path), data=str(text), steps=30, config=small
    )
    result = trainer.fit(local=True)
    assert result.step == 30
    assert result.exact, result.inexact_because
    assert result.metrics["loss"] < 4.0  # 5.55 at first
    assert result.metrics["sample"].startswith("def main(")


def test_digits_reach_97_per_cent(tmp_path):
    pytest.importorskip("sklearn")
    digits = load("digits")
    result = digits.make_trainer(
        name="a", storage_path=str(tmp_path), data=str(tmp_path / "digits"), epochs=6
    ).fit(local=True)
    assert result.metrics["eval_accuracy"] >= 0.97
    assert result.exact, result.inexact_because
