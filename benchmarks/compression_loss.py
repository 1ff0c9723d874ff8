"""What `wire=`, `staleness=` and `inner_steps=` cost in loss: a GPT of a million parameters
learns the source of Python's standard library with and without them, from the same seeds.

    python -m benchmarks.compression_loss [--seeds 5] [--steps 1000] [--draw] [--quick]

The model is that of `jobs/gpt.py`. Each seed draws its own initial weights and order of rows. Steps
are those of equal tokens: with `inner_steps` they are inner steps. Delays and inner steps come
behind an ordinary beginning. Delayed gradients are those of predicted weights
(`edp.WeightPrediction`). The moments of the inner optimizer go on (`edp.InnerMoments`), second
moments as they are; with `wire="bf16"` a step sends 1.5 times an ordinary step's bytes. The loss at
the end is that of the final weights on rows that no run trains on, so it means the same for each
setting. Each training is written down with all its settings when it is over, and a run that was cut
off goes on from there: results of the same settings are kept, all others are measured again.
`--draw` makes `docs/assets/compression.svg`, and needs matplotlib (`pip install
'elastic_dp[bench]'`). Ends with 1 if the mean loss at the end differs by more than the standard
deviation of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import elastic_dp as edp
from benchmarks.report import add_quick, exit_code, recorded, write
from jobs.gpt import CACHE, GPT, loss_fn, write_shards

NAME = "compression_loss"
SVG = Path(__file__).parent.parent / "docs" / "assets" / "compression.svg"
WIDTH, HEADS, LAYERS = 160, 4, 3  # of the model: 1.03 million parameters
ROWS, VIRTUAL_WORKERS = 1, 2  # of a micro-batch; of the job
WARM_UP = 0.2  # a part of the run
BETA = 0.9  # of its momentum
CLIP_NORM = 1.0
SECOND_MOMENTS = "whole"  # of `edp.InnerMoments`
WINDOW = 40  # batches whose mean training loss is a point of a curve
HELD_OUT, HELD_OUT_EVERY = 512, 40  # rows, and how far apart they are
INNER_STEPS, INNER_WIRE = 8, "bf16"
Rates = dict[str, float]
# By setting, the best of those that were tried: docs/slow-links.md lists them. `ordinary`: the part
# of the run before it begins.
RATES: dict[str, Rates] = {
    "None": {"lr": 2e-3},
    "bf16": {"lr": 2e-3},
    "int8": {"lr": 2e-3},
    "delayed": {"lr": 2e-3, "ordinary": 0.6},
    "inner": {"lr": 2.8e-3, "ordinary": 0.3},
}
LOOKS: dict[str, tuple[str, Any]] = {
    "None": ("#9aa0a6", "-"),
    "bf16": ("#1a73e8", "--"),
    "int8": ("#d93025", ":"),
    "delayed": ("#188038", "-."),
    "inner": ("#9334e6", (0, (5, 1))),
}
Found = Mapping[str, Any]  # the curve of the training loss by the number of the step, and its end


def nadam(weights: Iterable[nn.Parameter], rates: Rates) -> torch.optim.NAdam:
    """Momentum that looks ahead: the best of those that were tried, with and without a delay."""
    return torch.optim.NAdam(weights, **options(rates))


def options(rates: Rates) -> dict[str, Any]:
    return {
        "lr": rates["lr"],
        "betas": (BETA, 0.95),
        "weight_decay": 0.01,
        "decoupled_weight_decay": True,
        "momentum_decay": 1.0,
    }


def momenta(steps: int) -> float:
    """Return the product of the momenta of so many steps, as NAdam keeps it."""
    return math.prod((BETA * (1 - 0.5 * 0.96**step) for step in range(1, steps + 1)), start=1.0)


def settings_of(setting: str, steps: int) -> dict[str, Any]:
    """Return everything on which a training of so many batches depends, but for its seed, as JSON
    has it. A result is kept with it."""
    found = {
        "job": job_of(setting, steps),
        "rates": RATES[setting],
        "model": [WIDTH, HEADS, LAYERS],
        "optimizer": options(RATES[setting]),
        "rows": ROWS,
        "virtual_workers": VIRTUAL_WORKERS,
        "warm_up": WARM_UP,
        "clip_norm": CLIP_NORM,
        "second_moments": SECOND_MOMENTS if setting == "inner" else None,
        "window": WINDOW,
        "held_out": [HELD_OUT, HELD_OUT_EVERY],
    }
    as_json: dict[str, Any] = json.loads(json.dumps(found))
    return as_json


def train(ctx: edp.TrainContext) -> None:
    rates, before = ctx.config["rates"], ctx.inner_steps_before  # batches before a step
    model: Any = GPT(WIDTH, HEADS, LAYERS)
    total = before(ctx.total_steps + 1)
    warm_up = WARM_UP * total

    def rate(batch: int) -> float:  # warm up, and half a cosine down to a tenth
        progress = min(batch / total, 1.0)
        return min(1.0, (batch + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * progress))

    def scheduled(optimizer: torch.optim.Optimizer, first: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate(first + i))

    def inner(model: Any, step: int) -> torch.optim.Optimizer:
        optimizer, done = nadam(model.moments.weights, rates), before(step)
        model.moments.go_on(optimizer, step=done, mu_product=momenta(done))
        scheduler = scheduled(optimizer, done)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    optimizer: torch.optim.Optimizer
    how: dict[str, Any]
    if ctx.config["inner"]:
        model.moments = edp.InnerMoments(model, second_moments=SECOND_MOMENTS)
        optimizer = torch.optim.SGD(model.moments.outer_groups(), lr=1.0)
        how = {"inner_optimizer": inner, "inner_clip_norm": CLIP_NORM}
    else:
        optimizer = nadam(model.parameters(), rates)
        if ctx.config["ahead"]:
            optimizer = edp.WeightPrediction(
                model.parameters(), torch.optim.NAdam, ahead=ctx.config["ahead"], **options(rates)
            )
        how = {"scheduler": scheduled(optimizer, 0), "clip_norm": CLIP_NORM}
    losses: list[float] = []
    for step in ctx.steps(model, optimizer, loss_fn, **how):
        done = before(step.number + 1)
        losses += [step.loss] * (done - len(losses))
        if done % WINDOW == 0:
            ctx.log({"batches": done, "loss": statistics.fmean(losses[-WINDOW:])})
    ctx.log(ctx.evaluate(loss_fn, edp.DataConfig(ctx.config["held_out"], micro_batch_size=32)))


def write_text(folder: Path) -> tuple[str, str]:
    """Write the rows of `jobs/gpt.py` to two folders: those to train on, and those held out."""
    source = CACHE / "stdlib-bytes-v1"
    write_shards(source)
    rows = pq.read_table(source)
    held_out = np.arange(0, len(rows), HELD_OUT_EVERY)
    rest = np.setdiff1d(np.arange(len(rows)), held_out)
    found = []
    for name, numbers in (("train", rest), ("held-out", held_out[:HELD_OUT])):
        path = folder / name
        path.mkdir()
        pq.write_table(rows.take(pa.array(numbers)), path / "0.parquet", row_group_size=1024)
        found.append(str(path))
    return found[0], found[1]


def job_of(setting: str, steps: int) -> dict[str, Any]:
    """Return the arguments of `ElasticTrainer` for a setting, and a run of so many batches."""
    if setting in ("bf16", "int8"):
        return {"wire": setting, "max_steps": steps}
    ordinary = round(steps * RATES[setting].get("ordinary", 0.0))
    if setting == "delayed":
        return {"staleness": {0: 0, ordinary: 1} if ordinary else 1, "max_steps": steps}
    if setting == "inner":
        outer = (steps - ordinary) // INNER_STEPS
        ordinary = steps - outer * INNER_STEPS
        later = {0: 1, ordinary: INNER_STEPS} if ordinary else INNER_STEPS
        return {"inner_steps": later, "wire": INNER_WIRE, "max_steps": ordinary + outer}
    return {"max_steps": steps}


def label(setting: str, steps: int) -> str:
    """Return a setting as code writes it."""
    given = {name: value for name, value in job_of(setting, steps).items() if name != "max_steps"}
    return ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no setting"


def trained(seed: int, setting: str, steps: int, rates: Rates) -> Found:
    given = job_of(setting, steps)
    with tempfile.TemporaryDirectory() as folder:
        rows, held_out = write_text(Path(folder))
        trainer = edp.ElasticTrainer(
            train,
            name="gpt",
            storage_path=folder,
            config={
                "rates": rates,
                "inner": "inner_steps" in given,
                "ahead": given.get("staleness"),  # as many updates as a gradient is late
                "held_out": held_out,
            },
            data=edp.DataConfig(rows, micro_batch_size=ROWS, seed=seed),
            scaling=edp.ScalingConfig(max_workers=1, virtual_workers=VIRTUAL_WORKERS),
            **given,
        )
        trainer.fit(local=True)
        lines = [*map(json.loads, Path(folder, "gpt", "metrics.jsonl").read_text().splitlines())]
    curve = {str(int(line["batches"])): line["loss"] for line in lines if "loss" in line}
    (end,) = (line["eval_loss"] for line in lines if "eval_loss" in line)
    return {"training": curve, "held_out": end}


def measure(seeds: int, steps: int, before: dict[str, Any]) -> dict[str, Any]:
    """Train what is not in `before` with the same settings, and write each training down when it is
    over."""
    settings = {setting: settings_of(setting, steps) for setting in RATES}
    results: dict[str, Any] = {"steps": steps, "settings": settings, "found": {}}
    for setting, mine in settings.items():
        same = before.get("settings", {}).get(setting) == mine
        results["found"][setting] = before["found"].get(setting, {}) if same else {}
    for setting, rates in RATES.items():
        found = results["found"][setting]
        for seed in map(str, range(seeds)):
            if seed not in found:
                found[seed] = trained(int(seed), setting, steps, rates)
                print(setting, seed, found[seed]["held_out"], flush=True)
                write(NAME, results)
    return results


def compared(results: Mapping[str, Any]) -> list[str]:
    """Return the settings other than none that were trained."""
    return [setting for setting, found in results["found"].items() if found and setting != "None"]


def ends(results: Mapping[str, Any], setting: str) -> dict[str, float]:
    """Return the loss at the end by the seed."""
    return {seed: one["held_out"] for seed, one in results["found"][setting].items()}


def differences(results: Mapping[str, Any], setting: str) -> list[float]:
    """Return how much the loss of each seed is above that without the setting."""
    without = ends(results, "None")
    return [loss - without[seed] for seed, loss in ends(results, setting).items()]


def deviation(results: Mapping[str, Any]) -> float:
    """Return the standard deviation over the seeds without any setting."""
    return statistics.stdev(ends(results, "None").values())


def targets(results: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"{setting}: the loss within the standard deviation of the seeds": statistics.fmean(
            differences(results, setting)
        )
        <= deviation(results)
        for setting in compared(results)
    }


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The mean over the seeds, and a band from the least to the largest; beside them the losses at
    the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": "elastic_dp", "svg.fonttype": "none", "font.size": 9.5}
    figure, (training, end) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(2, 1))
    for place, setting in enumerate(["None", *compared(results)]):
        color, style = LOOKS[setting]
        curves = [one["training"] for one in results["found"][setting].values()]
        steps = [*curves[0]][1:]  # the first windows are far above all others
        by_step = [[curve[step] for curve in curves] for step in steps]
        at = [int(step) for step in steps]
        training.plot(
            at,
            [*map(statistics.fmean, by_step)],
            ls=style,
            color=color,
            label=label(setting, results["steps"]),
        )
        low, high = [*map(min, by_step)], [*map(max, by_step)]
        training.fill_between(at, low, high, color=color, alpha=0.2)
        losses = [*ends(results, setting).values()]
        end.plot([place] * len(losses), losses, "o", color=color, alpha=0.6)
    training.set(xlabel="step", ylabel="training loss")
    training.legend(frameon=False)
    end.set(ylabel="loss at the end, on rows held out", xlim=(-0.5, len(LOOKS) - 0.5))
    end.set_xticks([])
    for axis in (training, end):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    add_quick(parser)
    asked = parser.parse_args()
    if asked.quick:
        for setting in RATES:
            print(setting, trained(0, setting, 80, RATES[setting]), flush=True)
        return 0
    results = recorded(NAME)
    if not asked.draw:
        results = measure(asked.seeds, asked.steps, results)
    else:
        draw(results, SVG)
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
