"""A real Prometheus scrapes a real run: each query of the dashboard has data, the alerts that are
shipped stay silent, and one whose times are seconds fires while the run stands still."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
import ray
import yaml

from tests.k8s.manifests import K8S
from tests.k8s.test_alerts import RAY, queries, rules
from tests.patience import eventually
from tests.ports import free_port
from tests.ray.clusters import ROOT
from tests.ray.jobs import FOR_EVER, is_whole, members, pids_of, trainer, wait_for

AGENT = ("prometheus_client", "opencensus", "aiohttp_cors")
AT_ONCE = {"15m:1m": "5s:1s", "15m": "1s", "5m": "1s"}  # the times of RunStalled, in seconds
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in AGENT),
        reason="needs Ray with its agent: pip install 'elastic_dp[metrics]'",
    ),
]


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
        _system_config={"metrics_report_interval_ms": 1000},
        _metrics_export_port=port,
    )
    yield port
    ray.shutdown()


def stalls_at_once():
    """The group of RunStalled with seconds for its minutes, as an alert of its own."""
    [rule] = [rule for group in rules() for rule in group["rules"] if rule["alert"] == "RunStalled"]
    text = re.sub("|".join(AT_ONCE), lambda found: AT_ONCE[found[0]], yaml.safe_dump(rule))
    return {"name": "at once", "rules": [yaml.safe_load(text) | {"alert": "StallsAtOnce"}]}


@pytest.fixture
def prometheus(exported, tmp_path):
    """The URL of a Prometheus that scrapes Ray every second, with the alerts."""
    groups = {"groups": [*rules(), stalls_at_once()]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
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


def firing(url):
    alerts = asked(url, "alerts").get("alerts", [])
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def test_dashboard_has_data_and_alerts_follow_a_run_with_a_kill(prometheus, tmp_path):
    assert "$run" in (K8S / "monitoring/dashboard.json").read_text()
    pause = tmp_path / "pause"
    config = {"body_s": 0.05, "pause": str(pause)}
    job = trainer(tmp_path / "runs", "seen", steps=FOR_EVER, workers=2, every_steps=20, **config)
    run = job.start()
    whole = wait_for(run, lambda status: is_whole(status, 2))
    victim = members(whole)[-1]
    os.kill(pids_of(run, whole["workers"])[victim], signal.SIGKILL)
    asks = [*queries(), *actors_in_alerts()]

    def empty():
        return [ask for ask in asks if not has_data(prometheus, ask.replace("$run", "seen"))]

    eventually(lambda: not empty(), empty)
    eventually(lambda: not firing(prometheus))
    pause.touch()  # the bodies of the step wait
    eventually(lambda: firing(prometheus) == {"StallsAtOnce"}, lambda: firing(prometheus))
    pause.unlink()
    eventually(lambda: not firing(prometheus), lambda: firing(prometheus))
    run.stop("enough")
    run.result()


def actors_in_alerts():
    """The metrics of Ray itself by which alerts see controllers and workers."""
    text = " ".join(rule["expr"] for group in rules(RAY) for rule in group["rules"])
    found = set(re.findall(r'ray_actors\{[^}]*State="ALIVE"\}', text))
    assert len(found) == 2
    return found


def has_data(url, query):
    # With 15 minutes that have not passed yet, a difference is that of the samples there are.
    return bool(asked(url, f"query?query={urllib.parse.quote(query)}").get("result"))
