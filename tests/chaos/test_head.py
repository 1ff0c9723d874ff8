"""The hosts that lead: the head, which keeps its memory elsewhere, and the one where the controller
is. After each, the same bits.

The driver dies with the head, and the run ends without.
"""

import shutil

import pytest

from tests.chaos.conftest import check, start
from tests.chaos.hosts import available

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


def took_over(run):
    run.wait(lambda run: any("took over" in line.get("text", "") for line in run.lines("events")))
