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
from collections.abc import Sequence
from typing import Any

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
        kills: list[tuple[float, tuple[str, ...]]] = []
        how = {"every_s": options.every, "seed": options.seed}
        given = (run, ended, kills)
        threading.Thread(target=kill_members, args=given, kwargs=how, daemon=True).start()
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


def kill_members(
    run: Any,
    ended: threading.Event,
    kills: list[tuple[float, tuple[str, ...]]],
    *,
    every_s: float,
    seed: int,
    at_once: Sequence[int] = (1,),
) -> None:
    """SIGKILL random members at random instants, `every_s` apart in the mean. Never all: the job
    makes no checkpoints. `kills` gets (time, workers). `at_once`: how many, one of these."""
    rng, killed = random.Random(seed), set[str]()
    while not ended.wait(every_s * rng.uniform(0.5, 1.5)):
        try:
            status, pids = run.status(), run.pids()
        except Exception:  # the run ended between two looks
            return
        members = {w for w, stage in status["workers"].items() if stage == "member"}
        alive = sorted(members & {*pids} - killed)
        if status["step"] < 2 or status["phase"] != "running" or len(alive) < 2:
            continue
        victims = tuple(rng.sample(alive, min(rng.choice(at_once), len(alive) - 1)))
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
            print(
                f"           killed {victim} (process {pids[victim]}) at step {status['step']}",
                flush=True,
            )
        kills.append((time.time(), victims))
        killed.update(victims)


if __name__ == "__main__":
    main()
