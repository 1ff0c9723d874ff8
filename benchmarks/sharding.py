"""What a step with a sharded optimizer costs, beside one without and beside torch's own.

    python -m benchmarks.sharding [--pairs 60] [--quick]

In the same processes, step by step in turn: one of our steps, and one of DDP with
`ZeroRedundancyOptimizer` (AdamW, fp32, Gloo), on the same rows, begun together. Once with
`sharding="optimizer"` and once without. Quoted: the median of the paired ratios of rank 0, and the
quotient of the two; the bytes that a member hands to the collectives of a step, in multiples of the
parameters' bytes; the bytes of the optimizer's state of each worker, beside the formula. Memory is
in `benchmarks.sharding_memory`, losses of workers in `benchmarks.sharding_changes`. Ends with 1,
and says why, if a target was missed.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, median_interval, of_pairs
from benchmarks.step_overhead import ROWS, ddp_step, session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.train.train_function import train_until_released

WORLDS = (3, 4)  # with two, each holds everything
SKIPPED = 3  # first steps allocate
STATE_BYTES = 8  # of AdamW, for each parameter, in fp32
TARGET = 1.03  # of the time of a step that is not sharded

_FP32 = MixedPrecisionPolicy()

PeerStep = Callable[[RandomTokens, int, int], None]  # (rows, step, rank)


def zero(size: str) -> tuple[PeerStep, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own code

    ddp = DistributedDataParallel(GPT(*SIZES[size]), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-4)

    def step(data: RandomTokens, number: int, rank: int) -> None:
        ddp_step(ddp, optimizer, data, number, rank, 1)

    return step, optimizer.optim


def fsdp2(
    size: str, policy: MixedPrecisionPolicy = _FP32
) -> tuple[PeerStep, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(*SIZES[size])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(data: RandomTokens, number: int, rank: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model, data.batch(number, rank)).backward()
        optimizer.step()

    return step, optimizer


PEERS = {"ZeroRedundancyOptimizer": zero}
ALONE = PEERS | {"FSDP2": fsdp2}  # in processes of their own: it hangs beside our group


def spec_of(world: int, rows: int, sharded: bool, steps: int) -> JobSpec:
    return JobSpec(
        name="bench",
        data=DataConfig("none", micro_batch_size=rows),
        scaling=ScalingConfig(max_workers=world, virtual_workers=world),
        sharding="optimizer" if sharded else None,
        max_steps=steps,
    )


class SentBytes:
    """Counts what this process hands to collectives for others."""

    def __init__(self) -> None:
        self.count = 0
        self._watch("all_to_all", _of_all_to_all)
        self._watch("all_gather", lambda group, _, x: (group.world_size - 1) * x.nbytes)
        self._watch("all_reduce", lambda g, x: 2 * (g.world_size - 1) * x.nbytes // g.world_size)

    def _watch(self, name: str, nbytes: Callable[..., int]) -> None:
        method = getattr(ProcessGroup, name)

        def watched(group: ProcessGroup, *given: Any) -> Any:
            self.count += nbytes(group, *given)
            return method(group, *given)

        setattr(ProcessGroup, name, watched)


def _of_all_to_all(group: ProcessGroup, _: Any, x: Any, __: Any, sizes: Sequence[int]) -> int:
    return int(sum(sizes) - sizes[group.rank]) * int(x.element_size())


def worker(
    rank: int,
    port: int,
    path: str,
    world: int,
    size: str,
    peer: str,
    sharded: bool,
    pairs: int,
    out: Any,
) -> None:
    torch.set_num_threads(1)
    data = RandomTokens(ROWS[size])
    spec = spec_of(world, ROWS[size], sharded, pairs + SKIPPED)
    session = session_of(rank, port, spec, data)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    sent = SentBytes()
    ours: list[float] = []
    theirs: list[float] = []
    told: dict[str, int] = {}

    def train(ctx: Any) -> None:
        model = GPT(*SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        peer_step, peer_optimizer = PEERS[peer](size)
        started = None
        for step in ctx.steps(model, optimizer, loss_fn):
            if started is not None:
                ours.append(time.perf_counter() - started)
                told["sent"], sent.count = sent.count, 0
            dist.barrier()
            started = time.perf_counter()
            peer_step(data, step.number, rank)
            theirs.append(time.perf_counter() - started)
            sharding = session.state.sharding
            told["state"] = bytes_of(optimizer) if sharding is None else sharding.held_bytes
            told["peer_state"] = bytes_of(peer_optimizer)
            told["parameters"] = sum(p.nbytes for p in model.parameters())
            dist.barrier()
            sent.count = 0
            started = time.perf_counter()

    train_until_released(train, session)
    tell(out, rank, (ours, theirs, told))


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)  # of a DTensor, its part


def measure(size: str, world: int, peer: str, sharded: bool, pairs: int) -> dict[str, Any]:
    told = timed_on_workers(worker, world, size, peer, sharded, pairs, workers=world)
    ours, theirs, first = told[0]
    ours, theirs = ours[SKIPPED:], theirs[SKIPPED : len(ours)]
    ratio, low, high = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    copies = min(2, world) if sharded else world
    sent = statistics.mean(of_worker["sent"] for *_, of_worker in told)
    return {
        "parameters": size,
        "workers": world,
        "peer": peer,
        "sharded": sharded,
        "ours_ms": round(1e3 * statistics.median(ours), 2),
        "peer_ms": round(1e3 * statistics.median(theirs), 2),
        "ratio": round(ratio, 3),
        "interval": [round(low, 3), round(high, 3)],
        "sent_by_parameters": round(sent / first["parameters"], 3),
        "state_bytes": [of_worker["state"] for *_, of_worker in told],
        "state_bytes_by_formula": STATE_BYTES * first["parameters"] // 4 * copies // world,
        "state_bytes_of_peer": [of_worker["peer_state"] for *_, of_worker in told],
        "pairs": len(ours),
    }


def beside_unsharded(
    one: dict[str, Any], results: Iterable[dict[str, Any]]
) -> tuple[float, float, float]:
    """The step time with a sharded optimizer, divided by that without, and its 95 % interval. Both
    were measured beside the same peer, in runs of their own."""
    alike = ("parameters", "workers", "peer")
    (other,) = (x for x in results if not x["sharded"] and all(x[k] == one[k] for k in alike))
    quotient = one["ratio"] / other["ratio"]
    logs = [math.log(high / low) / 2 for low, high in (one["interval"], other["interval"])]
    wide = math.exp(math.hypot(*logs))
    return quotient, quotient / wide, quotient * wide


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    found = {}
    for one in results:
        if not one["sharded"]:
            continue
        where = f"{one['parameters']}, {one['workers']} workers, beside {one['peer']}"
        middle, _, _ = beside_unsharded(one, results)
        found[f"{where}: {TARGET} of the time of a step that is not sharded"] = middle <= TARGET
        most = 1.1 * one["state_bytes_by_formula"] + (2 << 20)
        found[f"{where}: the state is that of the formula"] = max(one["state_bytes"]) <= most
        limit = 2 + 1 / one["workers"]
        found[f"{where}: 2 + 1/W times the parameters are sent"] = (
            one["sent_by_parameters"] <= limit
        )
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
            for peer in PEERS:
                for sharded in (True, False):
                    yield measure(size, world, peer, sharded, pairs)


if __name__ == "__main__":
    sys.exit(main())
