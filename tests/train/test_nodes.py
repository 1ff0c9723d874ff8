"""Whole runs of workers on several nodes: the sums finish within a node first, and the digest is
that of the local run."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_dp.coordinator.messages import WorkerId, WorkerLocation
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, lines_of, local, spec_of
from tests.train.jobs import plain


def on_nodes(count: int, zones: int = 1) -> Any:
    """Workers in turn on nodes n0, n1, …, which are in turn in zones z0, z1, …"""

    def location(worker: WorkerId) -> WorkerLocation:
        number = int(worker.removeprefix("w")) % count
        return WorkerLocation(f"n{number}", zone=f"z{number % zones}")

    return location


def topologies(run: Any) -> list[Any]:
    """Return the topology of each generation, with the sizes in falling order: the node of the
    worker that came first has the first ranks."""
    formed = [line for line in lines_of(run) if line.get("command") == "FormGeneration"]
    return [[sorted(sizes, reverse=True) for sizes in line.get("topology", ())] for line in formed]


@pytest.mark.parametrize(
    ("workers", "nodes", "zones", "before", "device"),
    [
        (3, 2, 1, [[2, 1]], None),
        pytest.param(4, 2, 1, [[2, 2]], None, marks=pytest.mark.slow),
        pytest.param(5, 2, 1, [[3, 2]], None, marks=pytest.mark.slow),
        pytest.param(6, 4, 2, [[2, 2, 1, 1], [3, 3]], None, marks=pytest.mark.slow),
        pytest.param(7, 3, 1, [[3, 2, 2]], None, marks=pytest.mark.slow),
        pytest.param(8, 4, 2, [[2, 2, 2, 2], [4, 4]], None, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, [[2, 2]], SimulatedDevice(), marks=pytest.mark.slow),
    ],
)
def test_run_on_several_nodes_with_a_kill_has_the_local_digest(
    workers, nodes, zones, before, device, tmp_path
):
    """The group forms again without the lost worker, and later with its replacement, which runs on
    any of the nodes."""
    hold = dict.fromkeys(range(1, 6), workers)  # a body waits no longer than for one change
    hold |= {} if workers == 3 else {9: workers}  # a replacement takes time
    spec = spec_of(steps=12, workers=workers, virtual=8, config={"hold": hold})
    fault = WorkerFault("exchange", step=6, rank=1, once=str(tmp_path / "dead"))
    where = on_nodes(nodes, zones)
    outcome, run = group(spec, plain, faults=(fault,), device=device, location=where)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest
    assert before in topologies(run)
