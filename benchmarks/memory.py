"""Bytes of host memory a parameter, by the number of workers, beside torch's own systems.

    python -m benchmarks.memory [--quick]

A GPT of 25.5 million parameters in fp32 with AdamW and one row a step. From before the model is
built to the peak over the first steps, in the worker that needs most. Ends with 1, and says why, if
a target was missed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, parser_of
from benchmarks.step_overhead import ddp_step, on_workers, session_of
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.train.train_function import train_until_released

SIZE, STEPS, WORLDS = "25.5M", 4, (1, 2, 4, 8)
SYSTEMS = ("plain", "sharded", "DDP", "ZeroRedundancyOptimizer", "FSDP2")


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def worker(rank: int, port: int, path: str, world: int, system: str, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    before, data = memory("VmRSS"), RandomTokens(1)
    spec = JobSpec(
        name="memory",
        data=DataConfig("none", micro_batch_size=1),
        scaling=ScalingConfig(max_workers=world, virtual_workers=world),
        sharding="optimizer" if system == "sharded" else None,
        max_steps=STEPS,
    )
    if system in ("plain", "sharded"):
        train_until_released(ours, session_of(rank, port, spec, data))
    else:
        theirs(rank, system, data, GPT(*SIZES[SIZE]))
    out.put((rank, memory("VmHWM") - before))
    dist.barrier()
    os._exit(0)


def ours(ctx: Any) -> None:
    model = GPT(*SIZES[SIZE])
    for _ in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss_fn):
        pass


def theirs(rank: int, system: str, data: RandomTokens, model: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own code

    if system == "FSDP2":
        for part in (*model.blocks, model):
            fully_shard(part, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        if system == "ZeroRedundancyOptimizer"
        else torch.optim.AdamW(model.parameters(), lr=1e-4)
    )
    for step in range(1, STEPS + 1):
        ddp_step(model, optimizer, data, step, rank, 1)


def measured(worlds: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    count = sum(p.numel() for p in GPT(*SIZES[SIZE]).parameters())
    for world in worlds:
        found = {s: max(on_workers(worker, world, world, s)) / count for s in SYSTEMS}
        yield {"workers": world, **{system: round(of, 1) for system, of in found.items()}}


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    beyond = max(one["plain"] - one["DDP"] for one in results)
    sharded = results[-1]["sharded"]
    return {"1 byte more than DDP": beyond <= 1, "16 bytes, sharded over eight": sharded <= 16}


def main() -> int:
    options = parser_of(__doc__).parse_args()
    prepare_environment(os.environ, 1)  # as workers have it, for all
    return conclude("memory", options, measured((1,) if options.quick else WORLDS), targets)


if __name__ == "__main__":
    sys.exit(main())
