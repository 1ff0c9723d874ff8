"""What `wire=`, `staleness=` and `inner_steps=` save and cost in a step: bytes and time, on several
links.

    python -m benchmarks.compression [--pairs 60] [--links "no limit" …] [--quick]

Two workers are on two [hosts](slow_link.py), which needs root and Debian's iproute2. What the
device of the first one sends is counted. In turn, in the same processes and on the same rows: one
of our steps, and one of DDP. Where ours has `wire="bf16"`, DDP has torch's `fp16_compress_hook`
(the one for bfloat16 asks for NCCL, and sends as many bytes); beside "int8" it has `powerSGD_hook`
where that works; beside the others it is as it is. With `inner_steps`, a step is an
inner step: one of our steps and as many of DDP are divided by their number. Quoted: medians of rank
0. With `--links` what was recorded of other links stays. Ends with 1, and says why, if a target was
missed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import each, exit_code, median_interval, of_pairs, recorded
from benchmarks.slow_link import DEVICE, Host, bytes_sent, hosts, throughput
from benchmarks.step_overhead import ROWS, WORLD, ddp_step, session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.distributed.process_group import use_interface
from elastic_dp.train.train_function import train_until_released

NAME = "compression"
POWER_SGD: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "None": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "delayed": {"staleness": 1},
    "inner": {"inner_steps": 8},
}
SKIPPED = 3  # first steps allocate
LINKS = {  # bits/s, and seconds one way
    "no limit": (None, 0.0),
    "1 Gb/s, 1 ms": (1e9, 0.001),
    "1 Gb/s, 25 ms": (1e9, 0.025),
    "0.1 Gb/s, 25 ms": (0.1e9, 0.025),
}
# With 25 ms Gloo ended a process that received another all-reduce than it had launched; callbacks
# launch them, probably in another order on each rank.
POWER_SGD_UP_TO_S = 0.001
# Of those without any setting; with H inner steps 1 / (H / 2).
MOST_BYTES = {
    "bf16": 0.52,
    "int8": 0.28,
    "delayed": 1.01,
    "inner": 0.25,
}


class Stopwatch:
    """Times of what is between `begin` and `end`, on all ranks, and the bytes that this host sends
    meanwhile."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []

    def begin(self) -> None:
        dist.barrier()
        self._bytes, self._time = bytes_sent(), time.perf_counter()

    def end(self) -> None:
        took = time.perf_counter() - self._time
        dist.barrier()
        self.found.append((took, bytes_sent() - self._bytes))


def inner_steps(setting: str) -> int:
    """Return how many steps of DDP one of ours is to be compared with."""
    return SETTINGS[setting].get("inner_steps", 1)


def number_of_pairs(setting: str, asked: int) -> int:
    """Return fewer where a pair has several steps of DDP."""
    return asked if inner_steps(setting) == 1 else max(3, asked // 3)


def optimizers(model: torch.nn.Module, setting: str) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer of our loop, and that of its inner steps, if there are any."""
    if "inner_steps" not in SETTINGS[setting]:
        return torch.optim.AdamW(model.parameters(), lr=1e-4), None
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return outer, lambda model, step: torch.optim.AdamW(model.parameters(), lr=1e-4)


def worker(
    rank: int,
    port: int,
    path: str,
    size: str,
    setting: str,
    pairs: int,
    link: str,
    on: Sequence[Host],
    out: Any,
) -> None:
    on[rank].enter()
    use_interface(on[rank].address)
    torch.set_num_threads(1)
    spec = JobSpec(
        name="bench",
        data=DataConfig("none", micro_batch_size=ROWS[size]),
        scaling=ScalingConfig(max_workers=WORLD, virtual_workers=WORLD),
        max_steps=pairs + SKIPPED + 1,
        **SETTINGS[setting],
    )
    data = RandomTokens(ROWS[size])
    session = session_of(rank, port, spec, data, on[0].address)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    ours, theirs = Stopwatch(), Stopwatch()

    def train(ctx: Any) -> None:
        model = GPT(*SIZES[size])
        optimizer, inner = optimizers(model, setting)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(GPT(*SIZES[size]), gradient_as_bucket_view=True)
        if setting == "bf16":
            ddp.register_comm_hook(None, fp16_compress_hook)
        elif setting == "int8" and LINKS[link][1] <= POWER_SGD_UP_TO_S:
            state = PowerSGDState(None, **POWER_SGD)
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


def measure(size: str, setting: str, pairs: int, link: str, on: Sequence[Host]) -> dict[str, Any]:
    """This process is on the first host."""
    given = (size, setting, pairs, link, on)
    (ours, theirs), *_ = timed_on_workers(worker, *given, host=on[0].address)
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


def measure_on_link(size: str, setting: str, pairs: int, link: str) -> dict[str, Any]:
    rate, delay = LINKS[link]
    with (
        hosts(rate_bits_s=rate, delay_s=delay) as on,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), on[0].enter) as first,
    ):
        carries = {"link_gbit_s": round(throughput(*on) / 1e9, 2)}
        return carries | first.submit(measure, size, setting, pairs, link, on).result()


def measured(one: Mapping[str, Any]) -> list[str]:
    """Return the settings other than none."""
    return [setting for setting in one if setting != "None"]


def argument(setting: str) -> str:
    """Return how a setting is written, as `wire="bf16"`."""
    *_, (name, value) = SETTINGS[setting].items()
    return f"{name}={json.dumps(value)}"


def targets(results: Mapping[str, Any]) -> dict[str, bool]:
    return {
        f"{name}, {setting}: {MOST_BYTES[setting]} of the bytes": one[setting]["ours_mb"]
        <= MOST_BYTES[setting] * one["None"]["ours_mb"]
        for name, one in results.items()
        for setting in measured(one)
    }


def cases(sizes: Sequence[str], pairs: int, links: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for size in sizes:
        for link in links:
            yield (
                f"{size}, {link}",
                {
                    one: measure_on_link(size, one, number_of_pairs(one, pairs), link)
                    for one in SETTINGS
                },
            )


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["4.9M"], arguments, links=LINKS)
    if options.quick:
        options.sizes, options.pairs, options.links = list(SIZES)[:1], 3, list(LINKS)[:1]
    prepare_environment(os.environ, 1)  # as workers have it, for both
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE  # DDP's
    keep = not (options.quick or options.no_write)
    before = {} if options.links == list(LINKS) else recorded(NAME)
    found = cases(options.sizes, options.pairs, options.links)
    results = each(NAME, found, keep=keep, before=before)
    return 0 if options.quick else exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
