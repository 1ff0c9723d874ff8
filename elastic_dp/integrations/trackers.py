"""Loggers for TensorBoard, Weights & Biases and MLflow.

    ElasticTrainer(train, name="mine", loggers=[TensorBoardLogger("logs/mine")], ...)

Each committed step is logged once, with the events of the run (workers lost, generations, and what
else the terminal shows). A script that is started again is sent the steps of the run again, as far
as the controller holds them. So a logger first asks its service what it has, and leaves that out.
The loggers run in the process that waits for the run, never in a worker.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_dp import RunLogger
from elastic_dp.errors import SpecError

EVENTS = "events"  # the name under which events are logged
_TAG = "elastic_dp.run"  # by which a run is found in MLflow


class StepLogger(RunLogger):
    """Logs each number of each step once, in the order of steps."""

    def __init__(self) -> None:
        # The newest step of each metric that the service has; None until it is asked.
        self._newest: dict[str, int] | None = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        newest, step = self._opened(), int(record["step"])
        values = {
            self.name_of(name): float(value)
            for name, value in record.items()
            if name not in ("step", "time") and isinstance(value, int | float)
        }
        values = {name: v for name, v in values.items() if step > newest.get(name, -1)}
        if values:
            self.write(step, values, float(record.get("time", time.time())))
            newest.update(dict.fromkeys(values, step))

    def event(self, text: str, step: int, at: float) -> None:
        self._opened()
        self.note(text, step, at)

    def close(self) -> None:
        if self._newest is not None:
            self._newest = None
            self.end()

    def _opened(self) -> dict[str, int]:
        if self._newest is None:
            self._newest = self.open()
        return self._newest

    # --------------------------------------------------------------------- of each service

    def name_of(self, metric: str) -> str:
        """Return the name of a metric as the service allows it."""
        return metric

    def open(self) -> dict[str, int]:
        """Connect. Return the newest step of each metric that the service has of this run."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        raise NotImplementedError

    def note(self, text: str, step: int, at: float) -> None:
        """Write an event, unless the service has it."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class TensorBoardLogger(StepLogger):
    """Writes scalars, and events as text, to event files in the folder `log_dir`.

    Needs `elastic_dp[tensorboard]`. Use one folder for each run. `options` are those of
    `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, log_dir: str, **options: Any) -> None:
        super().__init__()
        _require("tensorboard", "tensorboard")
        self._folder, self._options = str(log_dir), options
        self._writer: Any = None
        self._noted_until = -math.inf  # the time of the newest event

    def open(self) -> dict[str, int]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        newest: dict[str, int] = {}
        if "://" in self._folder or Path(self._folder).is_dir():
            # One of each: the newest is always kept.
            found = EventAccumulator(self._folder, size_guidance={"scalars": 1, "tensors": 1})
            found.Reload()
            tags = found.Tags()
            newest = {tag: found.Scalars(tag)[-1].step for tag in tags["scalars"]}
            if (tag := f"{EVENTS}/text_summary") in tags["tensors"]:
                self._noted_until = found.Tensors(tag)[-1].wall_time
        self._writer = SummaryWriter(self._folder, **self._options)
        return newest

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def note(self, text: str, step: int, at: float) -> None:
        if at > self._noted_until:
            self._noted_until = at
            self._writer.add_text(EVENTS, text, step, walltime=at)

    def end(self) -> None:
        self._writer.close()


class WandbLogger(StepLogger):
    """Logs to Weights & Biases. Needs `elastic_dp[wandb]`.

    `run` is the name of the run and, with other characters than letters, digits, `-` and `_`
    replaced, its id, so a script that is started again continues it (`resume="allow"`). An offline
    run (`WANDB_MODE=offline`) cannot be continued: what is sent again is logged again there.
    `options` are those of `wandb.init`.
    """

    def __init__(self, run: str, **options: Any) -> None:
        super().__init__()
        _require("wandb", "wandb")
        self._options = {
            "name": run,
            "id": re.sub(r"[^\w-]", "-", run, flags=re.ASCII),
            "resume": "allow",
        } | options
        self._run: Any = None
        self._first = 0  # steps before it are there
        self._step = 0

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._opened()
        if record["step"] >= self._first:
            super().__call__(record)

    def open(self) -> dict[str, int]:
        import wandb

        self._run = wandb.init(**self._options)
        self._first = self._step = self._run.starting_step
        return {}

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._step = step
        self._run.log(values, step=step)

    def note(self, text: str, step: int, at: float) -> None:
        if step >= self._first:
            self._run.log({EVENTS: text}, step=max(step, self._step))

    def end(self) -> None:
        self._run.finish()


class MLflowLogger(StepLogger):
    """Logs to MLflow: metrics, and events as the artifact `events.txt`. Needs `elastic_dp[mlflow]`.

    `run` is the name of the run. The run that a logger of that name made in `experiment` is
    continued; otherwise one is made.
    `tracking_uri`: None is MLflow's own choice (`MLFLOW_TRACKING_URI`).
    """

    def __init__(
        self, run: str, experiment: str = "Default", tracking_uri: str | None = None
    ) -> None:
        super().__init__()
        _require("mlflow", "mlflow")
        self._name, self._experiment, self._uri = run, experiment, tracking_uri
        self._client: Any = None
        self._id = ""
        self._events: list[str] = []

    def name_of(self, metric: str) -> str:
        return re.sub(r"[^\w\-. /:]", "_", metric)

    def open(self) -> dict[str, int]:
        import mlflow

        client = self._client = mlflow.MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        if found is None:
            experiment = client.create_experiment(self._experiment)
        else:
            experiment = found.experiment_id
        name = urllib.parse.quote(self._name)  # without the quotes that a filter cannot have
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{name}'", max_results=1)
        if not runs:
            made = client.create_run(experiment, run_name=self._name, tags={_TAG: name})
            self._id = made.info.run_id
            return {}
        self._id = runs[0].info.run_id
        client.update_run(self._id, status="RUNNING")
        with contextlib.suppress(Exception):  # there is none yet
            self._events = mlflow.artifacts.load_text(
                f"{runs[0].info.artifact_uri}/{EVENTS}.txt"
            ).splitlines()
        return {
            name: max(metric.step for metric in client.get_metric_history(self._id, name))
            for name in runs[0].data.metrics
        }

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(at * 1e3), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def note(self, text: str, step: int, at: float) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
        line = f"{when}.{int(at * 1e3) % 1000:03}Z step {step}: {' '.join(text.split())}"
        if line not in self._events:
            self._events.append(line)
            self._client.log_text(self._id, "\n".join(self._events) + "\n", f"{EVENTS}.txt")

    def end(self) -> None:
        self._client.set_terminated(self._id)


def _require(module: str, extra: str) -> None:
    """Raises SpecError before anything is started."""
    try:
        __import__(module)
    except ImportError as error:
        raise SpecError(
            f"{module} is not installed, or cannot be imported ({error}): "
            f"pip install 'elastic_dp[{extra}]'"
        ) from error
