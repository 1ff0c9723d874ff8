"""Writes results to `benchmarks/results/<name>.json`, dated and named by hardware."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def hardware() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        pass
    found = {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def write(name: str, results: Any) -> Path:
    """Write one benchmark's results, replacing its last ones."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    date = datetime.date.today().isoformat()
    content = {"date": date, "hardware": hardware(), "results": results}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
    return path


def recorded(name: str) -> dict[str, Any]:
    """Return what was measured before; {} for nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


def each(name: str, pieces: Iterable[tuple[str, Any]], *, keep: bool) -> dict[str, Any]:
    """Print each piece when it is found. `keep`: and write all so far, so that an early end loses
    none. Pieces that were measured before stay unless they are found again."""
    results = recorded(name)
    for piece, found in pieces:
        results[piece] = found
        print(piece, json.dumps(found, indent=1), flush=True)
        if keep:
            write(name, results)
    return results


def parser_of(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """The options that each benchmark has. `numbers`: options of its own, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--no-write", action="store_true", help="record nothing")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="as little as shows that it runs; nothing is recorded, no target is judged",
    )
    return parser


def conclude(
    name: str,
    options: argparse.Namespace,
    measured: Iterable[dict[str, Any]],
    targets: Callable[[list[dict[str, Any]]], Mapping[str, bool]],
) -> int:
    """Print each result when it is found, write those so far, and judge the targets. Returns the
    exit code."""
    results = []
    for one in measured:
        results.append(one)
        print(one, flush=True)
        if not (options.quick or options.no_write):
            print(write(name, results), flush=True)
    return 0 if options.quick else exit_code(targets(results))


def exit_code(targets: Mapping[str, bool]) -> int:
    """Return 1 if a target was missed, and print which."""
    missed = [target for target, met in targets.items() if not met]
    for target in missed:
        print(f"missed: {target}", flush=True)
    return 1 if missed else 0


def median_interval(values: Sequence[float], samples: int = 2000) -> tuple[float, float, float]:
    """Median and its 95 % interval by bootstrap (fixed seed)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(samples))
    return statistics.median(values), medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def run_main(module: str) -> None:
    """Run `main` of the module under its own name, so that workers import what is pickled there."""
    sys.modules.pop(module, None)
    sys.exit(importlib.import_module(module).main())


def spread(values: Sequence[float], digits: int | None = 3) -> dict[str, Any]:
    middle, low, high = (round(value, digits) for value in median_interval(values))
    return {"median": middle, "interval": [low, high]}


def ratio(
    ours: Sequence[float], others: Sequence[float], target: float | None = None
) -> dict[str, Any]:
    """Of the values of each round."""
    found = spread([a / b for a, b in zip(ours, others, strict=True)])
    return found if target is None else found | {"target": target}
