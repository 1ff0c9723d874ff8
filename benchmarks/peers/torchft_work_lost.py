"""Micro-batches lost by a kill under torchft: as `benchmarks.work_lost`, with plain processes and
Gloo.

    python torchft_work_lost.py RESULT.json KILLS LEAF_S REPLICAS MICRO_BATCHES

Each replica runs so many micro-batches in a step, each of them a sleep, and reduces once after
them, as with gradient accumulation. The lighthouse is tuned as in `torchft_recovery`, but waits
for longer than a step for who joins: else some replica is always left out. Lost is what a
replica ran and did not commit; also what a killed one had begun of its step, and the first step of
a new one, in which torchft counts nothing of it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

LIGHTHOUSE = {"join_timeout_ms": 1000, "heartbeat_timeout_ms": 500, "quorum_tick_ms": 20}
PATIENCE_S = 180.0


def replica(name: str, lighthouse: str, leaf_s: float, micro_batches: int, log: str) -> None:
    import torchft
    from torchft_recovery import HEARTBEAT_MS, average_gradients, open_manager  # beside this script

    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Linear(16, 4)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-3)
    manager = open_manager(name, lighthouse, HEARTBEAT_MS["tuned"], net, adamw)
    optimizer = torchft.Optimizer(manager, adamw)
    with open(log, "w", buffering=1) as file:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()  # asks for the quorum
            for _ in range(micro_batches):
                file.write(f"{time.time():.6f} pass\n")
                time.sleep(leaf_s)
                net(torch.randn(1, 16)).square().mean().backward()
            average_gradients(manager, net)
            counted = manager.is_participating()
            optimizer.step()
            if manager.current_step() > step and counted:
                file.write(f"{time.time():.6f} commit {manager.num_participants()}\n")


Line = tuple[float, str, int]


def read(log: Path) -> list[Line]:
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(w[0]), w[1], int(w[2]) if len(w) > 2 else 0) for w in words]


def lost_passes(lines: list[Line], micro_batches: int, ended: float | None) -> list[float]:
    """When each pass that was not committed began. `ended`: when its process was killed; None: the
    passes after its last commit are not over."""
    lost: list[float] = []
    waiting: list[float] = []
    for at, kind, _ in lines:
        if kind == "pass":
            waiting.append(at)
        else:
            lost += waiting[:-micro_batches]
            waiting = []
    return lost if ended is None else lost + waiting


def main(result: str, kills: int, leaf_s: float, replicas: int, micro_batches: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, **LIGHTHOUSE)
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    rng, numbers = random.Random(0), itertools.count()
    instants: list[float] = []
    killed: dict[str, float] = {}
    live: dict[str, subprocess.Popen] = {}
    with tempfile.TemporaryDirectory() as folder:

        def start() -> None:
            name = f"r{next(numbers)}"
            arguments = [name, address, str(leaf_s), str(micro_batches), f"{folder}/{name}"]
            live[name] = subprocess.Popen(
                [sys.executable, __file__, "replica", *arguments],
                env=os.environ | {"RUST_LOG": "error"},
            )

        def wait_full(since: float) -> None:
            """Wait until each replica has committed with all the others after that instant."""
            until = time.monotonic() + PATIENCE_S
            while not all(
                any(n == replicas and at > since for at, _, n in read(Path(folder, name))[-30:])
                for name in live
            ):
                if time.monotonic() > until:
                    raise TimeoutError("the quorum stayed small")
                time.sleep(0.1)

        try:
            for _ in range(replicas):
                start()
            wait_full(0.0)
            for _ in range(kills):
                time.sleep(rng.uniform(0.0, 2 * leaf_s * micro_batches))
                name = rng.choice(sorted(live))
                process = live.pop(name)
                instants.append(time.time())
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                killed[name] = instants[-1]
                start()
                wait_full(time.time())
            time.sleep(1.0)
        finally:
            for process in live.values():
                process.kill()
        lost = [0] * kills
        for log in Path(folder).iterdir():
            for at in lost_passes(read(log), micro_batches, killed.get(log.name)):
                # a step that a kill cuts has begun before it, at most one step
                step_s = leaf_s * micro_batches + 1.0
                after = [i for i, kill in enumerate(instants) if kill > at - step_s]
                before = [i for i, kill in enumerate(instants) if kill <= at]
                own = [i for i in after if log.name in killed and instants[i] == killed[log.name]]
                lost[(own or before[-1:] or after[:1])[0]] += 1
    Path(result).write_text(json.dumps({"lost": lost, "settings": LIGHTHOUSE}))
    print(lost, flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        name, address, leaf, count, log_path = sys.argv[2:]
        replica(name, address, float(leaf), int(count), log_path)
    else:
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
