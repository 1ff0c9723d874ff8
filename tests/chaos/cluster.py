"""A Ray cluster whose nodes are hosts of their own, and jobs that run on it.

Nothing here is attached to the cluster: a job's driver is a process on the head's host, and what
happens is read from the files in the run's folder. So a test outlives everything that it kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.hosts import Host, Network
from tests.patience import eventually
from tests.ray import clusters

PORT = 6379
_SPOT = ("--labels", "ray.io/market-type=spot")  # the controller stays away from those
ROOT = Path(__file__).resolve().parents[2]
_RAY = os.path.join(os.path.dirname(sys.executable), "ray")
# Ray's own idea of when a node is dead; ours does not depend on it, but a replacement is placed by
# it.
_HEAD = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class Cluster:
    """`workers` hosts with one place each, and the head, which has none.

    `memory`: where the head keeps what it knows, so that it may die: "redis", "rocksdb", or None.
    `office`: the head is a spot node, too, so that the controller goes to a host of its own.
    """

    folder: Path
    workers: int = 3
    memory: str | None = None
    office: bool = False
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.environment = os.environ | {
            "PYTHONPATH": clusters.MINIMAL_PATH,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "8",
            # One machine for all hosts: none starts workers in advance, or puts them behind other
            # processes.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",
            **clusters.forked_workers(),
        }
        try:
            self._start()
        except Exception:
            self.close()  # else the next one of this process cannot have its names
            raise

    def _start(self) -> None:
        self._kept: dict[str, str] = {}
        if self.memory == "redis":
            self._kept = {"RAY_REDIS_ADDRESS": self._start_redis()}
        elif self.memory == "rocksdb":
            where = f"{self.folder}/gcs"
            self._kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": where}
        self.head = self.network.host()
        self.start_head()
        self.nodes = [self.network.host() for _ in range(self.workers)]
        self.start_nodes(self.nodes)
        if self.office:
            self._ray(self.network.host(), {}, f"--address={self.head.address}:{PORT}")

    def start_head(self) -> None:
        options = ("--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor")
        self._ray(self.head, _HEAD | self._kept, *options, *_SPOT * self.office)

    def start_node(self, node: Host) -> None:
        """With one place for a worker."""
        place = ("--resources", '{"place": 1}')
        self._ray(node, {}, f"--address={self.head.address}:{PORT}", *place, *_SPOT)

    def start_nodes(self, nodes: Sequence[Host]) -> None:
        """One by one: those of one machine hold each other up, beyond Ray's patience."""
        for node in nodes:
            self.start_node(node)

    def _start_redis(self) -> str:
        """On a host of its own; returns its address when it is up."""
        host = self.network.host()
        command = ["redis-server", "--port", str(PORT), "--protected-mode", "no", "--save", ""]
        log = self.folder / "redis.log"
        host.start(command, self.environment, str(log))
        while "Ready to accept connections" not in log.read_text():
            time.sleep(0.05)
        return f"{host.address}:{PORT}"

    def _ray(self, host: Host, environment: Mapping[str, str], *options: str) -> None:
        """Returns when the node is up. Ray gives up after 30 s, which a busy machine may need; then
        once more."""
        command = [
            *(_RAY, "start", "--block", "--num-cpus=0", "--disable-usage-stats"),
            *(f"--node-ip-address={host.address}", "--object-store-memory=80000000"),
            *(f"--temp-dir={self.folder}/ray", "--include-log-monitor=false", *options),
        ]
        for _ in range(5):
            if host is self.head:
                # By this and the processes of other hosts, which it sees, Ray thinks that the head
                # is there already.
                (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
            log = self.folder / f"{host.name}-{len(list(self.folder.glob(f'{host.name}-*')))}.log"
            process = host.start(command, self.environment | environment, str(log))
            while process.poll() is None:
                if "will now block forever" in log.read_text():
                    return
                time.sleep(0.05)
            host.signal(signal.SIGKILL)
        raise AssertionError(log.read_text())

    def run(self, name: str, steps: int, **options: Any) -> ChaosRun:
        """Start a job; see `tests.chaos.job`."""
        words = [f"{key}={json.dumps(value)}" for key, value in options.items()]
        driver = self.head.start(
            [sys.executable, "-m", "tests.chaos.job", str(self.folder), name, str(steps), *words],
            self.environment | {"RAY_ADDRESS": f"{self.head.address}:{PORT}"},
            f"{self.folder}/{name}.log",
        )
        return ChaosRun(self.folder / name, driver)

    def host_of(self, worker: str) -> Host:
        """Where this worker's process is: its sidecar names it."""
        return next(h for h in self.nodes if h.pids(f" {worker} "))

    def host_of_controller(self) -> Host:
        return next(h for h in self.network.hosts if h.pids("ray::ControllerActor"))

    def close(self) -> None:
        self.network.close()
        clusters.close_server()
        shutil.rmtree(self.folder, ignore_errors=True)


class ChaosRun:
    """What the files of a run say."""

    def __init__(self, folder: Path, driver: Any) -> None:
        self.folder, self.driver = folder, driver

    def lines(self, file: str) -> list[dict[str, Any]]:
        """Return the lines of "events" or "metrics", as far as written."""
        path = self.folder / f"{file}.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text().rpartition("\n")[0].splitlines():
            with contextlib.suppress(ValueError):  # cut short by a full disk, and written again
                found.append(json.loads(line))
        return found

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines("metrics")), default=0)

    @property
    def members(self) -> list[str]:
        """Return the members of the newest generation."""
        formed = [x for x in self.lines("events") if x.get("command") == "FormGeneration"]
        return formed[-1]["members"] if formed else []

    @property
    def generation(self) -> int:
        formed = [x for x in self.lines("events") if x.get("command") == "FormGeneration"]
        return formed[-1]["generation"] if formed else 0

    @property
    def result(self) -> dict[str, Any] | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def wait(self, condition: Callable[[ChaosRun], Any]) -> Any:
        return eventually(lambda: condition(self), self.tail, every_s=0.05)

    def whole(self, members: int, step: int) -> None:
        """At least `step` steps made, and a generation of so many."""
        self.wait(lambda run: len(run.members) == members and run.step >= step)

    def go_on(self, steps: int, held_at: int | None = None) -> None:
        """So many more steps, or all up to `held_at`, whose body waits for what the caller does
        next."""
        goal = self.step + steps if held_at is None else min(self.step + steps, held_at - 1)
        self.wait(lambda run: run.step >= goal or run.result)

    def finished(self) -> dict[str, Any]:
        result: dict[str, Any] = self.wait(lambda run: run.result)
        return result

    def tail(self) -> str:
        driver = self.folder.with_suffix(".log")
        told = "\n".join(json.dumps(line)[:300] for line in self.lines("events")[-25:])
        return f"{told}\n{driver.read_text()[-3000:] if driver.exists() else ''}"

    def stop_driver(self) -> None:
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGKILL)
            self.driver.wait()
