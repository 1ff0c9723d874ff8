"""What a worker with a sharded optimizer takes of memory, beside the formula and torch's sharding.

    python -m benchmarks.sharding_memory [--pairs 5] [--quick]

Each system trains alone in its processes (AdamW, Gloo) for `--pairs` steps, in fp32, or in bf16
with fp32 masters: `MasterWeights`, and FSDP2's `MixedPrecisionPolicy`. Quoted: by how much the peak
of a process's memory exceeds what it had before its model was made, in bytes for each parameter,
the largest of all processes; and the formula of docs/larger-models.md. Activations, buckets and
what Gloo allocates come on top of the formula. There is no checkpoint. Memory from 128 KiB on is
mapped by itself, in all systems: glibc's heap would keep holes between tensors of megabytes, and
keeps none between those of models that need sharding, which are too large for it. The last lines
are on paper: 7 billion parameters on 8 workers, or on workers of 8 processes. Ends with 1, and says
why, if a target was missed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, of_pairs
from benchmarks.sharding import PEERS, fsdp2, spec_of
from benchmarks.step_overhead import session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.master_weights import MasterWeights
from elastic_dp.train.train_function import train_until_released

WORLDS = (4, 8)
SYSTEMS = ("not sharded", "sharded", *PEERS)
MASTERS = "bf16 with fp32 masters"
WITH_MASTERS = ("not sharded", "sharded", "FSDP2")
WITH_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PROCESSES = (2, 4)  # of each of two workers
ROWS = 1  # so that activations are few
BEYOND = 3.0  # bytes for each parameter beyond the formula: activations, buckets, Gloo
BILLION = 10**9


# Of a parameter, by dtype, and of the state that AdamW has for it.
BYTES = {"fp32": (4, 8), "bf16": (2, 4), MASTERS: (2, 12)}


def by_formula(workers: int, sharded: bool, dtype: str = "fp32") -> float:
    """The bytes for each parameter: itself, its gradient sent and received, and the state; where it
    is sharded, each worker has two parts of it, with their finished gradients."""
    element, state = BYTES[dtype]
    return 3 * element + (2 * (element + state) / workers if sharded else state)


def by_formula_of_gangs(processes: int, layer: float, rest: float, element_bytes: int = 4) -> float:
    """The bytes for each parameter. `layer`, `rest`: the fractions of the parameters in the largest
    layer, which `fully_shard` gathers with its gradient, and in no layer."""
    return element_bytes * (5 / processes + 2 * layer + rest)


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) << 10


def worker(
    rank: int,
    port: int,
    path: str,
    world: int,
    size: str,
    system: str,
    dtype: str,
    steps: int,
    out: Any,
) -> None:
    torch.set_num_threads(1)
    before = 0

    def reset() -> None:
        nonlocal before
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = memory("VmRSS")

    if system in PEERS:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
        reset()
        step, _ = fsdp2(size, policy=WITH_POLICY) if dtype == MASTERS else PEERS[system](size)
        for number in range(1, steps + 1):
            step(RandomTokens(ROWS), number, rank)
        dist.barrier()
    else:

        def train(ctx: Any) -> None:
            reset()
            model = GPT(*SIZES[size])
            optimizer: torch.optim.Optimizer
            if dtype == MASTERS:
                model.bfloat16()
                optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-4)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for _ in ctx.steps(model, optimizer, loss_fn):
                pass

        spec = spec_of(world, ROWS, system == "sharded", steps)
        train_until_released(train, session_of(rank, port, spec, RandomTokens(ROWS)))
    tell(out, rank, memory("VmHWM") - before)


def measure(size: str, world: int, system: str, steps: int, dtype: str = "fp32") -> dict[str, Any]:
    numel = sum(p.numel() for p in GPT(*SIZES[size]).parameters())
    most = max(timed_on_workers(worker, world, size, system, dtype, steps, workers=world))
    found: dict[str, Any] = {
        "parameters": size,
        "workers": world,
        "system": system if dtype == "fp32" else f"{system}, {dtype}",
        "bytes_by_parameter": round(most / numel, 1),
    }
    if system not in PEERS:
        found["by_formula"] = round(by_formula(world, system == "sharded", dtype), 1)
    return found


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows made up on the spot."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(i)
        return {"tokens": torch.randint(256, (65,), generator=drawn)}


def train_in_gang(ctx: Any) -> None:
    """Each process writes down its bytes, and what is in the largest layer and in none."""
    clear = Path("/proc/self/clear_refs")
    before = memory("VmRSS")
    model = GPT(*SIZES[ctx.config["size"]])
    numels = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    total = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    clear.write_text("5", encoding="utf-8")  # the whole model was there for a moment
    for _ in ctx.steps(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss_fn):
        pass
    found = {
        "bytes_by_parameter": (memory("VmHWM") - before) / total,
        "layer": max(numels) / total,
        "rest": 1 - sum(numels) / total,
    }
    file = Path(ctx.config["folder"]) / str(os.getpid())
    file.write_text(json.dumps(found), encoding="utf-8")


def measure_gangs(size: str, processes: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spec = JobSpec(
            name="bench",
            data=MapStyleData(Tokens(), micro_batch_size=ROWS),
            config={"size": size, "folder": folder},
            scaling=ScalingConfig(
                min_workers=2,
                max_workers=2,
                virtual_workers=2,
                threads_per_worker=1,
                processes_per_worker=processes,
            ),
            failure=FailureConfig(heartbeat_timeout_s=60.0),
            max_steps=steps,
        )
        with ProcessRun(spec, train_in_gang) as run:
            outcome = run.wait(600.0)
        assert (outcome.error, outcome.workers_lost) == (None, 0), outcome.traceback
        told = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    assert len(told) == 2 * processes
    return {
        "parameters": size,
        "workers": 2,
        "system": f"gangs of {processes}",
        "bytes_by_parameter": round(max(one["bytes_by_parameter"] for one in told), 1),
        "by_formula": round(by_formula_of_gangs(processes, told[0]["layer"], told[0]["rest"]), 1),
    }


def on_paper() -> Iterator[dict[str, Any]]:
    for dtype, (element_bytes, _) in BYTES.items():
        for sharded in (False, True):
            nbytes = 7 * BILLION * by_formula(8, sharded, dtype)
            yield {
                "parameters": "7B, on paper",
                "workers": 8,
                "system": "sharded" if sharded else "not sharded",
                "dtype": dtype,
                "gigabytes_without_activations": round(nbytes / BILLION, 1),
            }
        if dtype == MASTERS:
            continue  # FSDP2 keeps them by itself
        nbytes = 7 * BILLION * by_formula_of_gangs(8, 0.03, 0.04, element_bytes)
        yield {
            "parameters": "7B, on paper",
            "workers": "any number of",
            "system": "gangs of 8",
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
            for system in WITH_MASTERS:
                yield measure(size, world, system, steps, MASTERS)
        for processes in PROCESSES:
            yield measure_gangs(size, processes, steps)
    yield from on_paper()


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["25.5M"], arguments)
    if options.quick:
        options.sizes = ["4.9M"]
    prepare_environment(os.environ, 1)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)  # of the processes that are started
    steps = 3 if options.quick else min(options.pairs, 10)
    return conclude("sharding_memory", options, cases(options.sizes, steps), targets)


if __name__ == "__main__":
    sys.exit(main())
