"""How the runs of a cluster divide its workers: who shrinks, who waits, and that all agree."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.extensions.sharing.cluster_shares import RunDemand, limit_of, worker_shares

CPU = {"CPU": 1.0}
EIGHT = {"n1": {"CPU": 4.0}, "n2": {"CPU": 4.0}}


def run(name, priority=0, *, size=8, least=1, nodes="", began_at=0.0, needs=CPU, **more):
    placed = tuple(f"n{number}" for number in nodes)
    return RunDemand(name, priority, began_at, least, size, needs, placed, **more)


def test_run_of_higher_priority_gets_all_but_the_minimum_of_the_others():
    runs = [run("low", 0, least=2, nodes="11112222"), run("high", 5, size=8)]
    assert worker_shares(runs, EIGHT) == {"low": 2, "high": 6}
    assert limit_of("low", runs, {"low": 2, "high": 6}, may_grow=False) == 2
    assert limit_of("high", runs, {"low": 2, "high": 6}, may_grow=False) is None


def test_runs_of_three_priorities_shrink_from_the_lowest():
    runs = [
        run("low", 0, size=4, nodes="1111"),
        run("middle", 1, size=4, nodes="2222"),
        run("high", 2, size=4),
    ]
    assert worker_shares(runs, EIGHT) == {"low": 1, "middle": 3, "high": 4}


def test_equal_run_that_comes_later_takes_nothing():
    first, later = (
        run("first", nodes="11112222"),
        run("later", size=4, began_at=9.0, is_queued=True),
    )
    shares = worker_shares([first, later], EIGHT)
    assert shares == {"first": 8, "later": 0}
    assert limit_of("first", [first, later], shares, may_grow=False) is None
    assert limit_of("later", [first, later], shares, may_grow=False) == 0


def test_equal_run_does_not_grow_into_the_place_of_another():
    """The first has lost a node; what the other holds is not taken for it."""
    first, later = run("first", nodes="111"), run("later", size=4, nodes="2222", began_at=9.0)
    assert worker_shares([first, later], EIGHT) == {"first": 4, "later": 4}


def test_queued_run_is_given_its_minimum_or_nothing():
    low = run("low", least=5, nodes="11112222")
    assert worker_shares([low, run("high", 1, least=4, is_queued=True)], EIGHT)["high"] == 0
    assert worker_shares([low, run("high", 1, least=3, is_queued=True)], EIGHT)["high"] == 3


def test_queued_run_alone_is_not_limited():
    alone = [run("alone", size=9, least=9, is_queued=True)]
    assert limit_of("alone", alone, worker_shares(alone, EIGHT), may_grow=False) is None


def test_cluster_that_grows_limits_a_run_only_while_a_higher_one_waits():
    low, high = run("low", nodes="1111"), run("high", 1, size=4, nodes="222")
    shares = worker_shares([low, high], EIGHT)
    assert limit_of("low", [low, high], shares, may_grow=True) == 4
    full = dataclasses.replace(high, nodes=("n2",) * 4)
    assert limit_of("low", [low, full], shares, may_grow=True) is None
    assert limit_of("low", [low, full], shares, may_grow=False) == 4


def test_worker_that_needs_more_than_is_left_on_any_node_is_not_counted():
    large = run("large", 1, size=3, needs={"CPU": 3.0})
    assert worker_shares([large, run("low", nodes="1122")], EIGHT) == {"large": 2, "low": 2}


def test_run_is_given_no_place_on_a_node_that_its_job_does_not_allow():
    runs = [run("low", nodes="11112222"), run("high", 1, size=8, usable=("n2",))]
    assert worker_shares(runs, EIGHT) == {"low": 4, "high": 4}


runs_of_a_cluster = st.lists(
    st.builds(
        lambda priority, least, more, nodes, queued: (priority, least, least + more, nodes, queued),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(0, 5),
        st.lists(st.sampled_from(["n1", "n2"]), max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(runs_of_a_cluster)
def test_shares_of_any_runs_fit_and_spare_the_minimum_of_those_that_train(drawn):
    demands, room = [], {node: dict(has) for node, has in EIGHT.items()}
    for number, (priority, least, size, nodes, queued) in enumerate(drawn):
        placed = []
        for node in [] if queued else nodes[:size]:
            if room[node]["CPU"] >= 1:
                room[node]["CPU"] -= 1
                placed.append(node)
        demands.append(
            RunDemand(
                f"r{number}", priority, float(number), least, size, CPU, tuple(placed), None, queued
            )
        )
    shares = worker_shares(demands, EIGHT)
    assert shares == worker_shares(reversed(demands), EIGHT)
    assert sum(shares.values()) <= 8
    for each in demands:
        share = shares[each.name]
        assert share >= min(each.min_workers, len(each.nodes))
        assert share <= each.size
        if each.is_queued:
            assert share == 0 or share >= each.min_workers
        above = [run for run in demands if run.priority > each.priority]
        if not each.is_queued and not above:
            assert share >= len(each.nodes), "only a run of higher priority shrinks it"
        if share > max(each.min_workers, len(each.nodes)):
            hungry = [run for run in above if shares[run.name] < run.size and not run.is_queued]
            assert not hungry, "it grows although one of higher priority has less than it wants"
