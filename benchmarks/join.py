"""What a joiner costs the group: the pause, the copy of the state, and steps while it starts; and
what a standby saves.

    python -m benchmarks.join [--joins 5] [--kills 10] [--quick]

On real Ray actors. A group of two is asked for a third worker, over and over, with small and large
states. The pause lasts from the last step of the old generation to the first of the new one, less
one median step of the new one (three workers on two cores are slower than two, which is not the
pause's fault). How fast the joiner takes the state (all of it: weights and optimizer) is compared
with a bare Gloo broadcast of as many bytes, as one tensor between the same two processes, made in
the first loop body after the join. With a warm standby, a kill is followed until the first step of
a generation of full size. Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recovery import (
    Kill,
    Record,
    Timing,
    classifier,
    end,
    kill,
    line_of,
    loss_fn,
    outside_load,
    start_ray,
    summary,
    trainer,
    wait_for,
    wait_full,
)
from benchmarks.report import each, exit_code, parser_of, run_main

WIDTHS = {"4 MB": 540, "100 MB": 2850}
TARGET_PAUSE_MS, TARGET_COPY_RATIO, TARGET_STANDBY_MS = 50.0, 0.7, 500.0
REPEATS = 3


def train(ctx: Any) -> None:
    """The job of `benchmarks.recovery`, with a bare broadcast in the first body after somebody
    joined."""
    model = classifier(ctx.config["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder, session, seen = ctx.config["folder"], ctx._session, 0
    size = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    with open(f"{folder}/{session.worker}", "w", buffering=1) as log:
        for step in ctx.steps(model, optimizer, loss_fn):
            log.write(f"body {time.time():.6f} {step.number} {ctx.generation}\n")
            if ctx.generation == seen:
                continue
            seen = ctx.generation
            log.write(line_of(session.timings[-1]))
            times = bare_broadcast(session, f"{folder}.store-{seen}", size)
            for at in times:
                with open(f"{folder}.bare", "a") as bare:
                    bare.write(f"{seen} {at:.6f}\n")


def bare_broadcast(session: Any, path: str, size: int) -> list[float]:
    """Seconds of a broadcast from the source to the one that joined, several times; empty
    elsewhere."""
    members = session.membership.members
    source = session.membership.source
    joiners = [
        member.worker for member in members if not member.has_state and member.worker != source
    ]
    if len(joiners) != 1 or session.worker not in (source, joiners[0]):
        return []
    gives = session.worker == source
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=30)
    group = dist.ProcessGroupGloo(dist.FileStore(path, 2), 0 if gives else 1, 2, options)
    tensor = torch.ones(size, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        group.barrier().wait()
        started = time.perf_counter()
        group.broadcast([tensor]).wait()
        times.append(time.perf_counter() - started)
    return [] if gives else times


def joins(name: str, width: int, times: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as storage:
        folder = f"{storage}/logs"
        os.mkdir(folder)
        ours = trainer("joins", storage, folder, 2, virtual=3, train=train, width=width)
        run = ours.start()
        wait_full(run, 2, 20)
        asked = []
        for number in range(times):
            time.sleep(2.0)
            asked.append(time.time())
            run.scale(3)
            wait_full(run, 3)
            time.sleep(2.0)
            run.scale(2)
            wait_full(run, 2)
            print(f"{name}, join {number + 1}", flush=True)
        run.stop("enough")
        run.result()
        bare: dict[int, list[float]] = {}
        for line in Path(f"{folder}.bare").read_text().splitlines():
            generation, took = line.split()
            bare.setdefault(int(generation), []).append(float(took))
        record = Record.read(folder, ours.url)
        size = 3 * sum(p.numel() * p.element_size() for p in classifier(width).parameters())
        return judge(record, asked, bare, size)


def judge(
    record: Record, asked: Sequence[float], bare: dict[int, list[float]], size: int
) -> dict[str, Any]:
    pauses, beyond_copy, copies, ratios, rates = [], [], [], [], []
    before, starting, after = [], [], []
    parts: list[dict[str, float]] = []
    for at in asked:
        took = taken(record, at)
        if took is None:
            continue
        old = [b for b in record.bodies if b.generation < took.generation]
        first = record.first_commit_after(old[-1].generation, at)
        if first is None or took.generation not in bare:
            continue
        calm = steps_between(record, at - 2.0, at)
        later = steps_between(record, first.time + 0.5, first.time + 1.9)
        pause = first.time - old[-1].time - statistics.median(later)
        # From when its last member has formed: who gives may have been later than who takes.
        formed = [t.formed_at for t in record.timings if t.generation == took.generation]
        copy = took.copied_at - max(formed)
        broadcast = statistics.median(bare[took.generation])
        pauses.append(1e3 * pause)
        copies.append(1e3 * copy)
        beyond_copy.append(1e3 * (pause - copy))
        rates.append(size / broadcast / 1e6)
        ratios.append(broadcast / copy)
        before += calm
        starting += steps_between(record, at, old[-1].time)
        after += later
        parts.append(breakdown(record, old[-1].time, took, first.time))
    return {
        "state_bytes": size,
        "pause": summary(pauses),
        "copy": summary(copies),
        "pause_beyond_copy": summary(beyond_copy),
        "target_pause_beyond_copy_ms": TARGET_PAUSE_MS,
        "median_pause_in_parts_ms": {
            name: round(1e3 * statistics.median(part[name] for part in parts), 1)
            for name in (parts[0] if parts else ())
        },
        "bare_broadcast_mb_per_s": round(statistics.median(rates)),
        "copy_rate_to_bare_broadcast": round(statistics.median(ratios), 3),
        "copy_rates_to_bare_broadcast": [round(r, 3) for r in ratios],
        "target_copy_rate": TARGET_COPY_RATIO,
        "steps_before": summary([1e3 * s for s in before]),
        "steps_while_it_starts": summary([1e3 * s for s in starting]),
        "steps_after": summary([1e3 * s for s in after]),
    }


def breakdown(record: Record, last: float, took: Timing, first: float) -> dict[str, float]:
    """Seconds of each leg from the last body of the old generation to the first of the new one."""

    def newest(what: str, name: str) -> float:
        times = [x["time"] for x in record.events if x.get(what) == name]
        return max((t for t in times if t <= took.formed_at), default=last)

    stopped, announced = newest("event", "WorkerStopped"), newest("command", "FormGeneration")
    return {
        "last_body_to_all_stopped": stopped - last,
        "stopped_to_announced": announced - stopped,
        "announced_to_formed": took.formed_at - announced,
        "formed_to_copied": took.copied_at - took.formed_at,
        "copied_to_first_step": first - took.copied_at,
    }


def taken(record: Record, at: float) -> Timing | None:
    """The first hand-over of state after that instant, as its receiver saw it."""
    later = [t for t in record.timings if t.formed_at > at and t.bytes_received]
    return min(later, key=lambda t: t.formed_at, default=None)


def steps_between(record: Record, start: float, end: float) -> list[float]:
    """Durations of the steps in that time, of the worker that was there longest."""
    worker = record.bodies[0].worker
    own = [b for b in record.bodies if b.worker == worker and start <= b.time <= end]
    pairs = itertools.pairwise(own)
    return [b.time - a.time for a, b in pairs if a.generation == b.generation]


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
            yield f"2 to 3 workers, state of {name}", joins(name, width, options.joins)
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
        else:
            median = one["pause_beyond_copy"].get("median_ms", float("inf"))
            rate = one["copy_rate_to_bare_broadcast"]
            found[f"{name}: a pause of {TARGET_PAUSE_MS:g} ms beyond the copy"] = (
                median <= TARGET_PAUSE_MS
            )
            found[f"{name}: {TARGET_COPY_RATIO:g} of a bare broadcast's rate"] = (
                rate >= TARGET_COPY_RATIO
            )
    return found


def main() -> int:
    options = parser_of(__doc__, joins=5, kills=10).parse_args()
    if options.quick:
        options.joins, options.kills, options.no_write = 0, 1, True
    torch.set_num_threads(1)
    found = targets(each("join", pieces(options), keep=not options.no_write))
    return 0 if options.quick else exit_code(found)


if __name__ == "__main__":
    run_main("benchmarks.join")
