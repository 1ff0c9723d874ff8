"""A cluster on this machine that Ray's own autoscaler (v2) makes larger and smaller, by real
raylets as nodes.

Ray's `AutoscalingCluster` would end every Ray of the machine when it starts; this one starts and
ends its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

# isort: split
import psutil

from tests.patience import eventually
from tests.ports import free_port

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
IDLE_S = 3.0  # after which a node is given back
NODE_ID = "RAY_OVERRIDE_NODE_ID_FOR_TESTING"


class Cluster:
    def __init__(self, head: subprocess.Popen[bytes], address: str) -> None:
        self.head, self.address = head, address

    def markets(self) -> list[str]:
        """Return the markets of the living nodes but the head, sorted."""
        return sorted(node["Labels"]["ray.io/market-type"] for node in self._nodes())

    def preempt(self, market: str) -> str:
        """One node of it vanishes without a word; returns its id."""
        node_id = next(
            node["NodeID"]
            for node in self._nodes()
            if node["Labels"]["ray.io/market-type"] == market
        )
        killed = set()
        for process in psutil.Process(self.head.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                name = process.name()
                if process.environ().get(NODE_ID) == node_id:
                    process.kill()
                    killed.add(name)
        assert "raylet" in killed, f"of node {node_id} only {sorted(killed)} could be killed"
        return node_id

    def alive(self, node_id: str) -> bool:
        return any(node["NodeID"] == node_id for node in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        return [n for n in ray.nodes() if n["Alive"] and "ray.io/market-type" in n["Labels"]]


@contextlib.contextmanager
def autoscaled(folder: Path, most: Mapping[str, int]) -> Iterator[Cluster]:
    """`most`: nodes of each market, the cheapest first; each holds one worker."""
    port, ip = free_port(), ray.util.get_node_ip_address()
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(_config(f"{ip}:{port}", most)))
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        NODE_ID: FAKE_HEAD_NODE_ID,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "3",
    }
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", f"--port={port}"),
        *("--num-cpus=0", "--include-dashboard=false"),
        *(f"--autoscaling-config={config}", "--block"),
    ]
    with open(folder / "head.log", "wb") as log:
        head = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        eventually(lambda: _answers(head, ip, port))
        yield Cluster(head, f"{ip}:{port}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def _answers(head: subprocess.Popen[bytes], ip: str, port: int) -> bool:
    assert head.poll() is None, "the head node did not start; see head.log"
    with contextlib.suppress(OSError):
        socket.create_connection((ip, port), 1).close()
        return True
    return False


def _config(gcs_address: str, most: Mapping[str, int]) -> dict[str, Any]:
    types: dict[str, Any] = {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    }
    for rank, (market, count) in enumerate(most.items()):
        types[market] = {
            "resources": {"CPU": 1},
            "labels": {"ray.io/market-type": market},
            "node_config": {},
            "min_workers": 0,
            "max_workers": count,
            "priority": -rank,
        }
    provider = {
        "type": "external",
        "module": PROVIDER,
        "gcs_address": gcs_address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
    }
    empty: dict[str, Any] = {name: [] for name in _COMMANDS}
    return empty | {
        "cluster_name": "fake",
        "max_workers": sum(most.values()),
        "provider": provider,
        "available_node_types": types,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }


_COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
