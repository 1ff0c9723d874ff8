"""What one machine is like, as the doctor reads it: there, or in a task of Ray on each node.

Nothing is judged here. Torch is imported by a process of its own, and only where the machine has
a GPU: Ray hides the GPUs from tasks that ask for none.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("elastic_dp", "torch", "ray", "pyarrow")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_GPU_PROBE_S = 60.0
_GPU_PROBE = "from elastic_dp.device.gpu import print_gpus; print_gpus()"
_ECHO_S = 5.0


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that torch finds. `error` says why it finds none."""

    names: tuple[str, ...] = ()
    nccl: str = ""
    error: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """One machine. `host` is the address at which other nodes reach it.

    `shm_bytes` is the size of /dev/shm; None: there is none. `health_check_s` are Ray's period and
    timeout of health checks and the number of failures, where Ray is loaded.
    """

    host: str
    python: str
    versions: dict[str, str]
    shm_bytes: int | None
    open_files: int
    niceness: int
    gpus: GpuFacts | None
    port_errors: tuple[str, ...]
    health_check: tuple[float, float, int] | None = None
    head: bool = False
    gpus_of_ray: float = 0.0


def facts_of_this_machine(host: str) -> NodeFacts:
    """Return the facts of the machine that runs this, whose address is `host`."""
    return NodeFacts(
        host=host,
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := _version(name))},
        shm_bytes=_shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        niceness=os.nice(0),
        gpus=_gpus(),
        port_errors=tuple(_port_errors(host)),
    )


def own_address() -> str:
    """Return the address by which this machine reaches others, or the loopback one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


# ---------------------------------------------------------------------------------- private


def _version(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""


def _shm_bytes() -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def _gpus() -> GpuFacts | None:
    """Return the GPUs, or None where the machine has none."""
    if not any(map(os.path.exists, _GPU_DEVICES)):
        return None
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    words = [sys.executable, "-c", _GPU_PROBE]
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=_GPU_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(error=f"torch did not answer within {_GPU_PROBE_S:.0f} s")
    if done.returncode:
        return GpuFacts(error=(done.stderr.strip().splitlines() or ["torch failed"])[-1])
    said = json.loads(done.stdout.splitlines()[-1])
    return GpuFacts(tuple(said["names"]), said["nccl"], said["error"])


def _port_errors(host: str) -> list[str]:
    """Bind free ports for TCP and UDP at this address, as a run does, and reach them."""
    errors = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind, name in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        try:
            with socket.socket(family, kind) as server, socket.socket(family, kind) as client:
                server.settimeout(_ECHO_S)
                client.settimeout(_ECHO_S)
                server.bind((host, 0))
                if kind == socket.SOCK_STREAM:
                    server.listen(1)
                client.connect(server.getsockname())
                if kind == socket.SOCK_STREAM:
                    server.accept()[0].close()
                else:
                    client.send(b"x")
                    server.recv(1)
        except OSError as error:
            errors.append(f"{name}: {error}")
    return errors
