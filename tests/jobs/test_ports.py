"""Users' loops fit: each port is a plain single-process script with few lines changed, and it
runs."""

import dataclasses
import difflib
import math
import runpy
from pathlib import Path

import pytest

import elastic_dp
from tests.runs import group

ROOT = Path(__file__).parents[2]
PORTS = {
    "nanogpt.py": "nanogpt_port.py",
    "transformers_llama.py": "transformers_port.py",
    "timm_like.py": "timm_like_port.py",
}
MAX_CHANGED_LINES = 25


def significant(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize(("original", "port"), PORTS.items())
def test_few_lines_change(original, port):
    changed = changed_lines(original, port)
    assert len(changed) <= MAX_CHANGED_LINES, "\n".join(changed)


def changed_lines(original: str, port: str) -> list[str]:
    before, after = significant(ROOT / "docs/ports" / original), significant(ROOT / "jobs" / port)
    return [line for line in difflib.ndiff(before, after) if line[0] in "+-"]


@pytest.mark.parametrize("port", PORTS.values())
@pytest.mark.filterwarnings("default")  # of foreign libraries
def test_the_port_runs(port, tmp_path, monkeypatch):
    """The script as it is, but for `fit`: for a few steps, in this process, and most by a group of
    two workers."""
    results = []

    def fit_here(trainer, local=False):
        trainer.storage_path = str(tmp_path)
        epochs = None if trainer.spec.data.epochs is None else 1
        data = dataclasses.replace(trainer.spec.data, epochs=epochs)
        trainer.spec = dataclasses.replace(trainer.spec, max_steps=22, data=data)
        results.append(fit(trainer, local=True))
        if port == "transformers_port.py":
            return  # each worker would import for many seconds
        scaling = dataclasses.replace(trainer.spec.scaling, min_workers=2, max_workers=2)
        outcome, _ = group(dataclasses.replace(trainer.spec, scaling=scaling), trainer.train)
        assert (outcome.error, outcome.digest) == (None, results[0].weights_sha256)

    fit = elastic_dp.ElasticTrainer.fit
    monkeypatch.setattr(elastic_dp.ElasticTrainer, "fit", fit_here)
    runpy.run_path(str(ROOT / "jobs" / port), run_name="__main__")
    [result] = results
    assert result.step == 22
    assert result.exact, result.inexact_because
    assert math.isfinite(result.metrics["loss"])
    assert result.metrics["loss"] < {"timm_like_port.py": 2.0}.get(port, 5.0)
