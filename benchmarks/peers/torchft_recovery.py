"""A killed replica under torchft: plain processes, Gloo, the model of `benchmarks.recovery`.

    python torchft_recovery.py RESULT.json tuned|default KILLS

Gradients are reduced as one flat tensor after the backward pass: torchft 0.2's
DistributedDataParallel fails with an AssertionError in the survivors when a peer dies within an
all-reduce. "tuned": heartbeats each 50 ms, lost after 500 ms; "default": the lighthouse's own
settings (5 s). Both join within 100 ms. A pause lasts from the kill to the first step committed by
the smaller quorum, less one median step.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

REPLICAS = 3
LIGHTHOUSE = {
    "tuned": {"join_timeout_ms": 100, "heartbeat_timeout_ms": 500, "quorum_tick_ms": 20},
    "default": {"join_timeout_ms": 100},
}
HEARTBEAT_MS = {"tuned": 50, "default": 100}


def replica(name: str, lighthouse: str, heartbeat_ms: int, log: str) -> None:
    import torchft

    torch.set_num_threads(1)
    torch.manual_seed(1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = nn.Sequential(
        *(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
    )
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        adamw.load_state_dict(state["adamw"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "adamw": adamw.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=heartbeat_ms),
    )
    optimizer = torchft.Optimizer(manager, adamw)
    with open(log, "w", buffering=1) as file:
        while True:
            x = torch.randn(8, 64)
            step = manager.current_step()
            optimizer.zero_grad()
            F.cross_entropy(net(x), x[:, :4].argmax(1)).backward()
            flat = nn.utils.parameters_to_vector(p.grad for p in net.parameters())
            manager.allreduce(flat).wait()
            parts = flat.split([p.numel() for p in net.parameters()])
            for p, part in zip(net.parameters(), parts, strict=True):
                p.grad.copy_(part.view_as(p))
            optimizer.step()
            if manager.current_step() > step:
                file.write(f"{time.time():.6f} {step + 1} {manager.num_participants()}\n")
            time.sleep(0.002)


def read(log: str) -> list[tuple[float, int, int]]:
    if not os.path.exists(log):
        return []
    lines = Path(log).read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(a), int(b), int(c)) for a, b, c in words]


def main(result: str, kind: str, kills: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, **LIGHTHOUSE[kind])
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    rng = random.Random(0)
    pauses, rejoins, steps = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        live: dict[str, subprocess.Popen] = {}

        def start(number: int) -> None:
            name = f"r{number}"
            arguments = ["replica", name, address, str(HEARTBEAT_MS[kind]), f"{folder}/{name}"]
            live[name] = subprocess.Popen(
                [sys.executable, __file__, *arguments], env=os.environ | {"RUST_LOG": "error"}
            )

        def full(since: float) -> float | None:
            """When every replica had committed with all the others, after that instant."""
            firsts = []
            for name in live:
                found = (
                    t for t, _, size in read(f"{folder}/{name}") if size == REPLICAS and t > since
                )
                firsts.append(next(found, None))
            return None if None in firsts else max(firsts)

        def wait_full(since: float) -> float:
            until = time.monotonic() + 60
            while (at := full(since)) is None:
                if time.monotonic() > until:
                    raise TimeoutError("the quorum stayed small")
                time.sleep(0.1)
            return at

        try:
            for number in range(REPLICAS):
                start(number)
            wait_full(0.0)
            for number in range(kills):
                time.sleep(rng.uniform(1.5, 2.0))
                name = rng.choice(sorted(live))
                process = live.pop(name)
                at = time.time()
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                start(REPLICAS + number)
                rejoins.append(1e3 * (wait_full(at + 0.2) - at))
                firsts = []
                for other in live:
                    log = read(f"{folder}/{other}")
                    calm = [t for t, _, size in log if size == REPLICAS and at - 1.5 < t < at]
                    steps += [b - a for a, b in itertools.pairwise(calm)]
                    firsts += [t for t, _, size in log if t > at and size < REPLICAS][:1]
                if firsts:
                    pauses.append(1e3 * min(firsts))
                    pauses[-1] -= 1e3 * at
        finally:
            for process in live.values():
                process.kill()
    step_ms = 1e3 * statistics.median(steps)
    pauses = sorted(p - step_ms for p in pauses)
    found = {
        "settings": LIGHTHOUSE[kind] | {"heartbeat_interval_ms": HEARTBEAT_MS[kind]},
        "step_ms": round(step_ms, 2),
        "pause": {
            "count": len(pauses),
            "median_ms": round(statistics.median(pauses), 1),
            "max_ms": round(pauses[-1], 1),
        },
        "pauses_ms": [round(p, 1) for p in pauses],
        "kill_to_full_size_ms": [round(r) for r in rejoins],
    }
    Path(result).write_text(json.dumps(found))
    print(found, flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replica(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
