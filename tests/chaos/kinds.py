"""What goes wrong with a cluster of hosts, by name: each does harm to one thing, and puts it right
after some seconds.

Nothing else is told or asked; what must be true meanwhile and afterwards is for whoever calls.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from tests.chaos.cluster import Cluster
from tests.chaos.hosts import Host

WORKER, RAYLET, CONTROLLER = "ray::WorkerActor", "raylet/raylet", "ray::ControllerActor"
Kind = Callable[[Cluster, Host, float], None]
HOUR_S = 3600.0


def worker_killed(cluster: Cluster, node: Host, seconds: float) -> None:
    node.signal(signal.SIGKILL, WORKER)


def worker_frozen(cluster: Cluster, node: Host, seconds: float) -> None:
    node.signal(signal.SIGSTOP, WORKER)
    time.sleep(seconds)
    node.signal(signal.SIGCONT, WORKER)


def raylet_killed(cluster: Cluster, node: Host, seconds: float) -> None:
    node.signal(signal.SIGKILL, RAYLET)
    time.sleep(seconds)
    _again(cluster, node)


def node_killed(cluster: Cluster, node: Host, seconds: float) -> None:
    node.kill()
    time.sleep(seconds)
    _again(cluster, node)


def node_frozen(cluster: Cluster, node: Host, seconds: float) -> None:
    node.signal(signal.SIGSTOP)
    time.sleep(seconds)
    node.signal(signal.SIGCONT)
    _unless_alive(cluster, node)


def cut_off(
    cluster: Cluster, node: Host, seconds: float, incoming: bool = True, outgoing: bool = True
) -> None:
    node.cut(incoming=incoming, outgoing=outgoing)
    time.sleep(seconds)
    node.heal()
    _unless_alive(cluster, node)


def deaf(cluster: Cluster, node: Host, seconds: float) -> None:
    cut_off(cluster, node, seconds, outgoing=False)


def mute(cluster: Cluster, node: Host, seconds: float) -> None:
    cut_off(cluster, node, seconds, incoming=False)


def told_to_go(cluster: Cluster, node: Host, seconds: float) -> None:
    """SIGTERM, as a cloud does before it takes a machine."""
    node.signal(signal.SIGTERM, " start --block")
    until = time.monotonic() + 15
    while node.pids(RAYLET) and time.monotonic() < until:
        time.sleep(0.1)
    _again(cluster, node)


def bad_cable(cluster: Cluster, node: Host, seconds: float) -> None:
    """In its place, and for longer, comes one to which frames take 10 ms, and of which one in fifty
    is lost."""
    assert cluster.far is not None
    with cluster.far_is_free:
        node.kill()
        cluster.start_node(cluster.far)
        time.sleep(15 + seconds)
        cluster.far.kill()
        _again(cluster, node)


def clock_set(cluster: Cluster, host: Host, seconds: float) -> None:
    """By an hour, to the future or to the past, and back again."""
    cluster.set_clock(host, HOUR_S if int(seconds) % 2 else -HOUR_S)
    time.sleep(seconds)
    cluster.set_clock(host, 0.0)


def controller_killed(cluster: Cluster, head: Host, seconds: float) -> None:
    head.signal(signal.SIGKILL, CONTROLLER)


def gcs_killed(cluster: Cluster, head: Host, seconds: float) -> None:
    """Ray's own `start --block` ends with it, and takes its raylet along."""
    cluster.lose_head("gcs_server")
    time.sleep(seconds)
    head.kill()
    cluster.start_head()


def head_killed(cluster: Cluster, head: Host, seconds: float) -> None:
    """With the controller, and with the driver, which does not come back."""
    cluster.lose_head()
    head.kill()
    time.sleep(seconds)
    cluster.start_head()


def disk_full(cluster: Cluster, head: Host, seconds: float) -> None:
    """Fill the disk of the runs (`Cluster.disk_mib`)."""
    assert cluster.disk_mib
    filling = cluster.storage / "filling"
    with open(filling, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    time.sleep(seconds)
    filling.unlink()


ON_NODES: dict[str, Kind] = {
    "worker killed": worker_killed,
    "worker frozen": worker_frozen,
    "raylet killed": raylet_killed,
    "node killed": node_killed,
    "node frozen": node_frozen,
    "cut off": cut_off,
    "cut off, incoming": deaf,
    "cut off, outgoing": mute,
    "node told to go": told_to_go,
    "bad cable": bad_cable,
    "clock set": clock_set,
}
# Not more than one of these at a time.
ON_HEAD: dict[str, Kind] = {
    "controller killed": controller_killed,
    "GCS killed": gcs_killed,
    "head killed": head_killed,
    "disk full": disk_full,
    "head's clock set": clock_set,
}
KINDS = ON_NODES | ON_HEAD


def _unless_alive(cluster: Cluster, node: Host) -> None:
    """Ray may have given the node up by now; then its raylet ends by itself."""
    time.sleep(5)
    if not node.pids(RAYLET):
        _again(cluster, node)


def _again(cluster: Cluster, node: Host) -> None:
    node.signal(signal.SIGKILL)
    cluster.start_node(node)
