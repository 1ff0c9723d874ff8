"""Hands the metrics of a run to Ray, whose agent on the node exports them to Prometheus.

A thread of the controller's process does it every few seconds. Where Ray was installed without its
agent (`pip install ray` instead of `ray[default]`), the values go nowhere.
"""

from __future__ import annotations

import time
import traceback

from ray.util import metrics as ray_metrics

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.controller.prometheus_metrics import METRICS, MetricKind, PrometheusMetrics

INTERVAL_S = 2.0


def export_metrics(controller: Controller, run: str) -> None:
    """Export the metrics of a controller until its run has ended, and then once more."""
    made = {kind: _made(kind) for kind in METRICS}
    metrics = PrometheusMetrics(controller.journal, stored=controller.url is not None)

    def put(kind: MetricKind, value: float, label: str) -> None:
        tags = {"run": run} | ({kind.label: label} if kind.label else {})
        metric = made[kind]
        if isinstance(metric, ray_metrics.Histogram):
            metric.observe(value, tags)
        else:
            metric.set(value, tags)

    over = False
    while not over:
        over = controller.ended.wait(INTERVAL_S)
        try:
            now, status, times = time.time(), controller.status(), controller.times
            known = times.goodput(), times.times(), controller.store_retries
            metrics.sample(now, status, *known, put)
        except Exception:  # metrics must not end a run
            traceback.print_exc()


def _made(kind: MetricKind) -> ray_metrics.Gauge | ray_metrics.Histogram:
    tags = ("run", kind.label) if kind.label else ("run",)
    if kind.bounds:
        return ray_metrics.Histogram(kind.name, kind.help, [*kind.bounds], tags)
    return ray_metrics.Gauge(kind.name, kind.help, tags)
