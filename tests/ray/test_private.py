"""What this package uses of Ray that is not public is as it was read. An upgrade of Ray that
changes it fails here, by the name of the function in `elastic_dp.cluster.ray.private`.
"""

import os

import pytest
import ray

from elastic_dp.cluster.ray import private
from elastic_dp.cluster.ray.worker_placement import NodeGroups
from elastic_dp.config import ScalingConfig
from tests.patience import eventually
from tests.ray import clusters

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.shared():
        yield


@ray.remote(num_cpus=1)
class Waits:
    def begin(self):
        pass


@pytest.fixture
def actor():
    made = Waits.options(name="waits", namespace="private").remote()
    ray.get(made.begin.remote())
    return made


def test_actor_and_actors_in_have_node_and_process_also_of_a_dead_actor(actor):
    here = ray.nodes()[0]["NodeID"]
    entry = private.actor(actor)
    assert (entry.name, entry.state, entry.node) == ("waits", "ALIVE", here)
    assert entry.address == ray.nodes()[0]["NodeManagerAddress"]
    assert os.path.exists(f"/proc/{entry.pid}")
    assert [each.name for each in private.actors_in("ALIVE", "PENDING_CREATION")] == ["waits"]
    ray.kill(actor)
    eventually(lambda: private.actor(actor).state == "DEAD")
    assert private.actor(actor).node == here
    assert "waits" not in [each.name for each in private.actors_in("ALIVE")]


def test_actor_without_room_has_no_process():
    waits = Waits.options(num_cpus=1000).remote()
    eventually(lambda: private.actor(waits) is not None)
    assert private.actor(waits).pid == 0
    ray.kill(waits)


def test_resources_are_those_of_each_node(actor):
    (node,) = ray.nodes()
    total, used = private.total_resources(), {node["NodeID"]: node["Resources"]["CPU"] - 1}
    assert total[node["NodeID"]]["CPU"] == node["Resources"]["CPU"]
    eventually(lambda: {n: r["CPU"] for n, r in private.free_resources().items()} == used)
    ray.kill(actor)


def test_placement_groups_of_a_run_are_found_by_name_with_their_nodes_until_they_are_removed():
    nodes = NodeGroups("one", ScalingConfig(resources_per_worker={"CPU": 1}))
    once, again = (nodes.options("w1", {})["scheduling_strategy"] for _ in range(2))
    assert once.placement_group == again.placement_group, "an attempt is repeated"
    other = ray.util.placement_group([{"CPU": 1}], name="another/w1")
    eventually(lambda: nodes.all_of({"w1": ""}) == [("w1", ray.nodes()[0]["NodeID"])])
    assert private.placement_groups("one").keys() == {"w1"}
    nodes.keep(["w1"])
    assert nodes.all_of({"w1": ""}) and nodes.all_of({"w2": ""}) == []
    nodes.keep([])
    eventually(lambda: private.placement_groups("one") == {})
    assert private.placement_groups("another").keys() == {"w1"}
    ray.util.remove_placement_group(other)


def test_head_node_is_the_one_with_the_gcs_and_does_not_drain():
    assert private.head_node() == ray.nodes()[0]["NodeID"]
    assert dict(private.draining_nodes()) == {}


def test_keys_of_the_gcs_are_created_once_listed_and_deleted():
    assert not private.kv_put(b"elastic_dp/test/1", b"a")
    assert private.kv_put(b"elastic_dp/test/1", b"b", overwrite=False)
    assert private.kv_get(b"elastic_dp/test/1") == b"a" and private.kv_exists(b"elastic_dp/test/1")
    private.kv_put(b"elastic_dp/test/2", b"c")
    assert sorted(private.kv_list(b"elastic_dp/test/")) == [
        b"elastic_dp/test/1",
        b"elastic_dp/test/2",
    ]
    private.kv_delete(b"elastic_dp/test/2")
    assert private.kv_get(b"elastic_dp/test/2") is None
    private.kv_delete(b"elastic_dp/test/", is_prefix=True)
    assert private.kv_list(b"elastic_dp/test/") == []


def test_cluster_without_an_autoscaler_reports_none():
    assert private.cluster_status().autoscaling_state.last_seen_cluster_resource_state_version == 0
    assert not private.has_autoscaler()


def test_this_process_did_not_start_the_cluster_and_it_has_no_dashboard():
    assert not private.owns_cluster()
    assert private.dashboard_url() == ""
    private.reload_authentication()
    assert private.psutil().Process().pid == os.getpid()
