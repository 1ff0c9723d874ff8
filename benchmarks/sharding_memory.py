"""What a worker with a sharded optimizer takes of memory, beside the formula and torch's sharding.

    python -m benchmarks.sharding_memory [--pairs 5] [--quick]

Each system trains alone in its processes (AdamW, fp32, Gloo) for `--pairs` steps. Quoted: by how
much the peak of a process's memory exceeds what it had before its model was made, in bytes for each
parameter, the largest of all workers; and the formula of docs/sharding.md. Activations, buckets and
what Gloo allocates come on top of the formula. There is no checkpoint. The last lines are on paper:
7 billion parameters on 8 workers. Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, of_pairs
from benchmarks.sharding import ALONE, spec_of
from benchmarks.step_overhead import session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.train.train_function import train_until_released

WORLDS = (4, 8)
SYSTEMS = ("not sharded", "sharded", *ALONE)
ROWS = 1  # so that activations are few
BEYOND = 3.0  # bytes for each parameter beyond the formula: activations, buckets, Gloo
BILLION = 10**9


def by_formula(workers: int, sharded: bool, element_bytes: int = 4) -> float:
    """The bytes for each parameter."""
    parts = 3 + 11 / workers if sharded else 5
    return element_bytes * parts


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) << 10


def worker(
    rank: int, port: int, path: str, world: int, size: str, system: str, steps: int, out: Any
) -> None:
    torch.set_num_threads(1)
    before = 0

    def reset() -> None:
        nonlocal before
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = memory("VmRSS")

    if system in ALONE:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
        reset()
        step, _ = ALONE[system](size)
        for number in range(1, steps + 1):
            step(RandomTokens(ROWS), number, rank)
        dist.barrier()
    else:

        def train(ctx: Any) -> None:
            reset()
            model = GPT(*SIZES[size])
            for _ in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss_fn):
                pass

        spec = spec_of(world, ROWS, system == "sharded", steps)
        train_until_released(train, session_of(rank, port, spec, RandomTokens(ROWS)))
    tell(out, rank, memory("VmHWM") - before)


def measure(size: str, world: int, system: str, steps: int) -> dict[str, Any]:
    numel = sum(p.numel() for p in GPT(*SIZES[size]).parameters())
    most = max(timed_on_workers(worker, world, size, system, steps, workers=world))
    found: dict[str, Any] = {
        "parameters": size,
        "workers": world,
        "system": system,
        "bytes_by_parameter": round(most / numel, 1),
    }
    if system not in ALONE:
        found["by_formula"] = round(by_formula(world, system == "sharded"), 1)
    return found


def on_paper() -> Iterator[dict[str, Any]]:
    for dtype, element_bytes in (("fp32", 4), ("bf16", 2)):
        for sharded in (False, True):
            nbytes = 7 * BILLION * by_formula(8, sharded, element_bytes)
            yield {
                "parameters": "7B, on paper",
                "workers": 8,
                "system": "sharded" if sharded else "not sharded",
                "dtype": dtype,
                "gigabytes_without_activations": round(nbytes / BILLION, 1),
            }


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        f"{one['parameters']}, {one['workers']} workers, {one['system']}: the formula": (
            one["bytes_by_parameter"] <= one["by_formula"] + BEYOND
        )
        for one in results
        if "by_formula" in one
    }


def cases(sizes: Iterable[str], steps: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for world in WORLDS:
            for system in SYSTEMS:
                yield measure(size, world, system, steps)
    yield from on_paper()


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["25.5M"], arguments)
    if options.quick:
        options.sizes = ["4.9M"]
    prepare_environment(os.environ, 1)
    steps = 3 if options.quick else min(options.pairs, 10)
    return conclude("sharding_memory", options, cases(options.sizes, steps), targets)


if __name__ == "__main__":
    sys.exit(main())
