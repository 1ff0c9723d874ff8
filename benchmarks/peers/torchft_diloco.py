"""torchft's DiLoCo under kills over a slow link, for `benchmarks.diloco_kills`.

    python torchft_diloco.py RESULT.json KILLS SIZE INNER_STEPS ROWS HOSTS.json

A replica is an island of one process, on its host; this process and the lighthouse are on the
first one. Heartbeats come each 100 ms, a replica is lost after a second, and whoever is there joins
within 100 ms; by default it is 5 s and a minute. Writes when each replica began each inner step and
committed each round, and the kills.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
LIGHTHOUSE = {"join_timeout_ms": 100, "heartbeat_timeout_ms": 1000, "quorum_tick_ms": 20}
HEARTBEAT_MS = 100
PATIENCE_S = 120.0
CALM = 3  # rounds of all replicas before a kill
WITHIN_S = 2.0  # some two rounds


def replica(
    name: str, address: str, lighthouse: str, size: str, inner: int, rows: int, log: str
) -> None:
    import torchft
    from torchft.local_sgd import DiLoCo

    from benchmarks.models import GPT, SIZES, loss_fn

    socket.gethostname = lambda: address  # where others look for the state of this replica
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = GPT(*SIZES[size])
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-4)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        adamw.load_state_dict(state["adamw"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "adamw": adamw.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=address,
        heartbeat_interval=timedelta(milliseconds=HEARTBEAT_MS),
    )
    with (
        open(log, "w", buffering=1) as file,
        DiLoCo(manager, [net], adamw, outer, inner, use_bucketization=True),
    ):
        while True:
            step = manager.current_step()
            for _ in range(inner):
                tokens = torch.randint(0, 256, (rows, 65))
                file.write(f"{time.time():.6f} pass 0\n")
                adamw.zero_grad()
                loss_fn(net, {"tokens": tokens}).backward()
                adamw.step()  # the last one of a round makes the outer step
            if manager.current_step() > step:
                file.write(f"{time.time():.6f} commit {manager.num_participants()}\n")


def read(log: Path) -> list[tuple[float, str, int]]:
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(at), kind, int(number)) for at, kind, number in words]


def main(result: str, kills: int, size: str, inner: int, rows: int, hosts: str) -> None:
    from torchft.coordination import LighthouseServer

    from benchmarks.slow_link import Host

    on = [Host(*one) for one in json.loads(Path(hosts).read_text())]
    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, **LIGHTHOUSE)
    lighthouse = f"http://{on[0].address}:{server.address().rsplit(':', 1)[1]}"
    rng, numbers, struck = random.Random(0), itertools.count(), []
    live: dict[str, tuple[subprocess.Popen, int]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def start(host: int) -> None:
            name = f"r{next(numbers)}"
            arguments = (name, on[host].address, lighthouse, size, inner, rows, f"{folder}/{name}")
            process = subprocess.Popen(
                [sys.executable, __file__, "replica", *map(str, arguments)],
                env=os.environ | {"RUST_LOG": "error"},
                preexec_fn=on[host].enter,
            )
            live[name] = process, host

        def rounds(name: str, since: float) -> int:
            """Return how many rounds a replica has made with all others after that instant."""
            commits = (line for line in read(Path(folder, name)) if line[1] == "commit")
            return sum(number == len(on) and at > since for at, _, number in commits)

        def wait_whole(since: float) -> None:
            until = time.monotonic() + PATIENCE_S
            while min(rounds(name, since) for name in live) < CALM:
                if time.monotonic() > until:
                    raise TimeoutError("the quorum stayed small")
                time.sleep(0.2)

        try:
            for host in range(len(on)):
                start(host)
            wait_whole(0.0)
            for _ in range(kills):
                name = next(iter(live))  # in turn: the older one
                process, host = live.pop(name)
                time.sleep(rng.uniform(0.0, WITHIN_S))
                struck.append((time.time(), name))
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                start(host)
                wait_whole(time.time())
        finally:
            for process, _ in live.values():
                process.kill()
        logs = {path.name: read(path) for path in Path(folder).iterdir()}
    Path(result).write_text(json.dumps({"logs": logs, "kills": struck, "settings": LIGHTHOUSE}))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        name, address, lighthouse, size, inner, rows, log = sys.argv[2:]
        replica(name, address, lighthouse, size, int(inner), int(rows), log)
    else:
        result, kills, size, inner, rows, hosts = sys.argv[1:]
        main(result, int(kills), size, int(inner), int(rows), hosts)
