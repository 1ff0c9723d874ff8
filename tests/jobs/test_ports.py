"""Users' loops fit: each port of a plain single-process script runs."""

import dataclasses
import math
import runpy
from pathlib import Path

import pytest

import elastic_dp

ROOT = Path(__file__).parents[2]
PORTS = ("nanogpt_port.py", "transformers_port.py", "timm_like_port.py")


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.filterwarnings("default")  # of foreign libraries
def test_the_port_runs(port, tmp_path, monkeypatch):
    """The script as it is, but for `fit`: for a few steps, in this process."""
    results = []

    def fit_here(trainer, local=False):
        trainer.storage_path = str(tmp_path)
        epochs = None if trainer.spec.data.epochs is None else 1
        data = dataclasses.replace(trainer.spec.data, epochs=epochs)
        trainer.spec = dataclasses.replace(trainer.spec, max_steps=22, data=data)
        results.append(fit(trainer, local=True))

    fit = elastic_dp.ElasticTrainer.fit
    monkeypatch.setattr(elastic_dp.ElasticTrainer, "fit", fit_here)
    runpy.run_path(str(ROOT / "jobs" / port), run_name="__main__")
    [result] = results
    assert result.step == 22
    assert result.exact, result.inexact_because
    assert math.isfinite(result.metrics["loss"])
    assert result.metrics["loss"] < {"timm_like_port.py": 2.0}.get(port, 5.0)
