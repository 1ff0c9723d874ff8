"""Pods as processes of this machine: a real Ray node started as KubeRay starts it from a group of
the manifest.

Each has the group's arguments, resources, labels and environment, in a user namespace of its own,
where it is the manifest's user and has no capability. Their file system is this machine's, and the
network: so ports are free ones, and no two pods have an address of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray.autoscaler._private.kuberay.autoscaling_config import _round_up_k8s_quantity

from tests.ports import free_port

HEAD = "headgroup"  # as KubeRay names it
TOKEN = "a-token-of-this-test"


class Process(Protocol):
    """The part of `subprocess.Popen` that a pod needs for its first process."""

    pid: int

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


class Nodes(Protocol):
    """Where pods run. `name` goes before the names of all of them."""

    name: str

    def start_node(self, name: str, group_name: str, group: Mapping[str, Any]) -> Process: ...


@dataclass
class Pod:
    name: str
    group: str
    grace_s: float
    process: Process | None = None  # None: it waits for a machine
    started_at: float = 0.0  # of `time.time`
    deleted_at: float | None = None
    was_killed: bool = False  # its grace had passed

    def has_ended(self) -> bool:
        if self.process is None:
            return self.deleted_at is not None
        return self.process.poll() is not None

    def environment(self) -> dict[str, str]:
        return _environment_of(self.process.pid) if self.process else {}

    def user(self) -> int:
        """Return its own number inside of its namespace."""
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/uid_map").read_text().split()[0])

    def terminate(self) -> None:
        """SIGTERM to the container's first process, as by the kubelet."""
        if self.process is not None:
            self.process.terminate()

    def lose(self) -> None:
        """Kill every process of the node at once, as when the machine is gone."""
        assert self.process is not None
        _kill_tree(self.process.pid)


class Machine:
    """Where the pods of one cluster run. `spec` is the RayCluster's, `volumes` folders by mount
    path."""

    def __init__(self, spec: Mapping[str, Any], volumes: Mapping[str, Path], code: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="k8s", dir="/tmp"))  # short: sockets lie in it
        self.name = self.folder.name
        self.gcs = f"127.0.0.1:{free_port()}"
        self._spec, self._volumes, self._code = spec, volumes, code
        self._started: list[subprocess.Popen[bytes]] = []
        self._install()

    def close(self) -> None:
        for process in self._started:
            _kill_tree(process.pid)
            process.wait()
        shutil.rmtree(self.folder)

    def start_node(
        self, name: str, group_name: str, group: Mapping[str, Any]
    ) -> subprocess.Popen[bytes]:
        arguments = self._arguments(group, is_head=group_name == HEAD)
        shell = ["/bin/bash", "-c", "--", f"ulimit -n 65536; ray start {' '.join(arguments)}"]
        return self._start(
            name, _as_user_of(group, shell), self._variables(group, name, group_name)
        )

    def start_autoscaler(self, api: Mapping[str, str], name: str, namespace: str) -> None:
        """The container that KubeRay puts beside the head, with the manifest's own command."""
        options = self._spec["autoscalerOptions"]
        generated = f"ray kuberay-autoscaler --cluster-name {name} --cluster-namespace {namespace}"
        own = {variable["name"]: variable["value"] for variable in options["env"]}
        added = {"KUBERAY_GEN_AUTOSCALER_START_CMD": f"{generated} --gcs-address {self.gcs}"}
        command = [*options["command"], *options["args"]]
        variables = self._shared() | own | added | dict(api)
        self._start("autoscaler", _as_user_of(self._spec["headGroupSpec"], command), variables)

    def run(self, name: str, entrypoint: str) -> subprocess.Popen[bytes]:
        """A command as Ray's job server runs it: by a shell, in the head's container. `said(name)`
        is what it prints."""
        head = self._spec["headGroupSpec"]
        for mount, folder in self._volumes.items():
            entrypoint = entrypoint.replace(mount, str(folder))
        variables = self._variables(head, name, HEAD) | {"RAY_ADDRESS": self.gcs}
        return self._start(name, _as_user_of(head, ["/bin/sh", "-c", entrypoint]), variables)

    def said(self, what: str) -> str:
        """What "autoscaler", a pod or a command printed."""
        return (self.folder / f"{what}.log").read_text()

    # ------------------------------------------------------------------------------ private

    def _arguments(self, group: Mapping[str, Any], is_head: bool) -> list[str]:
        """Return the arguments of `ray start`: what KubeRay makes of a group, and what one machine
        needs."""
        resources = group["template"]["spec"]["containers"][0]["resources"]
        amounts = resources["requests"] | resources["limits"]
        given = {
            "num-cpus": _round_up_k8s_quantity(amounts["cpu"]),
            "memory": _round_up_k8s_quantity(amounts["memory"]),
            "num-gpus": amounts.get("nvidia.com/gpu", 0),
            "labels": ",".join(f"{key}={value}" for key, value in group["labels"].items()),
            **group["rayStartParams"],
            # Several nodes on one machine: no port may be a fixed one.
            "node-ip-address": "127.0.0.1",
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": 0,
        }
        if is_head:
            given |= {"port": self.gcs.rpartition(":")[2], "temp-dir": self.folder}
            flags = ["--head", "--no-monitor", "--block", "--include-dashboard=false"]
        else:
            given |= {"address": self.gcs}
            flags = ["--block"]
        return [*flags, *(f"--{key}='{value}'" for key, value in given.items())]

    def _variables(self, group: Mapping[str, Any], pod: str, group_name: str) -> dict[str, str]:
        """The container's own, and what KubeRay adds to it."""
        container = group["template"]["spec"]["containers"][0]
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        return (
            self._shared() | own | {"RAY_CLOUD_INSTANCE_ID": pod, "RAY_NODE_TYPE_NAME": group_name}
        )

    def _shared(self) -> dict[str, str]:
        """What any container has: the token, and the image's paths; nothing that this test's own
        environment says."""
        return {
            "RAY_AUTH_MODE": self._spec["authOptions"]["mode"],
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_enable_autoscaler_v2": "true",
            # One machine for all of them: no worker is started in advance, and none is put behind
            # other processes.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",
            "HOME": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": str(self._code),
        }

    def _install(self) -> None:
        """`elastic-dp`, as the image has it."""
        command = self.folder / "bin" / "elastic-dp"
        command.parent.mkdir()
        program = "from elastic_dp.cli import main; main()"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
        command.chmod(0o755)

    def _start(
        self, name: str, command: list[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, env=variables, cwd=self._code, **streams)
        self._started.append(process)
        return process


def _as_user_of(group: Mapping[str, Any], command: list[str]) -> list[str]:
    user = group["template"]["spec"]["securityContext"]
    numbers = [f"--map-user={user['runAsUser']}", f"--map-group={user['runAsGroup']}"]
    return ["unshare", "--user", *numbers, *command]


def _kill_tree(pid: int) -> None:
    """A process that ended, and was waited for, has none under it any more: Ray's end with who
    started them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    waiting = [pid] if Path(f"/proc/{pid}").exists() else []
    while waiting:
        waiting += children.get(waiting[0], [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(waiting.pop(0), signal.SIGKILL)


def _environment_of(pid: int) -> dict[str, str]:
    """Empty for one that is gone, or is not ours to see."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
