"""Runs with priorities on one cluster: the lower ones shrink for the higher ones without losing a
step, grow back, and end with the weights of the undisturbed run. One whose minimum does not fit
waits in a queue."""

from __future__ import annotations

import dataclasses

import pytest

import elastic_dp as edp
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, trainer, undisturbed, wait_for

pytestmark = pytest.mark.ray
PLACES = 4


@pytest.fixture(autouse=True)
def cluster():
    with clusters.nodes(PLACES):
        yield


def prioritized(tmp_path, name, priority, *, least, size, body_s=0.05) -> edp.ElasticTrainer:
    made = trainer(tmp_path, name, steps=FOR_EVER, workers=size, body_s=body_s)
    scaling = dataclasses.replace(made.spec.scaling, min_workers=least, priority=priority)
    made.spec = dataclasses.replace(made.spec, scaling=scaling)
    return made


@pytest.mark.slow
def test_run_shrinks_for_one_of_higher_priority_and_one_in_the_queue_starts_later(tmp_path):
    low = prioritized(tmp_path, "low", 0, least=1, size=PLACES).start()
    wait_for(low, lambda s: is_whole(s, PLACES))
    later = prioritized(tmp_path, "later", 0, least=2, size=2).start()
    queued = wait_for(later, lambda s: s["phase"] == "queued")
    assert "its 2 workers (min_workers) do not fit beside" in queued["reason"]
    assert "(low)" in queued["reason"] and not queued["workers"]
    high = prioritized(tmp_path, "high", 1, least=2, size=2).start()
    wait_for(high, lambda s: is_whole(s, 2))
    wait_for(low, lambda s: is_whole(s, 2) and s["size_limit"] == 2 and s["size"] == PLACES)
    high.stop("enough")
    assert high.result().workers_lost == 0
    wait_for(low, lambda s: is_whole(s, PLACES) and s["size_limit"] is None)
    assert later.status()["phase"] == "queued"
    low.stop("enough")
    wait_for(later, lambda s: is_whole(s, 2))
    later.stop("enough")
    for name, run in {"low": low, "high": high, "later": later}.items():
        result = run.result()
        assert result.workers_lost == 0, name
        assert result.weights_sha256 == undisturbed(tmp_path / name, result.step), name
