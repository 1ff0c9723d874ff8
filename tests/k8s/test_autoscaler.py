"""What Ray's KubeRay autoscaler makes of the shipped manifest when Kubernetes does not give what is
asked, and that what it says then is what a user is told.
"""

import logging
import time

import pytest
from ray._private import ray_constants

from elastic_dp.cluster.ray import autoscaler_status, worker_placement
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


@pytest.fixture
def told(caplog):
    """What a user is told of a state; the autoscaler's log is where it says why."""
    caplog.set_level(logging.INFO)

    def told(state, needs=NEEDS):
        return autoscaler_status.told(
            state, needs, time.time(), autoscaler_status.last_launch_failure(log_of(caplog))
        )

    return told


def log_of(caplog):
    """Return the log as Ray writes it."""
    formatter = logging.Formatter(ray_constants.LOGGER_FORMAT)
    return "".join(f"{formatter.format(record)}\n" for record in caplog.records)


def groups_of(there):
    return sorted(pod.group for pod in there.kubernetes.running())


def test_spot_comes_first(spec, monkeypatch, told):
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


def test_autoscaler_says_which_nodes_are_pending(spec, monkeypatch, told):
    there = Cluster(spec, monkeypatch)
    there.kubernetes.capacity["spot"] = 0
    there.gcs.demand = wants("spot-first", 2)
    said = told(there.until(lambda state: len(state.pending_instances) == 2))
    assert said == "it has asked for nodes that are not up yet: 2 of group spot"


def test_autoscaler_without_the_right_to_patch_says_so(spec, monkeypatch, told):
    there = Cluster(spec, monkeypatch)
    there.kubernetes.refuses["PATCH"] = 403
    there.gcs.demand = wants("spot-first", 2)
    said = told(there.until(lambda state: state.failed_instance_requests))
    assert said.startswith("it cannot add nodes of group spot: ")
    assert "403 Client Error: Forbidden for url: https://kubernetes/apis/ray.io/v1/" in said
    assert "ScaleRequest" not in said and "request id" not in said and len(said) < 300
    assert there.kubernetes.patches == [] == there.kubernetes.workers()


def test_autoscaler_without_a_token_says_so_in_its_log(spec, monkeypatch, caplog):
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("spot-first")
    there.kubernetes.refuses["GET"] = 401
    assert there.look() is None  # it has nothing to report, so its log is what there is
    said = autoscaler_status.last_launch_failure(log_of(caplog))
    assert "401 Client Error: Unauthorized for url: https://kubernetes/apis/" in said


def test_a_namespace_quota(spec, monkeypatch, told):
    there = Cluster(spec, monkeypatch, "request_status_timeout_s")
    there.kubernetes.quota = 1
    there.gcs.demand = wants("spot-first", 2)
    state = there.until(lambda state: state.failed_instance_requests)
    assert "it cannot add nodes of group spot: failed to allocate cloud instance after" in told(
        state
    )
    assert groups_of(there) == ["spot"]


def test_a_kind_of_gpu_that_nobody_has(spec, monkeypatch, told):
    needs = {"GPU": 1.0, "accelerator_type:H100": 0.001}
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("any", 2, needs) + wants("any", 1, {"GPU": 8.0})
    said = told(there.look(), needs)
    assert said.startswith("No available node types can fulfill resource requests {")
    assert "'accelerator_type:H100': 0.001" in said and "}*2. Add suitable node types" in said
    assert "8.0" not in said  # another job's


def test_autoscaler_without_an_on_demand_group_says_what_it_cannot_place(spec, monkeypatch, told):
    spec["workerGroupSpecs"] = [
        group for group in spec["workerGroupSpecs"] if group["groupName"] == "spot"
    ]
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("on-demand")
    said = told(there.look())
    assert "with label selectors: [ray.io/market-type LABEL_OPERATOR_IN [on-demand]]" in said
    assert there.kubernetes.patches == []


def test_a_preempted_node_is_replaced(spec, monkeypatch):
    there = Cluster(spec, monkeypatch)
    there.gcs.demand = wants("spot-first", 2)
    there.until(lambda _: len(there.kubernetes.running()) == 2)
    first = there.kubernetes.running()[0]
    there.kubernetes.preempt(first)
    there.until(lambda state: not state.pending_instances)
    assert len(there.kubernetes.running()) == 2 and first not in there.kubernetes.running()


def test_the_last_words_of_a_log():
    ours = (
        "2026-11-21 21:18:56,715\tINFO a.py:1 -- Update instance REQUESTED->ALLOCATION_FAILED "
        "(id=1, type=spot): "
    )
    failed = (
        f"{ours}launch failed with Failed to launch 2 nodes of type spot with request id a-1: 403\n"
    )
    calm = "2026-11-21 21:18:57,715\tINFO a.py:1 -- Fetched\n"
    assert (
        autoscaler_status.last_launch_failure(failed + calm)
        == "launch failed with Failed to launch 2 nodes of type spot: 403"
    )
    error = "2026-11-21 21:18:58,000\tERROR b.py:2 -- it broke\n"
    assert autoscaler_status.last_launch_failure(failed + error + calm) == "it broke"
    trace = "Traceback (most recent call last):\n  x\nKeyError: 'spot'\n"
    assert autoscaler_status.last_launch_failure(error + trace + calm) == "KeyError: 'spot'"
    assert (
        autoscaler_status.last_launch_failure(calm)
        == autoscaler_status.last_launch_failure("")
        == ""
    )
