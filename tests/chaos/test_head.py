"""The hosts that lead: the head, which keeps its memory elsewhere, and the one where the controller
is. After each, the same bits.

The driver dies with the head, and the run ends without. A head that is taken away with notice
remembers nothing, and no step is lost all the same.
"""

import random
import shutil
import signal
import time

import pytest

from tests.chaos.conftest import STEPS, check, start
from tests.chaos.hosts import available
from tests.patience import eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason="needs root and iproute2, to make hosts"),
]
no_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
MEMORIES = [{"memory": "rocksdb"}, pytest.param({"memory": "redis"}, marks=no_redis)]


@pytest.mark.parametrize("cluster", MEMORIES, indirect=True, ids=["rocksdb", "redis"])
def test_the_head_is_killed_and_comes_back(cluster, calm):
    """The controller is on it, too. Workers train on, and somebody leads them again when the head
    is back."""
    run = start(cluster, "head")
    assert cluster.host_of_controller() is cluster.head
    cluster.head.kill()
    cluster.start_head()
    took_over(run)
    check(run, calm)
    assert run.result["workers_lost"] == 0


@pytest.mark.parametrize("cluster", [{"office": True}], indirect=True, ids=["office"])
def test_the_node_of_the_controller_is_lost(cluster, calm):
    run = start(cluster, "office")
    office = cluster.host_of_controller()
    assert office not in (cluster.head, *cluster.nodes)
    office.kill()
    took_over(run)
    assert cluster.host_of_controller() is not office
    check(run, calm)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cluster", [{"workers": 2}], indirect=True, ids=["forgets"])
def test_head_that_is_taken_away_with_notice_loses_no_step(cluster, calm):
    """At ten instants, from the first step on; the next one knows nothing of it."""
    chance, options = random.Random(7), {"heartbeat_timeout_s": 6.0, "max_workers": 2}
    run = cluster.run("evicted", STEPS, body_s=0.8, **options)
    for nth in range(10):
        run.wait(lambda run, least=12 * nth: run.step > least)
        time.sleep(chance.random())
        take_away_head(cluster)
        made, told = run.step, [line.get("text", "") for line in run.lines("events")]
        assert any(f"the state after step {made} is committed" in text for text in told), told[-9:]
        run.stop_driver()
        for host in cluster.network.hosts:
            host.kill()
        cluster.start_head()
        cluster.start_nodes(cluster.nodes)
        run = cluster.run("evicted", STEPS, body_s=0.8, **options)
    check(run, calm)


def take_away_head(cluster):
    """As the end of its pod: SIGTERM to its first process, which Ray gives 8 s (see `Cluster`)."""
    (pid, *_) = cluster.head.signal(signal.SIGTERM, "ray start --block")
    eventually(lambda: pid not in cluster.head.pids("ray start --block"))


def took_over(run):
    run.wait(lambda run: any("took over" in line.get("text", "") for line in run.lines("events")))
