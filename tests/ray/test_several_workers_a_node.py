"""Several workers on each node of a real Ray, as several GPUs in a pod: each is one worker."""

from __future__ import annotations

import json

import pytest

from tests.ray import clusters
from tests.ray.jobs import trainer, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 8


@pytest.fixture(autouse=True)
def cluster():
    with clusters.nodes(2) as cluster:
        cluster.add_node(num_cpus=2, labels={"ray.io/availability-zone": "b"})
        cluster.wait_for_nodes()
        yield


def test_workers_of_a_node_have_consecutive_ranks_and_the_local_digest(tmp_path):
    result = trainer(tmp_path, "nodes", steps=STEPS, workers=4, hold={0: 4}).fit()
    assert result.weights_sha256 == undisturbed(tmp_path, STEPS)
    lines = [json.loads(x) for x in (tmp_path / "nodes" / "events.jsonl").read_text().splitlines()]
    placed = [line for line in lines if line.get("event") == "WorkerPlaced"]
    node_of = {line["worker"]: line["location"][0] for line in placed}
    assert {line["location"][2] for line in placed} == {"", "b"}
    whole = [
        line["members"]
        for line in lines
        if line.get("command") == "FormGeneration" and line.get("topology") == [[2, 2]]
    ]
    assert whole
    for members in whole:
        nodes = [node_of[worker] for worker in members]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
