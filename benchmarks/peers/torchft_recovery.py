"""A killed replica under torchft: plain processes, Gloo, the model of `benchmarks.recovery`.

    python torchft_recovery.py RESULT.json tuned|default KILLS [SIZE | width N]

With a SIZE the model is that of `benchmarks.recovery_gpt`, with a width that of `benchmarks.join`.

Gradients are reduced as one flat tensor after the backward pass: torchft 0.2's
DistributedDataParallel fails with an AssertionError in the survivors when a peer dies within an
all-reduce. "tuned": heartbeats each 50 ms, lost after 500 ms; "default": the lighthouse's own
settings (5 s). Both join within 100 ms. A pause lasts from the kill to the first step committed by
the smaller quorum, less one median step of it. At a join it is the longest step from the smaller
quorum's last to the larger one's second, less one median step of the larger one.
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
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

REPLICAS = int(os.environ.get("REPLICAS", "3"))
LIGHTHOUSE = {
    "tuned": {"join_timeout_ms": 100, "heartbeat_timeout_ms": 500, "quorum_tick_ms": 20},
    "default": {"join_timeout_ms": 100},
}
HEARTBEAT_MS = {"tuned": 50, "default": 100}


class Classifier:
    """The model, rows and loss of `benchmarks.recovery`."""

    pause_s = 0.002

    def __init__(self, width: int = 128) -> None:
        torch.manual_seed(1)
        first, middle, last = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.net = nn.Sequential(first, nn.GELU(), middle, nn.GELU(), last)

    def loss(self) -> torch.Tensor:
        x = torch.randn(8, 64)
        return F.cross_entropy(self.net(x), x[:, :4].argmax(1))


class Text:
    """The model, rows and loss of `benchmarks.recovery_gpt`."""

    pause_s = 0.0

    def __init__(self, size: str) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent.parent))
        from benchmarks import models

        width, depth = models.SMALL[size]
        torch.manual_seed(1)
        self.net = models.GPT(width, depth)
        self._loss = models.loss_fn

    def loss(self) -> torch.Tensor:
        tokens = torch.randint(0, 256, (8, 65))
        return self._loss(self.net, {"tokens": tokens})


_stores: list[Any] = []  # served by this process for as long as it runs


def open_manager(
    name: str, lighthouse: str, heartbeat_ms: int, net: nn.Module, adamw: torch.optim.Optimizer
) -> Any:
    """The torchft.Manager of a replica of one process."""
    import torchft

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _stores.append(store)

    def load(state: dict) -> None:
        net.load_state_dict(state["net"])
        adamw.load_state_dict(state["adamw"])

    return torchft.Manager(
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


def average_gradients(manager: Any, net: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(p.grad for p in net.parameters())
    manager.allreduce(flat).wait()
    parts = flat.split([p.numel() for p in net.parameters()])
    for p, part in zip(net.parameters(), parts, strict=True):
        p.grad.copy_(part.view_as(p))


def replica(name: str, lighthouse: str, heartbeat_ms: int, log: str, *size: str) -> None:
    import torchft

    torch.set_num_threads(1)
    wide = size[:1] == ("width",)
    model = Text(*size) if size and not wide else Classifier(*map(int, size[1:]))
    net = model.net
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)
    manager = open_manager(name, lighthouse, heartbeat_ms, net, adamw)
    optimizer = torchft.Optimizer(manager, adamw)
    with open(log, "w", buffering=1) as file:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            model.loss().backward()
            average_gradients(manager, net)
            optimizer.step()
            if manager.current_step() > step:
                file.write(f"{time.time():.6f} {step + 1} {manager.num_participants()}\n")
            time.sleep(model.pause_s)


def read(log: str) -> list[tuple[float, int, int]]:
    if not os.path.exists(log):
        return []
    lines = Path(log).read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(a), int(b), int(c)) for a, b, c in words]


def main(result: str, kind: str, kills: int, *size: str) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, **LIGHTHOUSE[kind])
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    rng = random.Random(0)
    pauses, rejoins, steps, restarts = [], [], [], 0
    small_steps, joins = [], []
    with tempfile.TemporaryDirectory() as folder:
        live: dict[str, subprocess.Popen] = {}

        def start(number: int) -> None:
            name = f"r{number}"
            heartbeat = str(HEARTBEAT_MS[kind])
            arguments = ["replica", name, address, heartbeat, f"{folder}/{name}", *size]
            live[name] = subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env=os.environ | {"RUST_LOG": "error"},
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
            until = time.monotonic() + 300
            while (at := full(since)) is None:
                if time.monotonic() > until:
                    raise TimeoutError("the quorum stayed small")
                time.sleep(0.5)  # its own reading takes time from the replicas
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
                firsts, before, after, joined = [], 0, [], []
                for other in live:
                    if other == f"r{REPLICAS + number}":
                        continue  # the replacement may commit alone before it joins
                    log = read(f"{folder}/{other}")
                    before = max([before, *(s for t, s, _ in log if t <= at)])
                    after += [s for t, s, _ in log if t > at]
                    calm = [t for t, _, size in log if size == REPLICAS and t < at][-20:]
                    steps += [b - a for a, b in itertools.pairwise(calm)]
                    small = [t for t, _, size in log if t > at and size < REPLICAS]
                    small_steps += [b - a for a, b in itertools.pairwise(small)]
                    firsts += small[:1]
                    last = max([at, *small])
                    larger = [t for t, _, size in log if t > last and size == REPLICAS][:2]
                    joined += [b - a for a, b in itertools.pairwise(small[1:][-2:] + larger)]
                if min(after) < before / 2:  # survivors took the state of the new replica
                    restarts += 1
                elif firsts:
                    pauses.append(1e3 * (min(firsts) - at))
                    joins += [1e3 * max(joined)] if joined else []
        finally:
            for process in live.values():
                process.kill()
    step_ms = 1e3 * statistics.median(steps)
    small_ms = 1e3 * statistics.median(small_steps) if small_steps else step_ms
    pauses = sorted(p - small_ms for p in pauses)
    found = {
        "settings": LIGHTHOUSE[kind] | {"heartbeat_interval_ms": HEARTBEAT_MS[kind]},
        "step_ms": round(step_ms, 2),
        "step_of_two_ms": round(small_ms, 2),
        "pause": {
            "count": len(pauses),
            "median_ms": round(statistics.median(pauses), 1) if pauses else None,
            "max_ms": round(pauses[-1], 1) if pauses else None,
        },
        "restarted_from_step_0": restarts,
        "pauses_ms": [round(p, 1) for p in pauses],
        "kill_to_full_size_ms": [round(r) for r in rejoins],
        "pauses_at_joins_ms": [round(j - step_ms, 1) for j in joins],
    }
    Path(result).write_text(json.dumps(found))
    print(found, flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        replica(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
