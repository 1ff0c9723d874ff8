"""Logs a run to MLflow: metrics by step, events of the run in the artifact
`run_events.txt`.

The run in MLflow is found again by its tag `elastic_dp.run`. Metrics are sent in batches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from elastic_dp.telemetry.run_logger import LoggedSoFar, RunLogger, require, start_time

_TAG = "elastic_dp.run"
_EVENTS = "run_events.txt"
_MOST = 1000  # metrics that MLflow takes in one request
_LONGEST = 250  # characters of a name


class MLflowLogger(RunLogger):
    """`tracking_uri` is MLflow's own by default: `MLFLOW_TRACKING_URI`."""

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        require("mlflow", "mlflow", type(self).__name__)
        self._experiment, self._uri = experiment, tracking_uri
        self._client: Any = None
        self._run = ""
        self._metrics: list[Any] = []
        self._events: list[str] = []
        self._events_sent = 0
        self._failed = False

    def open(self, run: str, began: float) -> LoggedSoFar:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = (
            client.create_experiment(self._experiment) if found is None else found.experiment_id
        )
        ident = f"{run}-{start_time(began)}".replace("'", "_")
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{ident}'", max_results=1)
        steps: dict[str, int] = {}
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            for name in runs[0].data.metrics:
                history = client.get_metric_history(self._run, name)
                steps[name] = max(metric.step for metric in history)
        else:
            tags = {_TAG: ident}
            self._run = client.create_run(experiment, tags=tags, run_name=run).info.run_id
        self._client = client
        self._metrics, self._events, self._events_sent, self._failed = [], [], 0, False
        return LoggedSoFar(steps=_BySafeName(steps))

    def log(self, at: float, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        for name, value in metrics.items():
            self._metrics.append(Metric(_safe(name), value, int(at * 1000), step))
        if len(self._metrics) >= _MOST:
            self._send_metrics()

    def annotate(self, at: float, step: int, text: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
        self._events.append(f"{when}  step {step}  {text}")
        self._failed = text.startswith("end: failed")

    def flush(self) -> None:
        self._send_metrics()
        if len(self._events) > self._events_sent:
            # All of them: the artifact is replaced.
            self._client.log_text(self._run, "\n".join(self._events) + "\n", _EVENTS)
            self._events_sent = len(self._events)

    def close(self) -> None:
        client = self._client
        if client is not None:
            self.flush()
            self._client = None
            client.set_terminated(self._run, "FAILED" if self._failed else "FINISHED")

    def _send_metrics(self) -> None:
        while self._metrics:
            self._client.log_batch(self._run, self._metrics[:_MOST])
            del self._metrics[:_MOST]


class _BySafeName(dict[str, int]):
    """Steps by the name that a metric has in MLflow."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(_safe(name), default)


def _safe(name: str) -> str:
    """Return `name` as MLflow takes it: other characters, or parts such as "..", would make it
    refuse all metrics of a request."""
    parts = re.sub(r"[^-\w./ ]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:_LONGEST].rstrip("/")
