"""How many micro-batches one kill costs: ours, torchft, and a restart from a checkpoint each 20
steps.

    python -m benchmarks.work_lost             # needs .[bench]; some eight minutes
    python -m benchmarks.work_lost --draw      # only draw what was measured before
    python -m benchmarks.work_lost --quick     # six kills, no torchft, nothing is recorded

Four workers run 32 virtual workers, whose loss function sleeps for `--leaf-s`. A random worker gets
SIGKILL at a random instant of a random step, `--kills` times in one run; a replacement joins before
the next one. Each forward pass leaves a line with its time, so what is counted is what ran:

- ours: the forward passes that a step needed beyond its 32, up to the next kill. The workers are
  plain processes (no Ray) in exact mode. At the end the weights must be the undisturbed run's.
- died: what the killed worker had begun of its step. Less cannot be lost.
- restart: arithmetic on the same kills, all that was made since the last step that is a multiple of
  20, and all that was begun of the step in flight, by any worker.
- torchft: measured as ours, in `benchmarks/peers/torchft_work_lost.py`, with as many replicas and
  micro-batches, and fewer kills, since each replica takes seconds to start. What a replica ran and
  did not commit is lost.

Ends with 1 if the weights differ, or if a kill cost more than what died, in the mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import kill_in_step, peers
from benchmarks.kill_in_step import VIRTUAL, WORKERS, train, undisturbed
from benchmarks.recovery import outside_load
from benchmarks.report import RESULTS, add_quick, each, exit_code
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun

SVG = Path(__file__).parent.parent / "docs" / "assets" / "work-lost.svg"
EVERY = 20
PATIENCE_S = 60.0
TORCHFT = "torchft 0.2"
RESTART = f"restart, checkpoint each {EVERY} steps"
LINES = {"what died": "died", "elastic_dp": "lost", RESTART: "restart"}


class Pass(NamedTuple):
    """A forward pass, as it began."""

    at: float
    step: int
    worker: str


class Kill(NamedTuple):
    at: float
    worker: str


def job(folder: str, leaf_s: float) -> JobSpec:
    """That of `kill_in_step`, where the next kill comes sooner than a joiner waits for others."""
    spec = kill_in_step.job(folder, leaf_s, exact=True)
    scaling = dataclasses.replace(spec.scaling, stabilization_s=0.0)
    return dataclasses.replace(spec, name="work-lost", scaling=scaling)


def ours(kills: int, leaf_s: float) -> dict[str, Any]:
    """Lost by each kill: ours, what died, and by a restart at the same instants."""
    rng, struck = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        spec = job(folder, leaf_s)
        with ProcessRun(spec, train) as run:
            generation = 0
            for _ in range(kills):
                wait_for_steps(run, 1, after=generation)
                time.sleep(rng.uniform(0.0, 2 * leaf_s * VIRTUAL / WORKERS))
                membership = run.controller.coordinator.membership
                assert membership is not None
                generation = membership.generation
                victim = rng.choice(membership.members).worker
                struck.append(Kill(time.time(), victim))
                run.worker_group.processes[victim].kill()
            wait_for_steps(run, 2, after=generation)
            run.controller.post(StopRequested("measured"))
            outcome = run.wait()
        assert outcome.error is None, outcome.traceback
        passes = passes_of(folder)
        same = dataclasses.replace(spec, max_steps=outcome.step)
        exact = outcome.digest == undisturbed(same)
    return judge(passes, struck) | {"steps": outcome.step, "exact": exact}


def wait_for_steps(run: ProcessRun, steps: int, after: int) -> None:
    """Wait until the full group has made so many steps, in a generation after this one."""
    until, wanted = time.monotonic() + PATIENCE_S, None
    while True:
        status = run.controller.status()
        newer = run.controller.coordinator.generation > after
        whole = newer and status["world_size"] == WORKERS and status["phase"] == "running"
        wanted = status["step"] + steps if whole and wanted is None else wanted
        if whole and wanted is not None and status["step"] >= wanted:
            return
        assert time.monotonic() < until, status
        time.sleep(0.005)


def passes_of(folder: str) -> list[Pass]:
    found = []
    for path in Path(folder).iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.startswith("pass") and line.endswith("\n"):  # else its writer was killed
                _, step, _, at = line.split()
                found.append(Pass(float(at), int(step), path.name))
    return sorted(found)


def judge(passes: list[Pass], kills: list[Kill]) -> dict[str, Any]:
    """What each kill cost. A pass that ran again belongs to the last kill before its step began
    anew."""
    ran = Counter(one.step for one in passes)
    cut = [max(p.step for p in passes if p.at <= kill.at) for kill in kills]  # in flight then
    last = max(ran)
    until = [*cut[1:], last + 1]
    lost, died, restart = [], [], []
    for kill, step, following in zip(kills, cut, until, strict=True):
        steps = range(step, max(step + 1, following))
        lost.append(sum(ran[s] - VIRTUAL for s in steps if s < last))
        begun = [p for p in passes if p.step == step and p.at <= kill.at]
        died.append(sum(p.worker == kill.worker for p in begun))
        restart.append((step - 1) % EVERY * VIRTUAL + len(begun))
    return {"lost": lost, "died": died, "restart": restart}


def torchft(kills: int, leaf_s: float) -> Any:
    python = os.environ.get("TORCHFT_PYTHON", sys.executable)
    arguments = (str(kills), str(leaf_s), str(WORKERS), str(VIRTUAL // WORKERS))
    return peers.run(python, "torchft_work_lost.py", *arguments, timeout_s=600.0)


def measured(asked: argparse.Namespace, kills: int) -> Iterator[tuple[str, Any]]:
    yield "cores_busy_with_other_work", outside_load()
    found = ours(kills, asked.leaf_s)
    yield from ((name, found[name]) for name in ("exact", "steps"))
    for name, key in LINES.items():
        yield name, summary(found[key]) | {"of_each": found[key]}
    if not asked.quick:
        theirs = torchft(asked.torchft_kills, asked.leaf_s)
        if isinstance(theirs, dict):
            theirs = summary(theirs["lost"]) | {"of_each": theirs["lost"]}
        yield TORCHFT, theirs


def summary(values: list[int]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "kills": len(ordered),
        "median": statistics.median(ordered),
        "mean": round(statistics.mean(ordered), 2),
        "max": ordered[-1],
    }


def targets(results: dict[str, Any]) -> dict[str, bool]:
    return {
        "the weights of the undisturbed run": results["exact"],
        "a kill costs what died": results["elastic_dp"]["mean"] <= results["what died"]["mean"],
    }


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    figure, axis = plt.subplots(figsize=(8, 4.2))
    lines = {
        "what died": ("#202124", ":"),
        "elastic_dp": ("#1a73e8", "-"),
        TORCHFT: ("#f29900", "-"),
        RESTART: ("#d93025", "-"),
    }
    for name, (color, style) in lines.items():
        one = results[name]
        if not isinstance(one, dict):
            continue  # why it was not measured
        ordered = sorted(one["of_each"])
        share = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        label = f"{name}: median {one['median']:g}, {one['kills']} kills"
        axis.step(ordered, share, style, where="post", color=color, label=label)
    axis.set_xscale("symlog", linthresh=1)
    axis.set(
        xlabel=f"micro-batches lost by one kill ({VIRTUAL} in a step)",
        ylabel="% of the kills",
        xlim=(0, None),
        ylim=(0, 101),
    )
    figure.legend(frameon=False, fontsize=8.5, ncols=2, loc="lower center")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--torchft-kills", type=int, default=20)
    parser.add_argument("--leaf-s", type=float, default=0.02)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    add_quick(parser)
    asked = parser.parse_args()
    if not asked.draw:
        kills = 6 if asked.quick else asked.kills
        pieces = each("work_lost", measured(asked, kills), keep=not asked.quick)
        if asked.quick:
            return 0 if pieces["exact"] else 1
    results = json.loads((RESULTS / "work_lost.json").read_text())["results"]
    draw(results, SVG)
    return exit_code(targets(results))


if __name__ == "__main__":
    # Under its own name, so that workers import what is pickled here.
    sys.modules.pop("benchmarks.work_lost", None)
    from benchmarks.work_lost import main as main_here

    sys.exit(main_here())
