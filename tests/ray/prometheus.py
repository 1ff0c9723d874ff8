"""A real Prometheus that scrapes a Ray of the test every second."""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml

from tests.ports import free_port

AGENT = ("prometheus_client", "opencensus", "aiohttp_cors")
NEEDED = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in AGENT),
        reason="needs Ray with its agent: pip install 'elastic_dp[metrics]'",
    ),
]
REPORT_S = 1.0  # of Ray's metrics


@contextlib.contextmanager
def scraping(targets, groups, folder):
    """The URL of a Prometheus. `targets`: (port, labels that the Prometheus operator would set)."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": f"job{number}",
                "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}],
            }
            for number, (port, labels) in enumerate(targets)
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            *("prometheus", f"--config.file={folder / 'prometheus.yaml'}"),
            *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
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


def has_data(url, query):
    # With 15 minutes that have not passed yet, a difference is that of the samples there are.
    return bool(asked(url, f"query?query={urllib.parse.quote(query)}").get("result"))
