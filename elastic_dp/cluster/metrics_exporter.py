"""Hands the metrics of a run to Ray, whose agent on the node exports them to Prometheus.

A thread of the controller's process does it every few seconds. Where Ray was installed without its
agent (`pip install ray` instead of `ray[default]`), the values go nowhere.
"""

from __future__ import annotations

import threading
import time
import traceback

from ray.util import metrics as ray_metrics

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.controller.prometheus_metrics import METRICS, MetricKind, PrometheusMetrics
from elastic_dp.threads import background

INTERVAL_S = 2.0


class MetricsExporter:
    """Exports the metrics of a controller until its run has ended, and then once more."""

    def __init__(self, controller: Controller, run: str) -> None:
        self._controller, self._run = controller, run
        self._made = {kind.name: _made(kind) for kind in METRICS}
        self._metrics = PrometheusMetrics(controller.journal, stored=controller.url is not None)

    def start(self) -> None:
        background("metrics", self._export).start()

    def export(self) -> None:
        controller = self._controller
        self._metrics.sample(
            time.time(),
            controller.status(),
            controller.times.goodput(),
            controller.times.times(),
            controller.store_retries,
            self._put,
        )

    def _put(self, kind: MetricKind, value: float, label: str) -> None:
        tags = {"run": self._run} | ({kind.label: label} if kind.label else {})
        metric = self._made[kind.name]
        if isinstance(metric, ray_metrics.Histogram):
            metric.observe(value, tags)
        else:
            metric.set(value, tags)

    def _export(self) -> None:
        ended: threading.Event = self._controller.ended
        while True:
            over = ended.wait(INTERVAL_S)
            try:
                self.export()
            except Exception:  # metrics must not end a run
                traceback.print_exc()
            if over:
                return


def _made(kind: MetricKind) -> ray_metrics.Gauge | ray_metrics.Histogram:
    tags = ("run", kind.label) if kind.label else ("run",)
    if kind.bounds:
        return ray_metrics.Histogram(kind.name, kind.help, [*kind.bounds], tags)
    return ray_metrics.Gauge(kind.name, kind.help, tags)
