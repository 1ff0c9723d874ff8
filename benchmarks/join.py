"""What a joiner costs the group, by the size of the state, and what a standby saves.

    python -m benchmarks.join [--joins 3] [--kills 10] [--quick]

On real Ray actors. A group of two is asked for a third worker, over and over: the state travels in
parts while the two train and, in a run of its own, is copied at once. The wait is the longest time
between two steps of a worker that was there, less the median of such times before. With a warm
standby, a kill is followed until the first step of a generation of full size. Ends with 1, and says
why, if a target was missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.recovery import (
    Body,
    Kill,
    Record,
    classifier,
    end,
    kill,
    loss_fn,
    outside_load,
    start_ray,
    summary,
    trainer,
    wait_for,
    wait_full,
)
from benchmarks.report import each, exit_code, parser_of, run_main
from elastic_dp.train.generations import gradual_join

WIDTHS = {"24 MB": 1390, "240 MB": 4400, "720 MB": 7640}
CALM_S = 8.0  # of usual steps
TARGET_WAIT_MS, TARGET_STANDBY_MS = 100.0, 500.0  # more for the largest state than for the smallest


def train(ctx: Any) -> None:
    """The job of `benchmarks.recovery`."""
    gradual_join.LARGE_BYTES = 0 if ctx.config["in_parts"] else 1 << 60
    model = classifier(ctx.config["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder, session = ctx.config["folder"], ctx._session
    with open(f"{folder}/{session.worker}", "w", buffering=1) as log:
        for step in ctx.steps(model, optimizer, loss_fn):
            log.write(f"body {time.time():.6f} {step.number} {ctx.generation}\n")


def joins(width: int, times: int, *, in_parts: bool) -> dict[str, Any]:
    size = 3 * sum(p.numel() * p.element_size() for p in classifier(width).parameters())
    waits, took, before, meanwhile = [], [], [], []
    with tempfile.TemporaryDirectory() as storage:
        folder = f"{storage}/logs"
        os.mkdir(folder)
        config: dict[str, Any] = {"train": train, "width": width, "in_parts": in_parts}
        ours = trainer("joins", storage, folder, 2, virtual=3, **config)
        run = ours.start()
        wait_full(run, 2, 5, timeout_s=300.0)
        for _ in range(times):
            known = set(os.listdir(folder))
            time.sleep(CALM_S)
            asked = time.time()
            run.scale(3)

            def trains(known: set[str] = known) -> bool:
                new = set(os.listdir(folder)) - known
                return any(os.path.getsize(f"{folder}/{name}") for name in new)

            wait_for(trains, 300.0, "the third worker", 0.05)
            joined = time.time()
            bodies = bodies_of_the_first(Record.read(folder, ours.url))
            calm = gaps(bodies, asked - CALM_S, asked)
            usual = statistics.median(calm)
            changed = next(x.time for x in bodies if x.generation == bodies[-1].generation)
            later = gaps(bodies, changed - CALM_S, joined)
            waits.append(1e3 * (max(later) - usual))
            took.append(joined - changed)
            before += calm
            meanwhile += gaps(bodies, changed, joined)
            run.scale(2)
            wait_full(run, 2)
        run.stop("enough")
        run.result()
    return {
        "state_bytes": size,
        "wait": summary(waits),
        "until_it_trains_s": round(statistics.median(took), 2),
        "steps_before": summary([1e3 * s for s in before]),
        "steps_meanwhile": summary([1e3 * s for s in meanwhile]) if meanwhile else None,
    }


def bodies_of_the_first(record: Record) -> list[Body]:
    return [body for body in record.bodies if body.worker == record.bodies[0].worker]


def gaps(bodies: list[Body], start: float, end: float) -> list[float]:
    """Seconds between two bodies of a worker that both lie in that time."""
    own = [body.time for body in bodies if start <= body.time <= end]
    return [later - earlier for earlier, later in itertools.pairwise(own)]


def standby(kills: int) -> dict[str, Any]:
    """From a kill to the first step of a generation of three, with a fourth worker kept warm."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory() as folder:
        ours = trainer("standby", storage, folder, 3, standby=1, body_s=0.002)
        run = ours.start()
        done: list[Kill] = []

        def warm() -> bool:
            status = run.status()
            stages = sorted(status["workers"].values())
            return status["phase"] == "running" and stages == ["member"] * 3 + ["ready"]

        for number in range(kills):
            wait_for(warm, 90.0, "a group of three and a standby", 0.1)
            time.sleep(rng.uniform(0.3, 0.8))
            members = [w for w, stage in run.status()["workers"].items() if stage == "member"]
            pids = run.pids()
            done.append(kill({w: pids[w] for w in members}, rng))
            time.sleep(1.0)
            print(f"standby, kill {number + 1}", flush=True)
        _, record, facts = end(run, ours.url, storage, folder, 3)
    sizes = {
        line["generation"]: len(line["members"])
        for line in record.events
        if line.get("command") == "FormGeneration"
    }
    waits, shrunk = [], 0
    for one in done:
        old = record.generation_at(one.at)
        later = [b for b in record.bodies if b.generation > old and b.time > one.at]
        waits.append(1e3 * (next(b for b in later if sizes[b.generation] == 3).time - one.at))
        shrunk += sizes[later[0].generation] < 3
    return {
        "kill_to_full_size": summary(waits),
        "target_ms": TARGET_STANDBY_MS,
        "went_on_smaller_first": shrunk,
        **facts,
    }


def pieces(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    import ray

    yield "cores_busy_with_other_work", outside_load()
    start_ray()
    try:
        if options.kills:
            yield "with a standby", standby(options.kills)
        for name, width in WIDTHS.items() if options.joins else ():
            for how in ("in parts", "at once"):
                found = joins(width, options.joins, in_parts=how == "in parts")
                yield f"state of {name}, {how}", found
    finally:
        ray.shutdown()


def targets(results: dict[str, Any]) -> dict[str, bool]:
    found = {}
    for name, one in results.items():
        if not isinstance(one, dict):
            continue  # how busy the machine was
        if "kill_to_full_size" in one:
            median = one["kill_to_full_size"].get("median_ms", float("inf"))
            found[f"{name}: {TARGET_STANDBY_MS:g} ms to full size"] = median <= TARGET_STANDBY_MS
            found[f"{name}: the weights of the undisturbed run"] = one["exact"]
            found[f"{name}: each body once and in order"] = not one["bodies_out_of_order"]
    waits = [one["wait"]["median_ms"] for name, one in results.items() if "in parts" in name]
    if waits:
        found[f"a wait of {TARGET_WAIT_MS:g} ms more for the largest state"] = (
            waits[-1] - waits[0] <= TARGET_WAIT_MS
        )
    return found


def main() -> int:
    options = parser_of(__doc__, joins=3, kills=10).parse_args()
    if options.quick:
        options.joins, options.kills, options.no_write = 0, 1, True
    torch.set_num_threads(1)
    found = targets(each("join", pieces(options), keep=not options.no_write))
    return 0 if options.quick else exit_code(found)


if __name__ == "__main__":
    run_main("benchmarks.join")
