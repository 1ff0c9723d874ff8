"""What Ray is asked for each worker, by market and zone."""

from elastic_dp.cluster.ray.worker_placement import (
    actor_options,
    placement_preferences,
    why_none_matches,
)
from elastic_dp.config import ScalingConfig

SPOT, FIRM = {"ray.io/market-type": "spot"}, {"ray.io/market-type": "on-demand"}
EITHER = {"ray.io/market-type": "in(spot,on-demand)"}
ZONES = {"ray.io/availability-zone": "in(a,b)"}
A, B = {"ray.io/availability-zone": "a"}, {"ray.io/availability-zone": "b"}


def scaling(**fields):
    return ScalingConfig(max_workers=8, **fields)


def in_turn(count, **fields):
    """The first wish of each, one after the other."""
    asked = []
    for _ in range(count):
        asked.append(placement_preferences(scaling(**fields), asked)[0])
    return asked


def test_a_job_that_does_not_care_asks_for_nothing():
    assert placement_preferences(scaling(), []) == [] and actor_options([]) == {}


def test_spot_first_is_one_wish():
    """A second one would never be asked for: the autoscaler stays with the first that a group
    has."""
    asked = placement_preferences(scaling(market="spot-first"), [])
    assert asked == [EITHER]
    assert actor_options(asked) == {"label_selector": EITHER, "fallback_strategy": None}
    assert placement_preferences(scaling(market="spot"), []) == [SPOT]
    assert placement_preferences(scaling(market="on-demand"), []) == [FIRM]


def test_a_floor_of_on_demand_workers_is_kept_when_one_is_lost():
    assert in_turn(4, market="spot-first", min_on_demand=2) == [FIRM, FIRM, EITHER, EITHER]
    assert placement_preferences(scaling(market="spot-first", min_on_demand=2), [FIRM, SPOT]) == [
        FIRM
    ]


def test_workers_are_spread_over_zones_where_these_have_room():
    assert in_turn(3, label_selector=ZONES) == [A, B, A]
    assert placement_preferences(scaling(label_selector=ZONES), [A]) == [B, ZONES]
    assert placement_preferences(scaling(label_selector=ZONES, market="spot-first"), []) == [
        EITHER | A,
        EITHER | ZONES,
    ]
    assert placement_preferences(scaling(label_selector=A), []) == [A]


def test_label_selector_and_accelerator_are_part_of_every_node_request():
    """The kind also where it is a resource, as Ray counts it."""
    h100 = {"ray.io/accelerator-type": "H100"}
    assert placement_preferences(scaling(label_selector=h100), []) == [h100]
    asked = placement_preferences(scaling(label_selector=h100 | ZONES, market="spot"), [])
    assert asked == [h100 | SPOT | A, h100 | SPOT | ZONES]
    assert actor_options(asked)["fallback_strategy"] == [{"label_selector": h100 | SPOT | ZONES}]
    assert (
        why_none_matches([h100 | SPOT], [SPOT])
        and why_none_matches([h100 | SPOT], [h100 | SPOT]) == ""
    )
    others = {"ray.io/accelerator-type": "!in(T4,V100)"}
    assert (
        why_none_matches([others], [{"ray.io/accelerator-type": "T4"}])
        and why_none_matches([others], [h100]) == ""
    )
    assert why_none_matches([others], [{}]) == ""


def test_missing_label_is_named_where_no_node_has_it():
    assert (
        why_none_matches([SPOT, FIRM], [{}, SPOT | A])
        == why_none_matches([EITHER], [{}, FIRM])
        == ""
    )
    assert why_none_matches([EITHER], [{}, A])
    assert why_none_matches([], []) == "" and why_none_matches([A, {}], [{}]) == ""
    said = "no node of this cluster is labelled ray.io/market-type=on-demand"
    assert why_none_matches([FIRM], [SPOT]) == said


def node(cpus: int, labels: dict[str, str]) -> dict:
    return {"Alive": True, "Resources": {"CPU": cpus}, "Labels": labels}


def test_a_node_has_room_if_it_is_large_enough_and_so_labelled():
    from elastic_dp.cluster.ray.capacity_monitor import no_room

    firm_head, spot, firm = node(0, FIRM), node(2, SPOT), node(2, FIRM)
    on_demand = ScalingConfig(max_workers=2, market="on-demand")
    assert "is labelled ray.io/market-type=on-demand" in no_room(on_demand, [firm_head, spot])
    assert no_room(on_demand, [firm_head, spot, firm]) == ""
    both = ScalingConfig(max_workers=3, market="spot", min_on_demand=1)
    assert "is labelled ray.io/market-type=spot" in no_room(both, [firm])
    assert "is labelled ray.io/market-type=on-demand" in no_room(both, [spot])
    assert no_room(both, [spot, firm]) == ""
    assert no_room(ScalingConfig(max_workers=1, market="spot", min_on_demand=1), [firm]) == ""
    assert "can hold a worker" in no_room(on_demand, [firm_head])
