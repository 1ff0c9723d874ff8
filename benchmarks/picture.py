"""The picture on the first page: one job trained twice, the second time while workers are killed
and others join.

    python -m benchmarks.picture            train both, about five minutes on two cores; then draw
    python -m benchmarks.picture --draw     draw again from benchmarks/results/picture.json
    python -m benchmarks.picture --quick    a short run with one or two kills; records nothing

Both runs train `jobs/gpt.py` on real Ray actors. In the second one a random worker, sometimes two,
gets SIGKILL every now and then, and each is replaced by a new process. Ends with 1 if the final
weights or losses differ. Drawing needs matplotlib (`pip install 'elastic_dp[bench]'`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.recovery import start_ray
from benchmarks.report import RESULTS, add_quick, exit_code, write
from elastic_dp.telemetry.progress import ProgressPrinter
from jobs.gpt import make_trainer

SVG = Path(__file__).parent.parent / "docs" / "assets" / "picture.svg"
WORKERS = 4
LOOK_S = 0.05


def watched(run: Any, every_s: float | None, seed: int) -> dict[str, Any]:
    """Follow one run to its end. `every_s`: the mean time between two kills; None: kill nobody."""
    kills: list[tuple[float, int]] = []  # (time, how many were killed at once)
    ended = threading.Event()
    rng = random.Random(seed)

    def look() -> None:
        killed: set[str] = set()
        due = None
        while not ended.wait(LOOK_S):
            try:
                status, pids = run.status(), run.pids()
            except Exception:  # the run ended between two looks
                return
            if every_s is None or status["step"] < 10 or status["phase"] != "running":
                continue
            now = time.time()
            due = now + every_s / 2 if due is None else due
            members = [w for w, stage in status["workers"].items() if stage == "member"]
            alive = sorted({*members} - killed)
            if now < due or len(alive) < 2:
                continue
            victims = rng.sample(alive, min(rng.choice((1, 1, 2)), len(alive) - 1))
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            kills.append((time.time(), len(victims)))
            killed.update(victims)
            due = kills[-1][0] + rng.uniform(0.5, 1.5) * every_s

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    result = run.result(progress=ProgressPrinter())
    ended.set()
    watcher.join()
    lines = [*run_lines(result.path, "metrics"), *run_lines(result.path, "events")]
    losses = [line for line in lines if "loss" in line]
    formed: dict[
        int, dict[str, Any]
    ] = {}  # the first line that names the members of each generation
    for line in lines:
        if "members" in line:
            formed.setdefault(line["generation"], line)
    start = min(line["time"] for line in formed.values())
    return {
        "weights_sha256": result.weights_sha256,
        "loss": result.metrics["loss"],
        "steps": result.step,
        "workers_lost": result.workers_lost,
        "generations": result.generations,
        "seconds": round(losses[-1]["time"] - start, 1),
        "kills": [[round(at - start, 2), count] for at, count in kills],
        "workers": [[round(x["time"] - start, 2), len(x["members"])] for x in formed.values()],
        "losses": [[round(x["time"] - start, 2), x["step"], x["loss"]] for x in losses],
    }


def run_lines(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    calm, disturbed = results["undisturbed"], results["with kills"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 4.6), sharex=True, gridspec_kw={"height_ratios": [2, 1]}
    )
    runs = ((calm, "undisturbed", "#9aa0a6", 4), (disturbed, "workers killed", "#1a73e8", 1.6))
    for run, name, color, width in runs:
        at, _, loss = zip(*run["losses"], strict=True)
        top.plot(at, loss, color=color, lw=width, label=f"{name}: final loss {run['loss']!r}")
        times, sizes = zip(*run["workers"], strict=True)
        end = run["losses"][-1][0]
        bottom.step([*times, end], [*sizes, sizes[-1]], where="post", color=color, lw=width)
    for axis in (top, bottom):
        for at, _ in disturbed["kills"]:
            axis.axvline(at, color="#d93025", lw=0.8, ls=":")
    killed = sum(count for _, count in disturbed["kills"])
    top.plot([], [], color="#d93025", lw=0.8, ls=":", label=f"SIGKILL ({killed} workers)")
    top.set(ylabel="training loss")
    top.legend(frameon=False)
    bottom.set(
        ylabel="workers", xlabel="seconds", ylim=(0, WORKERS + 0.5), yticks=range(WORKERS + 1)
    )
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    same = "equal" if calm["weights_sha256"] == disturbed["weights_sha256"] else "DIFFERENT"
    figure.suptitle(
        f"SHA-256 of the final weights: {same} ({disturbed['weights_sha256'][:16]}…)", fontsize=10
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, default=14.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    add_quick(parser)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.every = 60, 1.0
    results = {}
    if not options.draw:
        start_ray()
        with tempfile.TemporaryDirectory() as folder:
            for name, every_s in (("undisturbed", None), ("with kills", options.every)):
                job = make_trainer(
                    name=name.replace(" ", "-"),
                    storage_path=folder,
                    workers=WORKERS,
                    virtual_workers=WORKERS,
                    steps=options.steps,
                )
                results[name] = watched(job.start(), every_s, options.seed)
    if not (options.draw or options.quick):
        print(write("picture", results))
    if not options.quick:
        results = json.loads((RESULTS / "picture.json").read_text())["results"]
        draw(results, SVG)
    calm, disturbed = results["undisturbed"], results["with kills"]
    print(f"undisturbed  {calm['loss']!r}  {calm['weights_sha256']}")
    print(f"with kills   {disturbed['loss']!r}  {disturbed['weights_sha256']}")
    return exit_code(targets(results))


def targets(results: dict[str, Any]) -> dict[str, bool]:
    calm, disturbed = results["undisturbed"], results["with kills"]
    same = all(calm[key] == disturbed[key] for key in ("loss", "weights_sha256", "steps"))
    return {
        "the loss and the weights of the undisturbed run": same,
        "a worker was killed": disturbed["workers_lost"] > 0,
    }


if __name__ == "__main__":
    sys.exit(main())
