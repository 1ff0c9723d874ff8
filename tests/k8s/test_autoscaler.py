"""What Ray's KubeRay autoscaler makes of the shipped manifest when Kubernetes does not give what is
asked, and that what it says then is what a user is told.
"""

import time

import pytest
from ray.core.generated import autoscaler_pb2

from elastic_dp.cluster.ray import worker_placement
from elastic_dp.cluster.ray.capacity_monitor import _LOG, autoscaler_words
from elastic_dp.config import ScalingConfig
from tests.k8s.autoscaler import Cluster
from tests.k8s.manifests import build, cluster

NEEDS = {"CPU": 1.0}


@pytest.fixture
def spec():
    return cluster(build("overlays/cpu-smoke"))


def wants(market, workers=1, needs=NEEDS):
    """What that many waiting workers of a job ask Ray for."""
    return [
        (
            needs,
            worker_placement.placement_preferences(ScalingConfig(max_workers=1, market=market), []),
        )
    ] * workers


def told(state, needs=NEEDS, has_large_nodes=True):
    """What a user is told of a state."""
    return autoscaler_words(state, needs, has_large_nodes, time.time())


def groups_of(there):
    return sorted(pod.group for pod in there.kubernetes.running())


def test_spot_comes_first(spec, monkeypatch):
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("spot-first", 2)
    there.until(lambda _: len(there.kubernetes.running()) == 2)
    assert groups_of(there) == ["spot", "spot"]
    assert told(there.until(lambda state: not state.pending_instances)) == ""


def test_autoscaler_takes_on_demand_when_spot_is_exhausted(spec, monkeypatch):
    there = Cluster(spec, monkeypatch, "allocate_status_timeout_s")
    there.kubernetes.capacity["spot"] = 1
    there.gcs.demand = wants("spot-first", 2)
    there.until(lambda _: groups_of(there) == ["on-demand", "spot"])
    assert [pod.group for pod in there.kubernetes.workers()] == ["spot", "on-demand"]


def test_autoscaler_says_which_nodes_are_pending(spec, monkeypatch):
    there = Cluster(spec, monkeypatch)
    there.kubernetes.capacity["spot"] = 0
    there.gcs.demand = wants("spot-first", 2)
    said = told(there.until(lambda state: len(state.pending_instances) == 2))
    assert said == "it has asked for nodes that are not up yet: 2 of group spot"


def test_autoscaler_without_the_right_to_patch_says_so(spec, monkeypatch):
    there = Cluster(spec, monkeypatch)
    there.kubernetes.refuses["PATCH"] = 403
    there.gcs.demand = wants("spot-first", 2)
    said = told(there.until(lambda state: state.failed_instance_requests))
    assert said.startswith(f"it cannot add nodes of group spot: {_LOG}")
    assert there.kubernetes.patches == [] == there.kubernetes.workers()


def test_a_namespace_quota(spec, monkeypatch):
    there = Cluster(spec, monkeypatch, "request_status_timeout_s")
    there.kubernetes.quota = 1
    there.gcs.demand = wants("spot-first", 2)
    state = there.until(lambda state: state.failed_instance_requests)
    assert "it cannot add nodes of group spot" in told(state)
    assert groups_of(there) == ["spot"]


def test_a_kind_of_gpu_that_nobody_has(spec, monkeypatch):
    needs = {"GPU": 1.0, "accelerator_type:H100": 0.001}
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("any", 2, needs) + wants("any", 1, {"GPU": 8.0})
    said = told(there.look(), needs, has_large_nodes=False)
    assert said.startswith("no group of nodes has one with {") and "H100" in said
    assert "8.0" not in said  # another job's


def test_group_at_its_cap_is_named_as_the_reason(spec, monkeypatch):
    spec["workerGroupSpecs"] = [group | {"maxReplicas": 1} for group in spec["workerGroupSpecs"]]
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("spot", 2)
    there.until(lambda _: len(there.kubernetes.running()) == 1)
    said = told(there.look())
    assert said.startswith("no group may add a node for {'CPU': 1.0}") and "maxReplicas" in said
    capped = autoscaler_pb2.FailedInstanceRequest(
        ray_node_type_name="spot",
        failed_ts=int(time.time()),
        reason="launch failed with Launch capped by maxReplicas limit.",
    )
    said = told(autoscaler_pb2.AutoscalingState(failed_instance_requests=[capped]))
    assert said == "it cannot add nodes of group spot: it has as many as maxReplicas lets it have"


def test_autoscaler_without_an_on_demand_group_says_what_it_cannot_place(spec, monkeypatch):
    spec["workerGroupSpecs"] = [
        group for group in spec["workerGroupSpecs"] if group["groupName"] == "spot"
    ]
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("on-demand")
    assert "no group of nodes has one" in told(there.look(), has_large_nodes=False)
    assert there.kubernetes.patches == []


def test_a_preempted_node_is_replaced(spec, monkeypatch):
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("spot-first", 2)
    there.until(lambda _: len(there.kubernetes.running()) == 2)
    first = there.kubernetes.running()[0]
    there.kubernetes.preempt(first)
    there.until(lambda state: not state.pending_instances)
    assert len(there.kubernetes.running()) == 2 and first not in there.kubernetes.running()
