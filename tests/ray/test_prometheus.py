"""A real Prometheus scrapes a real run: each query of the dashboard has data, the alerts that are
shipped stay silent, and one whose times are seconds fires while the run stands still."""

import os
import re
import signal

import pytest
import ray

from tests.k8s.manifests import K8S
from tests.k8s.test_alerts import RAY, queries, rules
from tests.patience import eventually
from tests.ports import free_port
from tests.ray.clusters import MINIMAL_PATH, forked_workers
from tests.ray.jobs import FOR_EVER, is_whole, members, pids_of, trainer, wait_for
from tests.ray.prometheus import NEEDED, REPORT_S, firing, has_data, scraping

pytestmark = [pytest.mark.ray, *NEEDED]


@pytest.fixture
def exported(monkeypatch):
    """The port at which Ray exports metrics."""
    port = free_port()
    for name, value in forked_workers().items():
        monkeypatch.setenv(name, value)
    environment = {"env_vars": {"PYTHONPATH": MINIMAL_PATH}}  # of workers, not of Ray's agent
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=environment,
        _system_config={"metrics_report_interval_ms": int(1000 * REPORT_S)},
        _metrics_export_port=port,
    )
    yield port
    ray.shutdown()


def stalls_at_once():
    """The alert RunStalled with seconds for its minutes, as one of its own."""
    [rule] = [rule for group in rules() for rule in group["rules"] if rule["alert"] == "RunStalled"]
    expr = rule["expr"].replace("[15m:1m]", "[5s:1s]")
    assert expr != rule["expr"]
    made = rule | {"alert": "StallsAtOnce", "expr": expr, "for": "1s"}
    return {"name": "at once", "rules": [made]}


@pytest.fixture
def prometheus(exported, tmp_path):
    """The URL of a Prometheus with the alerts as they are shipped, and one that fires at once."""
    target = (exported, {"namespace": "training"})
    with scraping([target], [*rules(), stalls_at_once()], tmp_path) as url:
        yield url


def test_dashboard_has_data_and_alerts_follow_a_run_with_a_kill(prometheus, tmp_path):
    assert "$run" in (K8S / "monitoring/dashboard.json").read_text()
    pause = tmp_path / "pause"
    config = {"body_s": 0.2, "pause": str(pause)}
    job = trainer(tmp_path / "runs", "seen", steps=FOR_EVER, workers=2, every_steps=5, **config)
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
