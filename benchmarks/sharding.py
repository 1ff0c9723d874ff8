"""What a sharded optimizer costs and saves, beside torch's `ZeroRedundancyOptimizer`.

    python -m benchmarks.sharding [--pairs 60] [--quick]

In the same processes, step by step in turn: one of our steps, and one of DDP with
`ZeroRedundancyOptimizer` (AdamW, fp32, Gloo), on the same rows, begun together. Once with
`sharding="optimizer"` and once without. Quoted: the median of the paired ratios of rank 0, and the
quotient of the two; the bytes of the optimizer's state of each worker, beside the formula. Ends
with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, median_interval, of_pairs
from benchmarks.step_overhead import ROWS, StaticLink, ddp_step
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.coordinator.messages import Member, Membership, TrainingPosition
from elastic_dp.distributed.process_group import open_rendezvous_store
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.train_function import train_until_released
from elastic_dp.train.worker_session import WorkerSession

WORLDS = (2, 4)
SKIPPED = 3  # first steps allocate
STATE_BYTES = 8  # of AdamW, for each parameter, in fp32
TARGET = 1.03  # of the time of a step that is not sharded


def worker(
    rank: int, world: int, port: int, path: str, size: str, sharded: bool, pairs: int, out: Any
) -> None:
    torch.set_num_threads(1)
    spec = JobSpec(
        name="bench",
        data=DataConfig("none", micro_batch_size=ROWS[size]),
        scaling=ScalingConfig(max_workers=world, virtual_workers=world),
        sharding="optimizer" if sharded else None,
        max_steps=pairs + SKIPPED,
    )
    members = tuple(
        Member(f"w{r}", ((r, r + 1),), TrainingPosition(0), False) for r in range(world)
    )
    control = WorkerControl()
    link = StaticLink(control, Membership(1, members, "w0", 60.0), port)
    data = RandomTokens(ROWS[size])
    session = WorkerSession(
        spec, f"w{rank}", data, torch.device("cpu"), False, link, link, control, rank == 0
    )
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    ours, theirs = [], []
    held: list[int] = []

    def train(ctx: Any) -> None:
        model = GPT(*SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(GPT(*SIZES[size]), gradient_as_bucket_view=True)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-4)
        started = None
        for step in ctx.steps(model, optimizer, loss_fn):
            if started is not None:
                ours.append(time.perf_counter() - started)
            dist.barrier()
            started = time.perf_counter()
            ddp_step(ddp, zero, data, step.number, rank, 1)
            theirs.append(time.perf_counter() - started)
            sharding = session.state.sharding
            mine = bytes_of(optimizer) if sharding is None else sharding.held_bytes
            held[:] = [mine, bytes_of(zero.optim), sum(p.numel() for p in model.parameters())]
            dist.barrier()
            started = time.perf_counter()

    train_until_released(train, session)
    out.put((rank, ours, theirs, held))
    time.sleep(0.3)
    os._exit(0)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def measure(size: str, world: int, sharded: bool, pairs: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    store = open_rendezvous_store("127.0.0.1", b"secret")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (world, store.port, f"{folder}/store", size, sharded, pairs, out)
        processes = [context.Process(target=worker, args=(r, *args)) for r in range(world)]
        for process in processes:
            process.start()
        told = sorted(out.get() for _ in range(world))
        for process in processes:
            process.join()
    _, ours, theirs, (_, _, numel) = told[0]
    ours, theirs = ours[SKIPPED:], theirs[SKIPPED : SKIPPED + len(ours) - SKIPPED]
    ratio, low, high = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    copies = min(2, world) if sharded else world
    return {
        "parameters": size,
        "workers": world,
        "sharded": sharded,
        "ours_ms": round(1e3 * statistics.median(ours), 2),
        "zero_ms": round(1e3 * statistics.median(theirs), 2),
        "ratio": round(ratio, 3),
        "interval": [round(low, 3), round(high, 3)],
        "state_bytes": [held[0] for *_, held in told],
        "state_bytes_by_formula": STATE_BYTES * numel * copies // world,
        "state_bytes_of_zero": [held[1] for *_, held in told],
        "pairs": len(ours),
    }


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    """A time is missed that is above beyond doubt: the whole interval of the one above that of the
    other."""
    found = {}
    for one in results:
        where = f"{one['parameters']}, {one['workers']} workers"
        for other in results:
            same = (other["parameters"], other["workers"]) == (one["parameters"], one["workers"])
            if same and one["sharded"] and not other["sharded"]:
                found[f"{where}: {TARGET} of the time of a step that is not sharded"] = (
                    one["interval"][0] <= TARGET * other["interval"][1]
                )
        if one["sharded"]:
            most = 1.1 * one["state_bytes_by_formula"] + (2 << 20)
            found[f"{where}: the state is that of the formula"] = max(one["state_bytes"]) <= most
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, SIZES, arguments)
    if options.quick:
        options.sizes, options.pairs = list(SIZES)[:1], 5
    prepare_environment(os.environ, 1)  # as workers have it, for both
    return conclude("sharding", options, cases(options.sizes, options.pairs), targets)


def cases(sizes: Iterable[str], pairs: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for world in WORLDS:
            for sharded in (True, False):
                yield measure(size, world, sharded, pairs)


if __name__ == "__main__":
    sys.exit(main())
