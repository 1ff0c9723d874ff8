"""What `wire=`, `staleness=` and `inner_steps=` cost in loss: a GPT of a million parameters
learns the source of Python's standard library (`jobs/gpt.py`) with and without them, from the same
seeds.

    python -m benchmarks.compression_loss [--seeds 5] [--steps 150] [--draw] [--quick]

Each seed draws its own initial weights and order of rows. Steps are those of equal tokens: with
`inner_steps` they are inner steps, and a loss is the mean over those of one step. Draws
`docs/assets/compression.svg`; drawing needs matplotlib (`pip install 'elastic_dp[bench]'`). Ends
with 1 if the mean loss at the end differs by more than the standard deviation of the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.compression import SETTINGS, argument, inner_steps, measured
from benchmarks.report import RESULTS, add_quick, each, exit_code
from jobs.gpt import make_trainer

SVG = Path(__file__).parent.parent / "docs" / "assets" / "compression.svg"
WIDTH = 160  # of the model: 1.0 million parameters
RATE = 1e-3  # the largest learning rate, after the warm-up
LAST = 3  # records of the loss, ten steps apart, whose mean is the loss at the end
Curve = dict[str, float]  # the loss by the number of the step


def trained(seed: int, setting: str, steps: int) -> Curve:
    each = inner_steps(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            name="gpt",
            storage_path=folder,
            workers=1,
            virtual_workers=2,
            steps=steps // each,
            seed=seed,
            config={"width": WIDTH, "lr": RATE},
            **SETTINGS[setting],
        )
        trainer.fit(local=True)
        lines = map(json.loads, Path(folder, "gpt", "metrics.jsonl").read_text().splitlines())
        return {str(line["step"] * each): line["loss"] for line in lines if "loss" in line}


def cases(seeds: int, steps: int) -> Iterator[tuple[str, Any]]:
    for seed in range(seeds):
        yield f"seed {seed}", {one: trained(seed, one, steps) for one in SETTINGS}


def ends(results: Mapping[str, Mapping[str, Curve]], setting: str) -> list[float]:
    """Return the loss at the end of each seed."""
    return [statistics.fmean([*one[setting].values()][-LAST:]) for one in results.values()]


def compared(results: Mapping[str, Mapping[str, Curve]]) -> list[str]:
    """Return the settings other than none."""
    return measured(next(iter(results.values())))


def difference(results: Mapping[str, Mapping[str, Curve]], setting: str) -> tuple[float, float]:
    """Return how much the mean loss with a setting is above that without, and the standard
    deviation of the latter over the seeds."""
    without, changed = ends(results, "None"), ends(results, setting)
    return statistics.fmean(changed) - statistics.fmean(without), statistics.stdev(without)


def targets(results: Mapping[str, Mapping[str, Curve]]) -> dict[str, bool]:
    found = {}
    for setting in compared(results):
        more, deviation = difference(results, setting)
        name = f"{setting}: the loss within the standard deviation of the seeds"
        found[name] = abs(more) <= deviation
    return found


def draw(results: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """The mean over the seeds, and a band from the least to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    figure, axis = plt.subplots(figsize=(8, 3.8))
    for setting, color, style in (
        ("None", "#9aa0a6", "-"),
        ("bf16", "#1a73e8", "--"),
        ("int8", "#d93025", ":"),
        ("delayed", "#188038", "-."),
        ("inner", "#9334e6", (0, (5, 1))),
    ):
        if setting not in ("None", *compared(results)):
            continue
        label = "fp32" if setting == "None" else argument(setting)
        curves = [one[setting] for one in results.values()]
        steps = [*curves[0]]
        by_step = [[curve[step] for curve in curves] for step in steps]
        at = [int(step) for step in steps]
        axis.plot(at, [*map(statistics.fmean, by_step)], ls=style, color=color, label=label)
        axis.fill_between(at, [*map(min, by_step)], [*map(max, by_step)], color=color, alpha=0.2)
    axis.set(xlabel="step", ylabel=f"training loss, {len(results)} seeds")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    add_quick(parser)
    asked = parser.parse_args()
    if not asked.draw:
        seeds, steps = (2, 20) if asked.quick else (asked.seeds, asked.steps)
        found = each("compression_loss", cases(seeds, steps), keep=not asked.quick)
        if asked.quick:
            return 0
        return exit_code(targets(found))
    results = json.loads((RESULTS / "compression_loss.json").read_text())["results"]
    draw(results, SVG)
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
