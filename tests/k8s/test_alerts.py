"""Alerts and the dashboard: each alert fires when it should and is silent when not, by Prometheus'
own `promtool`; each query asks for metrics that there are."""

import json
import re
import shutil
import subprocess

import pytest

from elastic_dp.cluster.controller.prometheus_metrics import METRICS
from tests.k8s.manifests import K8S, build, of_kind

NAMES = {
    f"ray_{kind.name}{end}"
    for kind in METRICS
    for end in (("_sum", "_count", "_bucket") if kind.bounds else ("",))
}
MINUTES = 240
LABELS = 'namespace="training", run="mine", WorkerId="1"'
RUNS, RAY, OPERATOR = "elastic-dp-runs", "elastic-dp", "elastic-dp-operator"


def queries():
    dashboard = json.loads((K8S / "monitoring/dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def all_rules():
    [made] = of_kind(build("monitoring"), "PrometheusRule")
    return made["spec"]["groups"]


def rules(name=RUNS):
    return [group for group in all_rules() if group["name"] == name]


def series(name, start, each=0):
    """A series that grows by `each` a minute."""
    return {"series": name, "values": f"{start}+{each}x{MINUTES}"}


def run_series(running=1, step=60, size=2, age=60, useful=100, pause=20):
    """Return the series of a run that makes `step` steps a minute, and so on."""

    def gauge(name, start, each, label=""):
        return series(f"ray_elastic_dp_{name}{{{LABELS}{label}}}", start, each)

    return [
        gauge("running", running, 0),
        gauge("step", 0, step),
        gauge("world_size", size, 0),
        gauge("checkpoint_age_seconds", 0 if age == 60 else age, 60 if age == 60 else 0),
        gauge("goodput_seconds", 0, useful, ', category="useful"'),
        gauge("goodput_seconds", 0, pause, ', category="pause"'),
    ]


def cluster_series(status="Running", workers=2, pending=0, lost_nodes=0.1, autoscaler=1):
    """Return the series of KubeRay and of Ray, which loses so many nodes a minute. Beside them
    is what no alert may see: a run of another namespace, and the actors as a worker counts them.
    """
    job, up = "kuberay_job_deployment_status", "up"
    ours, theirs = 'namespace="training", name="mine"', 'namespace="other", name="theirs"'

    def actors(name, state, number, source="gcs"):
        labels = f'ray_instance="mine", Source="{source}", Name="{name}", State="{state}"'
        return series(f"ray_actors{{{labels}}}", number)

    return [
        series(f'{job}{{{ours}, deployment_status="{status}"}}', 1),
        series(f'{job}{{{theirs}, deployment_status="Failed"}}', 1),
        series(f'{job}{{{theirs}, deployment_status="Retrying"}}', 1),
        actors("ControllerActor", "ALIVE", 1),
        actors("WorkerActor", "ALIVE", workers),
        actors("WorkerActor", "PENDING_CREATION", pending),
        actors("WorkerActor", "PENDING_CREATION", 1, source="executor"),
        series('ray_node_failure_total{ray_io_cluster="mine-x"}', 0, lost_nodes),
        series(
            f'{up}{{endpoint="as-metrics", namespace="training", ray_instance="mine"}}', autoscaler
        ),
        series(f'{up}{{endpoint="as-metrics", namespace="other", ray_instance="theirs"}}', 0),
    ]


HEALTHY = {"age": 300}
RUN_FAULTS = {
    "RunStalled": {"step": 0},
    "RunHasNoWorkers": {"size": 0},
    "CheckpointTooOld": {"age": 8000},
    "GoodputLow": {"useful": 40, "pause": 80},
}
CLUSTER_FAULTS = {
    "RunFailed": {"status": "Failed"},
    "RunRetries": {"status": "Retrying"},
    "RunWithoutWorkers": {"workers": 0},
    "WorkersWait": {"pending": 2},
    "NodesLost": {"lost_nodes": 0.25},
    "AutoscalerGone": {"autoscaler": 0},
}
FAULTS = RUN_FAULTS | CLUSTER_FAULTS


@pytest.fixture
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs Prometheus' promtool: apt-get install prometheus")
    return found


def fires(fault, over):
    """A case of promtool: at its end, that alert alone fires. The run's own do not after its
    end."""
    of_run = RUN_FAULTS.get(fault, {}) | ({"running": 0} if over else {})
    expected = {fault} - (set(RUN_FAULTS) if over else set())
    count = 'count(ALERTS{{alertstate="firing", alertname="{}"}}) or vector(0)'
    return {
        "name": f"{fault}, run over: {over}",
        "interval": "1m",
        "input_series": run_series(**HEALTHY | of_run)
        + cluster_series(**CLUSTER_FAULTS.get(fault, {})),
        "promql_expr_test": [
            {
                "expr": count.format(name),
                "eval_time": "200m",
                "exp_samples": [{"labels": "{}", "value": int(name in expected)}],
            }
            for name in FAULTS
        ],
    }


def passed(promtool, folder, tests):
    # JSON is YAML, and is written faster.
    (folder / "rules.yaml").write_text(json.dumps({"groups": all_rules()}))
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "test.yaml").write_text(json.dumps(content))
    command = [promtool, "test", "rules", "test.yaml"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return made.returncode == 0, made.stdout + made.stderr


def test_every_alert_has_a_fault():
    assert sorted(r["alert"] for g in all_rules() for r in g["rules"]) == sorted(FAULTS)


def test_alert_fires_for_its_fault_alone_and_not_after_the_end(promtool, tmp_path):
    """What is said of a case that fails has its name."""
    tests = [fires(fault, over) for fault in (None, *FAULTS) for over in (False, True)]
    met, output = passed(promtool, tmp_path, tests)
    assert met, output


def test_alerts_are_silent_before_their_time(promtool, tmp_path):
    tests = []
    for rule in (rule for group in all_rules() for rule in group["rules"] if "for" in rule):
        before = f"{int(rule['for'].removesuffix('m')) - 1}m"
        test = fires(rule["alert"], over=False)
        for ask in test["promql_expr_test"]:
            ask |= {"eval_time": before, "exp_samples": [{"labels": "{}", "value": 0}]}
        tests.append(test)
    assert len(tests) >= 7
    met, output = passed(promtool, tmp_path, tests)
    assert met, output


def test_nodes_that_are_lost_before_there_is_a_counter_are_counted(promtool, tmp_path):
    """Ray's counter begins with the first nodes that are lost, here with twelve at once."""
    appears = {"series": 'ray_node_failure_total{ray_io_cluster="mine-x"}', "values": "_x60 12x120"}
    count = 'count(ALERTS{alertstate="firing", alertname="NodesLost"}) or vector(0)'
    asks = [
        {"expr": count, "eval_time": at, "exp_samples": [{"labels": "{}", "value": fires}]}
        for at, fires in (("59m", 0), ("61m", 1), ("118m", 1), ("125m", 0))
    ]
    test = {"interval": "1m", "input_series": [appears], "promql_expr_test": asks}
    met, output = passed(promtool, tmp_path, [test])
    assert met, output


def test_queries_ask_for_metrics_that_runs_have():
    asked = [rule["expr"] for group in rules() for rule in group["rules"]] + queries()
    found = {name for text in asked for name in re.findall(r"ray_elastic_dp_\w+", text)}
    assert found <= NAMES
    shown = {name for text in queries() for name in re.findall(r"ray_elastic_dp_\w+", text)}
    assert {name.removesuffix("_bucket") for name in NAMES} - shown <= {
        "ray_elastic_dp_running",
        "ray_elastic_dp_pause_seconds",
    }
