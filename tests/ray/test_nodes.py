"""Nodes of a real Ray come, go with notice, and are where workers die again and again; then its GCS
dies, too.

All on one cluster, whose GCS keeps what it knows in a folder; Redis would do the same.
"""

import json
import os
import signal
import time

import pytest
import ray

from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import (
    FOR_EVER,
    is_whole,
    members,
    pid_of_controller,
    pids_of,
    trainer,
    undisturbed,
    wait_for,
)
from tests.train.test_notice import kinds, waited_for

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head with one place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_storage", "rocksdb")
        patch.setenv("RAY_gcs_storage_path", str(tmp_path_factory.mktemp("gcs")))
        with clusters.nodes(1) as cluster:
            yield cluster


@pytest.fixture(autouse=True)
def alone(cluster):
    """A test that fails leaves nobody in the places of the next."""
    yield
    clusters.kill_all_that_are_left()


@pytest.fixture
def two(cluster):
    """With a node more."""
    if len(there()) < 2:
        cluster.add_node(num_cpus=1)
    eventually(lambda: len(there()) == 2, ray.nodes)
    return cluster


def there():
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def drain(node, within_s):
    """Drain a node as a SIGTERM to its `ray start --block` does."""
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = ray._private.worker.global_worker.gcs_client
    deadline_ms = int((time.time() + within_s) * 1000)
    accepted, why = gcs.drain_node(node.node_id, reason, "taken back", deadline_ms)
    assert accepted, why


def test_a_worker_joins_when_a_node_comes_and_is_replaced_when_it_goes(cluster, tmp_path):
    pause = tmp_path / "pause"
    config = {"body_s": 0.2, "pause": str(pause)}
    run = trainer(tmp_path, "pending", steps=FOR_EVER, workers=2, **config).start()
    before = wait_for(run, lambda s: is_whole(s, 1) and s["step"] >= 5)
    assert sorted(before["workers"].values()) == ["member", "starting"]
    wait_for(run, lambda s: s["step"] >= before["step"] + 5)  # it holds nobody up
    wait_for(run, lambda s: "no node has room for another worker now" in s["waits_for"])
    node = cluster.add_node(num_cpus=1)
    after = wait_for(run, lambda s: is_whole(s, 2))
    assert members(after) == sorted(before["workers"])  # the one that waited
    wait_for(run, lambda s: s["waits_for"] == "")
    cluster.add_node(num_cpus=1)
    pause.touch()  # nobody goes on before it has heard of the planned end
    asked_at = time.time()
    drain(node, within_s=600.0)
    (left,) = set(before["workers"]) - set(members(before))
    wait_for(run, lambda s: is_whole(s, 2) and left not in s["workers"])
    run.stop("enough")
    result = run.result()
    assert (result.reason, result.workers_lost) == ("enough", 0)
    lines = (tmp_path / "pending" / "events.jsonl").read_text().splitlines()
    told = [x for x in map(json.loads, lines) if x["time"] >= asked_at]
    assert not waited_for(kinds(told)), "the replacement is asked for at once"
    stopped = [x for x in told if x.get("event") == "WorkerStopped"]
    ended = [x for x in stopped if x["generation"] == stopped[0]["generation"]]
    stops = {x["worker"]: x for x in reversed(ended)}.values()  # the first word of each
    assert {x["reason"] for x in stops} == {"planned end"}
    assert len({tuple(x["position"]) for x in stops}) == 1, "nobody makes a step again"
    assert result.weights_sha256 == undisturbed(tmp_path, result.step)
    cluster.remove_node(node)


def test_a_run_outlives_the_gcs(two, tmp_path):
    """The controller dies meanwhile, too."""
    run = trainer(tmp_path, "head", steps=FOR_EVER, workers=2, body_s=0.2).start()
    whole = wait_for(run, lambda s: is_whole(s, 2) and s["step"] >= 5)
    pids, controller = pids_of(run, members(whole)), pid_of_controller("head")
    two.head_node.kill_gcs_server()
    os.kill(controller, signal.SIGKILL)
    two.head_node.start_gcs_server()
    wait_for(run, lambda s: is_whole(s, 2))
    assert pid_of_controller("head") != controller
    assert pids_of(run, members(whole)) == pids
    run.stop("enough")
    result = run.result()
    assert result.weights_sha256 == undisturbed(tmp_path, result.step)
