"""Each alert on runs and on Ray follows its fault: a real Prometheus scrapes a real Ray, on which a
run stands still, wants more workers than there is room for, and loses all its nodes. Minutes of the
alerts are seconds here; `tests/k8s/test_alerts.py` has them as they are shipped."""

import http.server
import threading

import pytest
import ray

from tests.k8s.test_alerts import OPERATOR, all_rules
from tests.patience import eventually
from tests.ports import free_port
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, trainer, wait_for
from tests.ray.prometheus import NEEDED, REPORT_S, at_once, firing, scraping

pytestmark = [pytest.mark.ray, pytest.mark.slow, *NEEDED]


class Autoscaler:
    """Stands in for the autoscaler's endpoint of metrics, which is up until it is gone."""

    def __init__(self):
        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def goes(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def cluster(monkeypatch):
    """A head without places. Its port of metrics is `cluster.exported`."""
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "metrics_export_port": free_port(),
        "_system_config": {"metrics_report_interval_ms": int(1000 * REPORT_S)},
    }
    made = Cluster(initialize_head=True, head_node_args=head)
    made.exported = head["metrics_export_port"]
    try:
        clusters.connect(made.address)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_each_alert_fires_while_its_fault_lasts_and_no_other_one_does(cluster, tmp_path):
    autoscaler = Autoscaler()
    namespace = {"namespace": "training"}
    targets = [
        (cluster.exported, namespace),
        (autoscaler.port, namespace | {"endpoint": "as-metrics"}),
    ]
    groups = at_once([group for group in all_rules() if group["name"] != OPERATOR])
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    seen = set()
    with scraping(targets, groups, tmp_path) as url:

        def fire(*names):
            eventually(lambda: firing(url) == {*names}, lambda: (firing(url), names))
            seen.update(names)

        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        pause = tmp_path / "pause"
        config = {"body_s": 0.05, "pause": str(pause)}
        job = trainer(
            tmp_path / "runs", "mine", steps=FOR_EVER, workers=2, every_steps=20, **config
        )
        run = job.start()
        wait_for(run, lambda status: is_whole(status, 2))
        fire()

        pause.touch()  # the bodies of the step wait
        fire("RunStalled", "CheckpointTooOld")
        pause.unlink()
        fire()

        run.scale(8)  # six of them have no room
        fire("WorkersWait", "GoodputLow")
        run.scale(2)
        fire()

        autoscaler.goes()
        fire("AutoscalerGone")

        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
        # Those that wait for a node or a worker, besides the one that is gone for good.
        fire(
            "AutoscalerGone",
            "NodesLost",
            "RunHasNoWorkers",
            "RunWithoutWorkers",
            "WorkersWait",
            "CheckpointTooOld",
            "GoodputLow",
        )
        for _ in nodes:
            cluster.add_node(num_cpus=1)
        wait_for(run, lambda status: is_whole(status, 2))
        fire("AutoscalerGone")
        run.stop("enough")
        run.result()
        eventually(lambda: firing(url) == {"AutoscalerGone"})
    assert seen == alerts
