"""Runs with priorities on one cluster of eight places: the lower ones shrink for the higher ones
without losing a step, grow back, and end with the weights of the undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

import elastic_dp as edp
from tests.patience import Stalls
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, trainer, undisturbed, wait_for

pytestmark = pytest.mark.ray
PLACES, FEW = 8, 4
WITHIN_S = 2.0


@pytest.fixture(autouse=True)
def cluster(request):
    with clusters.nodes(FEW if "beside_one_in_the_queue" in request.node.name else PLACES):
        yield


def prioritized(tmp_path, name, priority, *, least, size, body_s=0.05) -> edp.ElasticTrainer:
    made = trainer(tmp_path, name, steps=FOR_EVER, workers=size, body_s=body_s)
    scaling = dataclasses.replace(made.spec.scaling, min_workers=least, priority=priority)
    made.spec = dataclasses.replace(made.spec, scaling=scaling)
    return made


def journal(tmp_path, name):
    text = (tmp_path / name / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def began(lines) -> float:
    return next(line["time"] for line in lines if line.get("event") == "ControllerStarted")


def shrunk_at(lines, size: int, after: float) -> float:
    """When a generation of at most `size` workers was formed."""
    return next(
        line["time"]
        for line in lines
        if line.get("command") == "FormGeneration"
        and line["time"] > after
        and len(line["members"]) <= size
    )


@pytest.mark.slow
def test_run_shrinks_for_one_of_higher_priority_beside_one_in_the_queue(tmp_path):
    low = prioritized(tmp_path, "low", 0, least=1, size=FEW).start()
    wait_for(low, lambda s: is_whole(s, FEW))
    later = prioritized(tmp_path, "later", 0, least=2, size=2).start()
    queued = wait_for(later, lambda s: s["phase"] == "queued")
    assert "its 2 workers (min_workers) do not fit beside" in queued["reason"]
    assert "(low)" in queued["reason"] and not queued["workers"]
    high = prioritized(tmp_path, "high", 1, least=2, size=2).start()
    wait_for(high, lambda s: is_whole(s, 2))
    wait_for(low, lambda s: is_whole(s, 2) and s["size_limit"] == 2 and s["size"] == FEW)
    later.stop("not needed")
    assert later.result().step == 0
    high.stop("enough")
    assert high.result().workers_lost == 0
    wait_for(low, lambda s: is_whole(s, FEW) and s["size_limit"] is None)
    low.stop("enough")
    for name, run in {"low": low, "high": high}.items():
        result = run.result()
        assert result.workers_lost == 0, name
        assert result.weights_sha256 == undisturbed(tmp_path / name, result.step), name


@pytest.mark.slow
def test_runs_shrink_for_those_of_higher_priority_and_grow_back(tmp_path):
    low = prioritized(tmp_path, "low", 0, least=1, size=PLACES).start()
    wait_for(low, lambda s: is_whole(s, PLACES))
    with Stalls() as stalls:
        middle = prioritized(tmp_path, "middle", 1, least=2, size=4).start()
        wait_for(middle, lambda s: is_whole(s, 4))
        lost_s = stalls.lost_s
        high = prioritized(tmp_path, "high", 2, least=2, size=4).start()
        wait_for(high, lambda s: is_whole(s, 4))
    wait_for(low, lambda s: is_whole(s, 1) and s["size_limit"] == 1)
    wait_for(middle, lambda s: is_whole(s, 3))
    runs = {"low": low, "middle": middle, "high": high}
    begun = {name: began(journal(tmp_path, name)) for name in runs}
    lines = {name: journal(tmp_path, name) for name in runs}
    took = {
        "low for middle": shrunk_at(lines["low"], 4, begun["middle"]) - begun["middle"] - lost_s,
        "low for high": shrunk_at(lines["low"], 1, begun["high"]) - begun["high"],
        "middle for high": shrunk_at(lines["middle"], 3, begun["high"]) - begun["high"],
    }
    print(took, f"stalls {stalls.lost_s:.2f} s")
    assert all(seconds < WITHIN_S + stalls.lost_s for seconds in took.values()), took
    for name in ("high", "middle"):
        runs[name].stop("enough")
        assert runs[name].result().workers_lost == 0
        others = {"high": (middle, 4), "middle": (low, PLACES)}[name]
        wait_for(others[0], lambda s, size=others[1]: is_whole(s, size))
    low.stop("enough")
    for name, run in runs.items():
        result = run.result()
        assert result.workers_lost == 0, name
        assert result.weights_sha256 == undisturbed(tmp_path / name, result.step), name
        ends = [line for line in journal(tmp_path, name) if line.get("event") == "WorkerStopped"]
        assert not [line for line in ends if "abort" in line["reason"]], "no step was done again"


@pytest.mark.slow
def test_run_whose_minimum_does_not_fit_waits_in_a_queue(tmp_path):
    first = prioritized(tmp_path, "first", 0, least=6, size=6).start()
    wait_for(first, lambda s: is_whole(s, 6))
    later = prioritized(tmp_path, "later", 0, least=4, size=4).start()
    told = wait_for(later, lambda s: s["phase"] == "queued")
    assert "its 4 workers (min_workers) do not fit beside" in told["reason"]
    assert "(first)" in told["reason"] and not told["workers"]
    before = time.monotonic()
    first.stop("enough")
    first.result()
    wait_for(later, lambda s: is_whole(s, 4))
    assert time.monotonic() - before < 60.0
    later.stop("enough")
    assert later.result().weights_sha256 == undisturbed(tmp_path / "later", later.result().step)
