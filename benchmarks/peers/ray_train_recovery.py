"""A killed worker under Ray Train: three fixed workers, DDP, a checkpoint each 20 steps, the model
of `recovery`.

    python ray_train_recovery.py RESULT.json KILLS

All workers restart after a failure, so there are two pauses: to the first step of any number,
and to the first one that was not done before.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORKERS, EVERY = 3, 20


def train(config: dict[str, Any]) -> None:
    import ray.train
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = nn.Sequential(
        *(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step, rank = 0, ray.train.get_context().get_world_rank()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(net)
    with open(f"{config['folder']}/{os.getpid()}", "w", buffering=1) as log:
        while True:
            x = torch.randn(8, 64)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
            step += 1
            log.write(f"{time.time():.6f} {step}\n")
            time.sleep(0.002)
            if step % EVERY:
                continue
            with tempfile.TemporaryDirectory() as folder:
                given = None
                if rank == 0:
                    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"step": step}, f"{folder}/state.pt")
                    given = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=given)


def read(folder: str) -> list[tuple[float, int, int]]:
    """(time, step, pid), by time."""
    found = []
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                at, step = line.split()
                found.append((float(at), int(step), int(path.name)))
    return sorted(found)


def main(result: str, kills: int) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=12, include_dashboard=False, log_to_driver=False)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(
                storage_path=storage,
                name="kills",
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        threading.Thread(target=trainer.fit, daemon=True).start()

        def wait_past(step: int, since: float) -> None:
            until = time.monotonic() + 90
            while not any(t > since and s > step for t, s, _ in read(folder)):
                if time.monotonic() > until:
                    raise TimeoutError(f"no step after {step}")
                time.sleep(0.2)

        wait_past(3 * EVERY, 0.0)
        found = []
        for _ in range(kills):
            time.sleep(rng.uniform(2.0, 4.0))
            lines = read(folder)
            at = time.time()
            pids = sorted({pid for t, _, pid in lines if t > at - 5.0})
            pid = rng.choice(pids)
            os.kill(pid, signal.SIGKILL)
            top = max(s for _, s, _ in read(folder))
            wait_past(top + EVERY, at)
            lines = read(folder)
            later = [(t, s) for t, s, p in lines if t > at and p not in pids]
            found.append(
                {
                    "to_first_step_s": round(later[0][0] - at, 2),
                    "to_new_step_s": round(min(t for t, s in later if s > top) - at, 2),
                    "steps_redone": top - later[0][1] + 1,
                    "processes_kept": len(set(pids) & {p for t, _, p in lines if t > later[0][0]}),
                }
            )
            print(found[-1], flush=True)
        own = [t for t, _, pid in lines if pid == lines[-1][2]]
        step_ms = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(own))
        Path(result).write_text(json.dumps({"step_ms": round(step_ms, 2), "kills": found}))
        ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
