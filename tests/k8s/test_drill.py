"""The drill of k8s/docs/reference.md: a copy of a run's folder elsewhere, some of it not there."""

import shutil

import pytest
from typer.testing import CliRunner

import elastic_dp as edp
from elastic_dp.cli import app
from tests.runs import Points
from tests.train.jobs import classify


def fit(folder, max_steps):
    """The same command anywhere, but for storage_path and max_steps."""
    return edp.ElasticTrainer(
        classify,
        name="gpt",
        storage_path=str(folder),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=2),
        checkpoint=edp.CheckpointConfig(every_steps=2),
        max_steps=max_steps,
    ).fit(local=True)


def asked(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize("late", [False, True], ids=["whole", "a part is late"])
@pytest.mark.filterwarnings("ignore:since the last start of this run")
def test_drill_on_a_copied_run_ends_with_the_undisturbed_weights(tmp_path, late):
    fit(tmp_path / "runs", 6)
    west = tmp_path / "west" / "runs" / "gpt"
    shutil.copytree(tmp_path / "runs" / "gpt", west)
    if late:
        part = next((west / "checkpoints" / "step-000000000006").rglob("*.safetensors"))
        part.unlink()

    assert "6" in asked("checkpoints", "list", west)
    asked("checkpoints", "list", west, "--verify", code=int(late))
    shutil.copytree(west, tmp_path / "drill" / "gpt")
    restored = fit(tmp_path / "drill", 9)
    assert restored.step == 9
    assert restored.weights_sha256 == fit(tmp_path / "undisturbed", 9).weights_sha256
    events = (tmp_path / "drill" / "gpt" / "events.jsonl").read_text()
    assert f"step {4 if late else 6}" in events
