"""Alerts and the dashboard: each alert fires when it should and is silent when not, by Prometheus'
own `promtool`; each query asks for metrics that there are."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from elastic_dp.cluster.controller.run_metrics import METRICS
from tests.k8s.manifests import K8S, build, of_kind

NAMES = {
    f"ray_{kind.name}{end}"
    for kind in METRICS
    for end in (("_sum", "_count", "_bucket") if kind.bounds else ("",))
}
MINUTES = 240
LABELS = 'namespace="training", run="mine", WorkerId="1"'


def queries():
    dashboard = json.loads((K8S / "monitoring/dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def rules():
    [made] = of_kind(build("monitoring"), "PrometheusRule")
    groups = made["spec"]["groups"]
    return [group for group in groups if group["name"] == "elastic-dp-runs"]


def series(name, start, each, label=""):
    """A gauge that grows by `each` a minute."""
    return {
        "series": f"ray_elastic_dp_{name}{{{LABELS}{label}}}",
        "values": f"{start}+{each}x{MINUTES}",
    }


def world(running=1, step=60, size=2, age=60, useful=100, pause=20):
    """A run that makes `step` steps a minute, and so on."""
    return [
        series("running", running, 0),
        series("step", 0, step),
        series("world_size", size, 0),
        series("checkpoint_age_seconds", 0 if age == 60 else age, 60 if age == 60 else 0),
        series("goodput_seconds", 0, useful, ', category="useful"'),
        series("goodput_seconds", 0, pause, ', category="pause"'),
    ]


HEALTHY = {"age": 300}
CASES = {
    "RunStalled": {"step": 0},
    "RunHasNoWorkers": {"size": 0},
    "CheckpointTooOld": {"age": 8000},
    "GoodputLow": {"useful": 40, "pause": 80},
}


@pytest.fixture
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs Prometheus' promtool: apt-get install prometheus")
    return found


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("alert", [None, *CASES])
def test_alert_fires_for_its_fault_alone_and_not_after_the_end(alert, over, promtool, tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}))
    fault = HEALTHY | CASES.get(alert, {}) | ({"running": 0} if over else {})
    fired = [rule["alert"] for group in rules() for rule in group["rules"]]
    assert sorted(fired) == sorted(CASES)
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": world(**fault),
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertstate="firing", alertname="{name}"}})'
                        " or vector(0)",
                        "eval_time": "200m",
                        "exp_samples": [{"labels": "{}", "value": int(name == alert and not over)}],
                    }
                    for name in CASES
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    made = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_queries_ask_for_metrics_that_runs_have():
    asked = [rule["expr"] for group in rules() for rule in group["rules"]] + queries()
    found = {name for text in asked for name in re.findall(r"ray_elastic_dp_\w+", text)}
    assert found <= NAMES
    shown = {name for text in queries() for name in re.findall(r"ray_elastic_dp_\w+", text)}
    assert {name.removesuffix("_bucket") for name in NAMES} - shown <= {
        "ray_elastic_dp_running",
        "ray_elastic_dp_pause_seconds",
    }
