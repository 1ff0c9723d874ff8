"""The picture on the first page: one job trained twice, the second time while workers are killed
and others join.

    python -m benchmarks.picture            train both, about five minutes on two cores; then draw
    python -m benchmarks.picture --draw     draw again from benchmarks/results/picture.json, and the
                                            Kubernetes of kubernetes.json
    python -m benchmarks.picture --quick    a short run with one or two kills; records nothing

Both runs train `jobs/gpt.py` on real Ray actors. In the second one a random worker, sometimes two,
gets SIGKILL every now and then, and each is replaced by a new process. Ends with 1 if the final
weights or losses differ. Drawing needs matplotlib (`pip install 'elastic_dp[bench]'`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.chaos import kill_members
from benchmarks.recovery import start_ray
from benchmarks.report import RESULTS, exit_code, parser_of, recorded, write
from elastic_dp.telemetry.progress import ProgressPrinter
from jobs.gpt import make_trainer

SVG = Path(__file__).parent.parent / "docs" / "assets" / "picture.svg"
KUBERNETES_SVG = SVG.with_name("kubernetes.svg")
WORKERS = 4


def watched(run: Any, every_s: float | None, seed: int) -> dict[str, Any]:
    """Follow one run to its end. `every_s`: the mean time between two kills; None: kill nobody."""
    kills: list[tuple[float, tuple[str, ...]]] = []
    ended = threading.Event()
    if every_s is not None:
        how: Any = {"every_s": every_s, "seed": seed, "at_once": (1, 1, 2)}
        given = (run, ended, kills)
        threading.Thread(target=kill_members, args=given, kwargs=how, daemon=True).start()
    result = run.result(progress=ProgressPrinter())
    ended.set()
    lines = [*run_lines(result.path, "metrics"), *run_lines(result.path, "events")]
    losses = [line for line in lines if "loss" in line]
    # The first line that names the members of each generation.
    formed: dict[int, dict[str, Any]] = {}
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
        "kills": [[round(at - start, 2), len(victims)] for at, victims in kills],
        "workers": [[round(x["time"] - start, 2), len(x["members"])] for x in formed.values()],
        "losses": [[round(x["time"] - start, 2), x["step"], x["loss"]] for x in losses],
    }


def run_lines(folder: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, f"{name}.jsonl").read_text().splitlines()]


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    return plt


def draw_kubernetes(timeline: dict[str, Any], path: Path) -> None:
    """The pods of tests/kubernetes/test_faults.py, and how many workers train."""
    figure, (top, bottom) = pyplot().subplots(
        2, 1, figsize=(9, 5.5), sharex=True, gridspec_kw={"height_ratios": [2, 1]}
    )
    end = timeline["end"]
    for row, pod in enumerate(timeline["pods"]):
        ends = min(pod.get("ending", end), end)
        ready, start = min(pod.get("ready", ends), ends), max(pod["from"], 0.0)
        top.barh(row, ready - start, left=start, color="#dadce0", height=0.7)
        begins = max(ready, 0.0)
        top.barh(row, max(ends - begins, 0.0), left=begins, color="#8ab4f8", height=0.7)
        name = f"{'head' if 'head' in pod['name'] else 'worker'}, {pod['node']}"
        top.text(start + 3, row, name, va="center", fontsize=7.5)
    for color, label in (("#dadce0", "starts"), ("#8ab4f8", "runs, until Kubernetes ends it")):
        top.barh([0], [0], color=color, label=label)
    top.set(ylabel="pods", yticks=[])
    top.invert_yaxis()
    top.legend(frameon=False, loc="lower left")
    times, sizes = zip(*timeline["workers"], strict=True)
    bottom.step([*times, end], [*sizes, sizes[-1]], where="post", color="#1a73e8", lw=1.6)
    bottom.set(ylabel="workers that train", yticks=[0, 1, 2], ylim=(-0.1, 2.2))
    bottom.set(xlabel="seconds", xlim=(0, end))
    for number, (begin, _, fault) in enumerate(timeline["faults"], start=1):
        for axis in (top, bottom):
            axis.axvline(begin, color="#d93025", lw=0.8, ls=":")
            axis.spines[["top", "right"]].set_visible(False)
        top.text(begin, -1.0, f"{number}", color="#d93025", ha="center")
        figure.text(0.08, 0.02 + 0.03 * (len(timeline["faults"]) - number), f"{number}: {fault}")
    figure.tight_layout(rect=(0, 0.02 + 0.03 * len(timeline["faults"]), 1, 1))
    figure.savefig(path, metadata={"Date": None})


def draw(results: dict[str, Any], path: Path) -> None:
    plt = pyplot()
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
    parser = parser_of(__doc__, steps=400, every=14.0, seed=1)  # every: seconds between kills
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
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
    if options.draw:
        results = recorded("picture")
    elif not (options.no_write or options.quick):
        print(write("picture", results))
    if not (options.no_write or options.quick):
        draw(results, SVG)
        kubernetes = json.loads((RESULTS / "kubernetes.json").read_text())
        draw_kubernetes(kubernetes["timeline"], KUBERNETES_SVG)
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
