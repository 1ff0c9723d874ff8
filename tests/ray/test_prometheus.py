"""A real Prometheus scrapes a real run: each query of the dashboard has data, no alert is on."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
import ray
import yaml

from tests.k8s.manifests import K8S
from tests.k8s.test_alerts import queries, rules
from tests.patience import eventually
from tests.ray.clusters import ROOT
from tests.ray.jobs import FOR_EVER, is_whole, members, pids_of, trainer, wait_for

AGENT = ("prometheus_client", "opencensus", "aiohttp_cors")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in AGENT),
        reason="needs Ray with its agent: pip install 'elastic_dp[metrics]'",
    ),
]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def exported():
    """The port at which Ray exports metrics."""
    port = free_port()
    environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", ROOT)}}
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=environment,
        _metrics_export_port=port,
    )
    yield port
    ray.shutdown()


@pytest.fixture
def prometheus(exported, tmp_path):
    """The URL of a Prometheus that scrapes Ray every second, with the runs' alerts."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}))
    # The Prometheus operator sets the namespace.
    target = {"targets": [f"127.0.0.1:{exported}"], "labels": {"namespace": "training"}}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "ray", "static_configs": [target]}],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            *("prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}"),
            *(f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}/api/v1"
    process.terminate()
    process.wait()


def asked(url, path):
    try:
        with urllib.request.urlopen(f"{url}/{path}", timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 503:  # it starts
                raise
    except OSError:
        pass
    return {}


def test_every_query_of_the_dashboard_has_data_of_a_run_with_a_kill(prometheus, tmp_path):
    assert "$run" in (K8S / "monitoring/dashboard.json").read_text()
    job = trainer(tmp_path / "runs", "seen", steps=FOR_EVER, workers=2, body_s=0.05, every_steps=20)
    run = job.start()
    whole = wait_for(run, lambda status: is_whole(status, 2))
    victim = members(whole)[-1]
    os.kill(pids_of(run, whole["workers"])[victim], signal.SIGKILL)
    run.checkpoint()  # only those that were requested have a duration

    def empty():
        return [q for q in queries() if not has_data(prometheus, q.replace("$run", "seen"))]

    eventually(lambda: not empty(), empty)
    alerts = asked(prometheus, "alerts")["alerts"]
    assert [alert["labels"] for alert in alerts if alert["state"] == "firing"] == []
    run.stop("enough")
    run.result()


def has_data(url, query):
    # With 15 minutes that have not passed yet, a difference is that of the samples there are.
    return bool(asked(url, f"query?query={urllib.parse.quote(query)}").get("result"))
