"""Nodes that die, freeze, are cut off, or are told to go, on a cluster of hosts of their own. After
each, the same bits.

Every case waits for a group of three, does harm to one node, sees the run go on without it, and
gives it back; the run ends with a whole group. One is in the default run; `pytest -m "slow or not
slow" tests/chaos` makes them all.
"""

import signal
import time

import pytest

from tests.chaos.conftest import WHOLE_AT, check, start
from tests.chaos.hosts import available

pytestmark = [
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.skipif(not available(), reason="needs root and iproute2, to make hosts"),
]


def killed(cluster, run, node):
    node.kill()
    alone(run)


def raylet_killed(cluster, run, node):
    """Kill a raylet, which ends its worker too."""
    node.signal(signal.SIGKILL, "raylet/raylet")
    alone(run)


def cut_off(cluster, run, node, **directions):
    """The worker hears of its eviction when the cable is back, or dies of Ray's own verdict on the
    node."""
    node.cut(**directions)
    alone(run)
    run.go_on(20, held_at=max(WHOLE_AT))
    node.heal()


def deaf(cluster, run, node):
    cut_off(cluster, run, node, outgoing=False)


def mute(cluster, run, node):
    cut_off(cluster, run, node, incoming=False)


def frozen(cluster, run, node):
    """Freeze a host for longer than all timeouts. What thaws does not go on, but ends."""
    worker = run.members[1]
    node.signal(signal.SIGSTOP)
    until = time.monotonic() + 20
    alone(run)
    run.wait(lambda run: time.monotonic() >= until)
    node.signal(signal.SIGCONT)
    run.wait(lambda run: not node.pids(f" {worker} "))


def told_to_go(cluster, run, node):
    """SIGTERM, as a cloud does before it takes a machine: its worker leaves before it is lost."""
    worker = run.members[1]
    node.signal(signal.SIGTERM, " start --block")
    alone(run)
    run.wait(lambda run: not node.pids("raylet/raylet"))
    said = [line for line in run.lines("events") if line.get("worker") == worker]
    kinds = [line.get("event") or line.get("command") for line in said]
    assert "DrainNoticed" in kinds and "ReleaseWorker" in kinds, kinds
    assert "WorkerLost" not in kinds[: kinds.index("ReleaseWorker")]


def everyone_killed(cluster, run, node):
    """Back to the newest checkpoint."""
    run.wait(lambda run: run.step >= 60)
    for one in cluster.nodes:
        one.kill()
    cluster.start_nodes([one for one in cluster.nodes if one is not node])


def alone(run):
    """The others have gone on."""
    run.wait(lambda run: len(run.members) == 2)


SLOW = (
    *(killed, raylet_killed, deaf, mute, frozen, told_to_go),
    everyone_killed,
)


@pytest.mark.parametrize(
    "harm",
    [cut_off, *(pytest.param(harm, marks=pytest.mark.slow) for harm in SLOW)],
    ids=lambda harm: harm.__name__,
)
def test_node_fault_ends_with_the_undisturbed_digest(harm, cluster, calm):
    run = start(cluster, harm.__name__, every_steps=50)
    node = cluster.host_of(run.members[1])
    harm(cluster, run, node)
    node.kill()
    cluster.start_node(node)
    check(run, calm)
