"""What TensorBoard, MLflow and Weights & Biases have of a run, read back with their own readers."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

import elastic_dp as edp
from elastic_dp.errors import SpecError
from elastic_dp.integrations.trackers import MLflowLogger, TensorBoardLogger, WandbLogger
from elastic_dp.telemetry.loggers import close_loggers, log_to, tell_loggers
from tests.runs import Points

pytestmark = pytest.mark.filterwarnings("default")  # of the services' own packages


def record(step: int, **metrics: Any) -> dict[str, Any]:
    return {"time": 1000.0 + step, "step": step, **metrics}


def say(text: str, at: float) -> dict[str, Any]:
    return {"time": at, "command": "Explain", "text": text}


LOST = {"time": 1002.5, "event": "WorkerLost", "worker": "w2", "reason": "signal 9"}


def follow(loggers: list[Any], last: int) -> None:
    """What a process that waits for a run sends: everything from the start, as far as it is."""
    for step in range(1, last + 1):
        log_to(loggers, record(step, loss=1 / step, note="text is left out", lr=0.1))
        if step == 2:
            tell_loggers(loggers, LOST, step)
            log_to(loggers, record(step, **{"val accuracy (%)": 50.0}))
        if step == 4:
            tell_loggers(loggers, say("generation 2: 2 workers", 1004.5), step)
    close_loggers(loggers)


EVENTS = ["w2 is gone: signal 9", "generation 2: 2 workers"]


def test_tensorboard_has_each_step_and_event_once_after_a_restart(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last in (3, 5):
        follow([TensorBoardLogger(str(tmp_path / "logs"))], last)
    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    loss = [(scalar.step, scalar.wall_time) for scalar in found.Scalars("loss")]
    assert loss == [(step, 1000.0 + step) for step in range(1, 6)]
    assert [scalar.step for scalar in found.Scalars("val accuracy (%)")] == [2]
    tensors = found.Tensors("events/text_summary")
    assert [one.tensor_proto.string_val[0].decode() for one in tensors] == EVENTS


def test_mlflow_has_each_step_and_event_once_after_a_restart(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    for last in (3, 5):
        follow([MLflowLogger("it's mine", "experiments", uri)], last)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiments").experiment_id])
    assert (run.info.run_name, run.info.status) == ("it's mine", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.timestamp) for one in history] == [
        (step, 1_000_000 + 1000 * step) for step in range(1, 6)
    ]
    assert len(client.get_metric_history(run.info.run_id, "val accuracy ___")) == 1
    text = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/events.txt")
    assert [line.partition(": ")[2] for line in text.splitlines()] == EVENTS
    assert text.startswith("1970-01-01T00:16:42.500Z step 2: ")


class FakeWandb:
    """`wandb.init` and its run, as its documentation has them: a run that is resumed has
    `starting_step`, and steps that go back are dropped."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.options: dict[str, Any] = {}
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.options = options
        self.starting_step = max(self.steps, default=-1) + 1
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        assert step >= max(self.steps, default=0), "the step goes back"
        self.steps.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_has_each_step_and_event_once_after_a_restart(monkeypatch):
    service = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", service)
    for last in (3, 5):
        follow([WandbLogger("mine: 2", project="p")], last)
    assert service.options == {
        "name": "mine: 2",
        "id": "mine--2",
        "resume": "allow",
        "project": "p",
    }
    assert {step: values.get("loss") for step, values in service.steps.items()} == {
        step: 1 / step for step in range(1, 6)
    }
    assert service.steps[2]["val accuracy (%)"] == 50.0
    assert [v["events"] for v in service.steps.values() if "events" in v] == EVENTS
    assert service.finished == 2


@pytest.mark.slow  # starts its service process
def test_wandb_itself_takes_an_offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    follow([WandbLogger("mine")], 3)
    (file,) = tmp_path.rglob("run-mine.wandb")
    assert file.stat().st_size > 100


def test_run_without_ray_logs_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def train(ctx: Any) -> None:
        model = torch.nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy
        for step in ctx.steps(model, optimizer, lambda m, b: loss(m(b["x"]), b["y"])):
            ctx.log({"loss": step.loss})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edp.ElasticTrainer(
            train,
            name="mine",
            storage_path=str(tmp_path),
            data=edp.MapStyleData(Points(), micro_batch_size=4),
            scaling=edp.ScalingConfig(max_workers=2, virtual_workers=2),
            max_steps=4,
            loggers=[TensorBoardLogger(str(tmp_path / "logs"))],
        ).fit(local=True)
    found = EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    assert [scalar.step for scalar in found.Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("logger", "module"),
    [
        (lambda: TensorBoardLogger("logs"), "tensorboard"),
        (lambda: WandbLogger("mine"), "wandb"),
        (lambda: MLflowLogger("mine"), "mlflow"),
    ],
)
def test_logger_without_its_package_says_what_to_install(logger, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SpecError, match=rf"elastic_dp\[{module}\]"):
        logger()
