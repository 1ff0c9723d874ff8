"""What Ray is asked for each worker, by market and labels."""

import pytest

from elastic_dp.cluster.ray.capacity_monitor import no_room
from elastic_dp.cluster.ray.worker_placement import actor_options, node_selector, why_none_matches
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
    assert node_selector(ScalingConfig(**fields)) == selector
    assert actor_options(selector) == ({"label_selector": selector} if selector else {})


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
