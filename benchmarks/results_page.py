"""docs/benchmarks.md and the table of README.md, from benchmarks/results/. `python -m docs.tables`
writes them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
README = Path(__file__).parent.parent / "README.md"
KUBERNETES = Path(__file__).parent.parent / "k8s" / "docs" / "reference.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


class Row(NamedTuple):
    """One measured fact, and the benchmark that measures it ("": one that is no more)."""

    what: str
    measured: str
    benchmark: str


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def readme_rows() -> Iterator[Row]:
    kills = read("recovery")["results"]
    ours, torchft = kills["3 workers"]["pause"], kills["torchft 0.2, tuned, 3 workers"]["pause"]
    ray = kills["Ray Train, checkpoint each 20 steps, 3 workers"]["kills"]
    yield Row(
        f"Pause after SIGKILL of one of 3 workers ({ours['count']} kills)",
        f"{ours['median_ms']:.0f} ms (torchft, tuned: {torchft['median_ms']:.0f} ms; Ray Train: "
        f"{min(k['to_new_step_s'] for k in ray):.0f} s or more)",
        "recovery --peers",
    )
    gpt = read("recovery_gpt")["results"]["2 blocks of width 32"]
    peer = next(name for name in gpt if name.startswith("torchft"))
    ours, theirs = (
        (one["pause"]["median_ms"], one["full_size_again"]["median_ms"] / 1e3)
        for one in (gpt["elastic_dp"], gpt[peer])
    )
    yield Row(
        "The same while a GPT keeps all cores busy",
        "{:.0f} ms, full size after {:.1f} s (torchft, tuned: {:.0f} ms, {:.1f} s)".format(
            *ours, *theirs
        ),
        "recovery_gpt",
    )
    full = read("join")["results"]["with a standby"]["kill_to_full_size"]
    yield Row(
        "From a kill until a standby worker trains in its place",
        f"{full['median_ms']:.0f} ms",
        "join",
    )
    steps = [one["ratio"] for one in read("step_overhead")["results"] if one["mode"] == "exact"]
    yield Row(
        "Time of an exact step, relative to PyTorch DDP on CPUs",
        f"{min(steps):.2f} to {max(steps):.2f}",
        "step_overhead",
    )
    spot = read("spot")["results"][0]
    yield Row(
        "Goodput on a 17-hour AWS spot trace, replayed faster",
        f"{spot['goodput']:.1%} of ideal ({spot['goodput_all_restarted']:.0%} when every change "
        "restarts all workers)",
        "spot",
    )
    stall = read("checkpoint")["results"]["save"]["ratios"]["stall / dcp.async_save"]["median"]
    yield Row(
        "Time that a checkpoint takes from training, relative to torch's `async_save`",
        f"{stall:.2f}",
        "checkpoint",
    )


def more_rows() -> Iterator[Row]:
    for name, found in read("data")["results"]["local"]["ratios"].items():
        ours, _, bare = name.partition(" / ")
        yield Row(
            f"Rows per second, {ours}, relative to a loop that only reads ({bare})",
            f"{found['median']:.2f}",
            "data --part local",
        )
    for name, store in read("data")["results"]["store"].items():
        for order in ("in order", "shuffled"):
            if isinstance(store, dict) and order in store:
                yield Row(
                    f"Parquet from a store with {name}, {order}, relative to the best loop",
                    f"{store[order]['median']:.2f}",
                    "data --part store",
                )
    found = read("memory")["results"]
    systems = [name for name in found[0] if name != "workers"]
    yield Row(
        "Bytes a parameter in fp32 with AdamW, {} workers".format(
            "/".join(str(one["workers"]) for one in found)
        ),
        ", ".join(f"{name} {'/'.join(str(one[name]) for one in found)}" for name in systems),
        "memory",
    )
    pauses = dict[str, str]()
    for name, one in read("join")["results"].items():
        if "as chosen" in name:
            shown = f"{name.split(', as')[0][9:]}: {one['pause']['median_ms']:.0f} ms"
            pauses.setdefault(name.split(" MB")[0], shown)
    yield Row("Pause at a join, by state", ", ".join(pauses.values()), "join")
    most = read("coordinator_scale")["results"][-1]
    change = most["kill and join"]
    yield Row(
        f"Coordinator, a kill and a join among {most['workers']:,} workers",
        f"{change['seconds']:.1f} s, {change['messages']:,} messages",
        "",
    )
    for one in read("sharding")["results"]:
        yield Row(
            f"Step with a sharded optimizer, {one['parameters']} parameters, {one['workers']} "
            "workers, relative to an unsharded step",
            f"{one['beside']['not sharded'][0]:.2f}",
            "",
        )


def table(rows: Iterator[Row]) -> str:
    lines = ["| what | measured | command |", "|---|---|---|"]
    for what, found, name in rows:
        command = f"`python -m benchmarks.{name}`" if name else "recorded"
        lines.append(f"| {what} | {found} | {command} |")
    return "\n".join(lines) + "\n"


def gpu_runs() -> Iterator[str]:
    """The last run on each kind of GPU: its checks, and its steps."""
    seen = set()
    for path in sorted((RESULTS / "gpu").glob("*.json"), reverse=True):
        run = json.loads(path.read_text())
        checks, gpu = run["results"]["checks"], run["hardware"]
        if gpu["gpu"] in seen:
            continue
        seen.add(gpu["gpu"])
        passed = [name for name, check in checks.items() if check["status"] == "ok"]
        others = "".join(f" Not {name}." for name in checks if name not in passed)
        yield f"### {gpu['gpu']}, {run['date']}, torch {gpu['torch']}\n"
        yield f"{len(passed)} of {len(checks)} checks passed.{others}\n"
        steps = checks.get("step", {}).get("facts", {})
        if not steps:
            continue
        yield "| step | time | relative to the plain loop | GPU memory |\n|---|---|---|---|"
        for case, one in steps.items():
            if "why" in one:
                yield f"| {case} | not measured | | |"
                continue
            relative = "" if one["relative"] is None else f"{one['relative']:.2f}"
            yield f"| {case} | {one['ms']:.1f} ms | {relative} | {one['gb']:.1f} GB |"
        yield ""


def page() -> str:
    dates = sorted({read(path.stem)["date"] for path in RESULTS.glob("*.json")})
    return "\n".join(
        [
            "# Benchmarks\n",
            "`python -m docs.tables` writes this page from `benchmarks/results/`. "
            "Rivals run in turn; numbers are medians.\n",
            f"## On CPUs\n\nAMD EPYC, 2 cores, torch 2.13, Gloo. Measured from {dates[0]} to "
            f"{dates[-1]}.\n",
            table(iter([*readme_rows(), *more_rows()])),
            "## On GPUs\n\n`python -m benchmarks.gpu_check` tests one GPU. Several GPUs and nodes "
            "with GPUs have never been tried.\n",
            *gpu_runs(),
        ]
    )


def readme() -> str:
    marked = f"{BEGIN}\n{table(readme_rows())}{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: marked, README.read_text(), flags=re.DOTALL)


def kubernetes() -> str:
    """k8s/docs/reference.md with the table of faults."""
    lines = ["| fault | longest pause | all workers again | steps done again | told |"]
    lines.append("|---|---|---|---|---|")
    found = read("kubernetes")
    for name, one in found["faults"].items():
        full = f"{one['full_size_s']:.0f} s" if one["full_size_s"] else "–"
        times = f"{one['pause_s']:.1f} s | {full}"
        told = f'"{textwrap.shorten(one["told"], 90, placeholder=" …")}"' if one["told"] else "–"
        lines.append(f"| {name} | {times} | {one['steps_done_again']} | {told} |")
    lines += [
        f"| {name} | – | – | – | not done: {why} |" for name, why in found["not_done"].items()
    ]
    begin, end = "<!-- faults: begin -->", "<!-- faults: end -->"
    marked = "\n".join([begin, *lines, end])
    return re.sub(f"{begin}.*{end}", lambda _: marked, KUBERNETES.read_text(), flags=re.DOTALL)
