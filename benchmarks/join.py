"""What a joiner costs the group, by the size of the state, and what a standby saves.

    python -m benchmarks.join [--joins 5] [--kills 10] [--members 2] [--mb 24 240 …] [--quick]

On real Ray actors. A group of two is asked for a third worker, over and over: the state travels as
the run chooses (in parts while the two train, if a copy takes longer than a moment) and, in a run
of its own, at once. The pause is the time in which a worker that was there can make no step: as the
generation changes, and as the third becomes a member. With a warm standby, a kill is followed until
the first step of a generation of full size. Ends with 1, and says why, if a target was missed.
2,400 MB need some 6 GB for each worker: `--members 1` has two. `--peers` lets torchft join the same
models to as many replicas, after kills.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.recovery import (
    Kill,
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
from elastic_dp.train.worker_session import WorkerSession

WIDTHS = {24: 1390, 240: 4400, 720: 7640, 2400: 14080}  # of a model, by MB of its state
CALM_STEPS = 5
TARGET_WAIT_MS, TARGET_STANDBY_MS = 100.0, 500.0  # more for the largest state than for the smallest


def train(ctx: Any) -> None:
    """The job of `benchmarks.recovery`. Writes when a body begins, in which generation and with how
    many members, and for how long this worker makes no step where the generation changes."""
    if ctx.config["at_once"]:
        gradual_join.LARGE_BYTES = 1 << 60
    session, leaves, since = ctx._session, WorkerSession.leave, [0.0]

    def leave(*given: Any) -> None:
        since[0] = time.time()
        leaves(*given)

    def timed(method: Any, begins: bool) -> Any:
        def calls(*given: Any) -> None:
            start = time.time() if begins else since[0]
            method(*given)
            log.write(f"pause {time.time() - start:.6f} {session.generation} 0\n")

        return calls

    WorkerSession.leave = leave
    for name, begins in (("_enter", False), ("_complete_join", True)):
        setattr(WorkerSession, name, timed(getattr(WorkerSession, name), begins))
    model = classifier(ctx.config["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(f"{ctx.config['folder']}/{session.worker}", "w", buffering=1) as log:
        for _ in ctx.steps(model, optimizer, loss_fn):
            log.write(f"body {time.time():.6f} {ctx.generation} {ctx.world_size}\n")


def read(path: str, kind: str = "body") -> list[tuple[float, int, int]]:
    lines = Path(path).read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n") and line.startswith(kind)]
    return [(float(at), int(generation), int(size)) for _, at, generation, size in words]


def joins(width: int, times: int, members: int, *, at_once: bool) -> dict[str, Any]:
    size = 3 * sum(p.numel() * p.element_size() for p in classifier(width).parameters())
    pauses, took, before, meanwhile = [], [], list[float](), list[float]()
    with tempfile.TemporaryDirectory() as storage:
        folder = f"{storage}/logs"
        os.mkdir(folder)
        config: dict[str, Any] = {"train": train, "width": width, "at_once": at_once}
        run = trainer("joins", storage, folder, members, virtual=3, **config).start()
        wait_full(run, members, CALM_STEPS, timeout_s=600.0)
        first = f"{folder}/{min(os.listdir(folder), key=lambda name: int(name[1:]))}"
        for _ in range(times):
            known = len(read(first))

            def has_steps(of: int, more: int, known: int = known) -> bool:
                return sum(size == of for _, _, size in read(first)[known:]) >= more

            wait_for(partial(has_steps, members, CALM_STEPS), 600.0, "steps of fewer", 0.2)
            asked = len(read(first))
            run.scale(members + 1)
            wait_for(partial(has_steps, members + 1, 2), 900.0, "steps with the joiner", 0.2)
            bodies = read(first)
            gaps = [b - a for (a, *_), (b, *_) in itertools.pairwise(bodies)]
            member = next(n for n in range(asked, len(bodies)) if bodies[n][2] == members + 1)
            changed = next(n for n in range(asked, member + 1) if bodies[n][1] == bodies[member][1])
            paused = [s for s, at, _ in read(first, "pause") if at == bodies[member][1]]
            pauses.append(1e3 * sum(paused))
            took.append(bodies[member][0] - bodies[changed][0])
            before += gaps[asked - CALM_STEPS : asked - 1]
            meanwhile += gaps[changed : member - 1]
            run.scale(members)
            wait_full(run, members, timeout_s=600.0)
        run.stop("enough")
        run.result()
    return {
        "state_bytes": size,
        "pause": summary(pauses),
        "until_member_s": round(statistics.median(took), 2),
        "steps_before": summary([1e3 * s for s in before]),
        "steps_meanwhile": summary([1e3 * s for s in meanwhile]),
    }


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
        who = "" if options.members == 2 else f" for worker {options.members + 1}"
        for mb in options.mb if options.joins else ():
            for how in ("as chosen", "at once"):
                at_once = how == "at once"
                found = joins(WIDTHS[mb], options.joins, options.members, at_once=at_once)
                yield f"state of {mb:,} MB{who}, {how}", found
            if options.peers:
                python = os.environ.get("TORCHFT_PYTHON", sys.executable)
                os.environ["REPLICAS"] = str(options.members + 1)
                words = f"torchft_recovery.py default {options.joins} width {WIDTHS[mb]}".split()
                found = peers.run(python, *words, timeout_s=1800.0)
                yield f"state of {mb:,} MB{who}, torchft", found
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
    pauses = [one["pause"]["median_ms"] for name, one in results.items() if "as chosen" in name]
    if pauses:
        found[f"a pause of {TARGET_WAIT_MS:g} ms more for the largest state"] = (
            pauses[-1] - pauses[0] <= TARGET_WAIT_MS
        )
    return found


def main() -> int:
    parser = parser_of(__doc__, joins=5, kills=10, members=2)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--mb", type=int, nargs="*", choices=WIDTHS, default=[*WIDTHS])
    options = parser.parse_args()
    if options.quick:
        options.joins, options.kills, options.no_write = 0, 1, True
    torch.set_num_threads(1)
    found = targets(each("join", pieces(options), keep=not options.no_write))
    return 0 if options.quick else exit_code(found)


if __name__ == "__main__":
    run_main("benchmarks.join")
