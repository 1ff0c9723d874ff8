"""What Ray is asked for each worker, by market and labels."""

import pytest

from elastic_dp.cluster.ray import capacity_monitor
from elastic_dp.cluster.ray.capacity_monitor import no_room
from elastic_dp.cluster.ray.worker_placement import WorkerNodes, node_selector, why_none_matches
from elastic_dp.config import ScalingConfig

SPOT, FIRM = {"ray.io/market-type": "spot"}, {"ray.io/market-type": "on-demand"}
EITHER = {"ray.io/market-type": "in(spot,on-demand)"}
H100 = {"ray.io/accelerator-type": "H100"}


@pytest.mark.parametrize(
    ("fields", "selector"),
    [
        ({}, {}),
        ({"market": "spot-first"}, EITHER),
        ({"market": "spot"}, SPOT),
        ({"market": "on-demand", "label_selector": H100}, H100 | FIRM),
    ],
)
def test_job_asks_by_its_market_and_labels(fields, selector):
    scaling = ScalingConfig(**fields)
    assert node_selector(scaling) == selector
    options = WorkerNodes("run", scaling).options("w1", selector)
    assert options["label_selector"] == (selector or None)


@pytest.mark.parametrize(
    ("selector", "nodes", "is_there"),
    [
        (EITHER, [{}, FIRM], True),
        (EITHER, [{}, H100], False),
        ({}, [{}], True),
        (H100 | SPOT, [SPOT], False),
        (H100 | SPOT, [H100 | SPOT], True),
        ({"ray.io/accelerator-type": "!in(T4,V100)"}, [{"ray.io/accelerator-type": "T4"}], False),
        ({"ray.io/accelerator-type": "!in(T4,V100)"}, [{}], True),
    ],
)
def test_missing_label_is_named_where_no_node_has_it(selector, nodes, is_there):
    said = why_none_matches(selector, nodes)
    assert (said == "") is is_there
    assert is_there or said.startswith("no node of this cluster is labelled ray.io/")


def node(cpus: int, labels: dict[str, str]) -> dict:
    return {"Alive": True, "Resources": {"CPU": cpus}, "Labels": labels}


def test_a_node_has_room_if_it_is_large_enough_and_so_labelled():
    firm_head, spot, firm = node(0, FIRM), node(2, SPOT), node(2, FIRM)
    on_demand = ScalingConfig(max_workers=2, market="on-demand")
    assert "is labelled ray.io/market-type=on-demand" in no_room(on_demand, [firm_head, spot])
    assert no_room(on_demand, [firm_head, spot, firm]) == ""
    assert "can hold a worker" in no_room(on_demand, [firm_head])


def test_worker_on_several_nodes_needs_as_many_that_fit(monkeypatch):
    scaling = ScalingConfig(
        processes_per_worker=2,
        nodes_per_worker=2,
        resources_per_worker={"CPU": 4},
        label_selector=H100,
    )
    assert "needs {'CPU': 2.0}" in no_room(scaling, [node(1, H100)])
    said = no_room(scaling, [node(2, H100), node(2, {}), node(1, H100)])
    assert "needs 2 nodes with {'CPU': 2.0} each, and this cluster has 1 such node." in said
    assert no_room(scaling, [node(2, H100), node(3, H100)]) == ""
    free = {"a": {"CPU": 2.0}, "b": {"CPU": 1.0}, "c": {"CPU": 3.0}}
    monkeypatch.setattr(capacity_monitor.private, "free_resources", lambda: free)
    assert capacity_monitor.has_room(scaling)
    free["c"] = {"CPU": 1.0}
    assert not capacity_monitor.has_room(scaling)
