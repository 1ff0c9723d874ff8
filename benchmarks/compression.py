"""What `wire=`, `staleness=` and `inner_steps=` save and cost in a step: bytes and time, at several
speeds of the link.

    python -m benchmarks.compression [--pairs 60] [--quick]

Needs root and Debian's iproute2: two processes share a network namespace of their own, whose
loopback is counted and, by `tc`, as slow as a link (both directions share it). In turn, in the same
processes and on the same rows: one of our steps, and one of DDP. Where ours has `wire="bf16"`, DDP
has torch's `fp16_compress_hook` (the one for bfloat16 asks for NCCL, and sends as many bytes);
beside "int8" it has `powerSGD_hook`, since torch has none for 8 bits; beside the others it is as it
is. With `inner_steps`, a step is an inner step: one of our steps and as many of DDP are divided by
their number. Quoted: medians of rank 0. Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import each, exit_code, median_interval, of_pairs
from benchmarks.step_overhead import ROWS, WORLD, ddp_step, session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.train.train_function import train_until_released

SETTINGS: dict[str, dict[str, Any]] = {
    "None": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "delayed": {"staleness": 1},
    "inner": {"inner_steps": 8},
}
SKIPPED = 3  # first steps allocate
RATES = (None, "1gbit", "100mbit")  # of the link, in the words of `tc`
# Of those without any setting; with H inner steps 1 / (H / 2).
MOST_BYTES = {"bf16": 0.52, "int8": 0.28, "delayed": 1.01, "inner": 0.25}


class Stopwatch:
    """Times and bytes on the loopback of what is between `begin` and `end`, on all ranks."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []

    def begin(self) -> None:
        dist.barrier()
        self._bytes, self._time = loopback_bytes(), time.perf_counter()

    def end(self) -> None:
        took = time.perf_counter() - self._time
        dist.barrier()
        self.found.append((took, loopback_bytes() - self._bytes))


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])  # transmitted
    raise RuntimeError("this network namespace has no loopback")


def inner_steps(setting: str) -> int:
    """Return how many steps of DDP one of ours is to be compared with."""
    return SETTINGS[setting].get("inner_steps", 1)


def optimizers(model: torch.nn.Module, setting: str) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer of our loop, and that of its inner steps, if there are any."""
    if "inner_steps" not in SETTINGS[setting]:
        return torch.optim.AdamW(model.parameters(), lr=1e-4), None
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return outer, lambda model, step: torch.optim.AdamW(model.parameters(), lr=1e-4)


def worker(rank: int, port: int, path: str, size: str, setting: str, pairs: int, out: Any) -> None:
    torch.set_num_threads(1)
    spec = JobSpec(
        name="bench",
        data=DataConfig("none", micro_batch_size=ROWS[size]),
        scaling=ScalingConfig(max_workers=WORLD, virtual_workers=WORLD),
        max_steps=pairs + SKIPPED + 1,
        **SETTINGS[setting],
    )
    data = RandomTokens(ROWS[size])
    session = session_of(rank, port, spec, data)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    ours, theirs = Stopwatch(), Stopwatch()

    def train(ctx: Any) -> None:
        model = GPT(*SIZES[size])
        optimizer, inner = optimizers(model, setting)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(GPT(*SIZES[size]), gradient_as_bucket_view=True)
        if setting == "bf16":
            ddp.register_comm_hook(None, fp16_compress_hook)
        elif setting == "int8":
            # It compresses from its third step on, the first that counts.
            state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook)
        ddp_optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
        for step in ctx.steps(model, optimizer, loss_fn, inner_optimizer=inner):
            if step.number > 1:
                ours.end()
            theirs.begin()
            for _ in range(inner_steps(setting)):
                ddp_step(ddp, ddp_optimizer, data, step.number, rank, 1)
            theirs.end()
            ours.begin()

    train_until_released(train, session)
    tell(out, rank, (ours.found, theirs.found))


def measure(size: str, setting: str, pairs: int) -> dict[str, Any]:
    """In this process's network."""
    (ours, theirs), *_ = timed_on_workers(worker, size, setting, pairs)
    ours, theirs = ours[SKIPPED:], theirs[SKIPPED:][: len(ours) - SKIPPED]
    ratios = [one / other for (one, _), (other, _) in zip(ours, theirs, strict=True)]
    ratio, *interval = median_interval(ratios)
    (ours_ms, ours_mb), (ddp_ms, ddp_mb) = (
        (1e3 * statistics.median(t for t, _ in one), statistics.median(b for _, b in one) / 1e6)
        for one in (each_step(ours, setting), each_step(theirs, setting))
    )
    return {
        "ours_ms": round(ours_ms, 1),
        "ddp_ms": round(ddp_ms, 1),
        "ratio": round(ratio, 3),
        "interval": [round(x, 3) for x in interval],
        "ours_mb": round(ours_mb, 3),
        "ddp_mb": round(ddp_mb, 3),
        "pairs": len(ratios),
    }


def each_step(found: Sequence[tuple[float, int]], setting: str) -> list[tuple[float, float]]:
    number = inner_steps(setting)
    return [(took / number, sent / number) for took, sent in found]


def measure_on_link(size: str, setting: str, pairs: int, rate: str | None) -> dict[str, Any]:
    """In a network of its own, whose loopback has this rate."""
    network = "ip link set lo up"
    if rate is not None:
        network += f" && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 2000ms"
    code = (
        "import json, sys; from benchmarks import compression; "
        "print(json.dumps(compression.measure(*json.loads(sys.argv[1]))))"
    )
    command = ["sh", "-c", f'{network} && exec "$@"', "sh", sys.executable, "-c", code]
    ended = subprocess.run(
        ["unshare", "--net", *command, json.dumps([size, setting, pairs])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout)


def measured(one: Mapping[str, Any]) -> list[str]:
    """Return the settings other than none."""
    return [setting for setting in one if setting != "None"]


def argument(setting: str) -> str:
    """Return how a setting is written, as `wire="bf16"`."""
    ((name, value),) = SETTINGS[setting].items()
    return f"{name}={json.dumps(value)}"


def targets(results: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"{name}, {setting}: {MOST_BYTES[setting]} of the bytes": one[setting]["ours_mb"]
        <= MOST_BYTES[setting] * one["None"]["ours_mb"]
        for name, one in results.items()
        for setting in measured(one)
    }


def cases(sizes: Sequence[str], pairs: int) -> Iterator[tuple[str, Any]]:
    for size in sizes:
        for rate in RATES:
            where = "loopback" if rate is None else rate
            yield (
                f"{size}, {where}",
                {one: measure_on_link(size, one, pairs, rate) for one in SETTINGS},
            )


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["4.9M"], arguments)
    if options.quick:
        options.sizes, options.pairs = list(SIZES)[:1], 3
    prepare_environment(os.environ, 1)  # as workers have it, for both
    keep = not (options.quick or options.no_write)
    results = each("compression", cases(options.sizes, options.pairs), keep=keep)
    return 0 if options.quick else exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
