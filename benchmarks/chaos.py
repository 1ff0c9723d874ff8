"""Train the default job while its workers are killed every few seconds; compare with the
undisturbed run.

    python -m benchmarks.chaos [--steps 120] [--workers 3] [--every 4]

Ends by comparing the SHA-256 of the final weights: equal, or a non-zero exit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time

from elastic_dp.telemetry.progress import ProgressPrinter
from jobs.gpt import make_trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", type=float, default=4.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = {"storage_path": folder, "steps": options.steps, "virtual_workers": 4}
        print("1. with kills", flush=True)
        run = make_trainer(name="kills", workers=options.workers, standby=1, **common).start()
        ended = threading.Event()
        kills: list[str] = []
        killer = threading.Thread(target=kill, args=(run, ended, kills, options), daemon=True)
        killer.start()
        disturbed = run.result(progress=ProgressPrinter())
        ended.set()
        print("2. undisturbed", flush=True)
        calm = make_trainer(name="calm", workers=options.workers, **common).fit()
    print(
        f"{len(kills)} workers killed, {disturbed.generations} generations, "
        f"{disturbed.wall_s:.1f} s"
    )
    print(f"with kills   {disturbed.weights_sha256}\nundisturbed  {calm.weights_sha256}")
    if disturbed.weights_sha256 != calm.weights_sha256:
        sys.exit("the weights differ")
    if not kills:
        sys.exit("no worker was killed: the run was too short to show anything")
    print("equal, to the last bit")


def kill(
    run: object, ended: threading.Event, kills: list[str], options: argparse.Namespace
) -> None:
    """SIGKILL a random worker at random instants; never the only one that holds the state: the job
    makes no checkpoints."""
    rng = random.Random(options.seed)
    while not ended.wait(rng.expovariate(1 / options.every)):
        try:
            status, pids = run.status(), run.pids()
        except Exception:  # the run ended between two looks
            return
        alive = {worker for worker in pids if worker not in kills}
        holders = {worker for worker in alive if status["workers"].get(worker) == "member"}
        if status["step"] < 2 or status["phase"] != "running" or len(holders) < 2:
            continue
        victim = rng.choice(sorted(alive))
        os.kill(pids[victim], signal.SIGKILL)
        kills.append(victim)
        print(
            f"           killed {victim} (process {pids[victim]}) at step {status['step']}",
            flush=True,
        )
        time.sleep(0.2)


if __name__ == "__main__":
    main()
