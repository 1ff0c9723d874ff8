"""What a step with a sharded optimizer costs, beside one without and beside torch's own.

    python -m benchmarks.sharding [--pairs 60] [--quick]

Each worker has two sessions in one process, one with `sharding="optimizer"` and one without, and
beside them DDP with `ZeroRedundancyOptimizer` (AdamW, fp32, Gloo). FSDP2 has as many processes of
its own, since it hangs beside our group; they wait meanwhile. All take one step each in turn, in an
order that changes from round to round, on the same rows, begun together. Quoted: the medians of the
ratios of one round, on rank 0; the bytes that a member hands to the collectives of a step, in
multiples of the parameters' bytes; the bytes of the optimizer's state of each worker, beside the
formula. Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, median_interval, of_pairs
from benchmarks.step_overhead import ROWS, ddp_step, session_of, tell, timed_on_workers
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.train.train_function import train_until_released
from elastic_dp.train.worker_session import WorkerSession

WORLDS = (3, 4)  # with two, each holds everything
SKIPPED = 3  # first steps allocate
STATE_BYTES = 8  # of AdamW, for each parameter, in fp32
TARGET = 1.03  # of the time of a step that is not sharded

_FP32 = MixedPrecisionPolicy()

PeerStep = Callable[[RandomTokens, int, int], None]  # (rows, step, rank)


def zero(size: str, group: Any = None) -> tuple[PeerStep, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own code

    ddp = DistributedDataParallel(
        GPT(*SIZES[size]), gradient_as_bucket_view=True, process_group=group
    )
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, process_group=group, lr=1e-4
    )

    def step(data: RandomTokens, number: int, rank: int) -> None:
        ddp_step(ddp, optimizer, data, number, rank, 1)

    return step, optimizer.optim


def fsdp2(
    size: str, group: Any = None, policy: MixedPrecisionPolicy = _FP32
) -> tuple[PeerStep, torch.optim.Optimizer]:
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(group or world, "cpu")
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


PEERS = {"ZeroRedundancyOptimizer": zero, "FSDP2": fsdp2}
IN_OUR_PROCESSES = ("sharded", "not sharded", "ZeroRedundancyOptimizer")
IN_TURN = (*IN_OUR_PROCESSES, "FSDP2")


def spec_of(world: int, rows: int, sharded: bool, steps: int) -> JobSpec:
    return JobSpec(
        name="sharded" if sharded else "replicated",
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


class StepsInTurn:
    """The steps of a session, on a thread of its own, one whenever `step` is called."""

    def __init__(self, session: WorkerSession, size: str) -> None:
        self._session, self._size = session, size
        self._allowed, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._optimizer: torch.optim.Optimizer | None = None
        threading.Thread(target=self._run, daemon=True).start()
        self._done.acquire()

    def _run(self) -> None:
        train_until_released(self._train, self._session)
        self._done.release()

    def _train(self, ctx: Any) -> None:
        model = GPT(*SIZES[self._size])
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        for _ in ctx.steps(model, self._optimizer, loss_fn):
            self._done.release()
            self._allowed.acquire()

    def step(self, *_: Any) -> None:
        self._allowed.release()
        self._done.acquire()

    @property
    def state_bytes(self) -> int:
        sharding: Any = self._session.state.holders
        assert self._optimizer is not None
        return sharding.held_bytes if sharding.is_divided else bytes_of(self._optimizer)


def worker(rank: int, port: int, path: str, world: int, size: str, rounds: int, out: Any) -> None:
    """The first `world` ranks are our workers, the others those of FSDP2."""
    torch.set_num_threads(1)
    data = RandomTokens(ROWS[size])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2 * world)
    groups = [dist.new_group([*range(first, first + world)]) for first in (0, world)]
    sent = SentBytes()
    steps: dict[str, Callable[[RandomTokens, int, int], None]] = {}
    told: dict[str, Any] = {"seconds": {}, "sent": {}, "state": {}}
    sessions: dict[str, StepsInTurn] = {}
    if rank < world:
        for name in ("sharded", "not sharded"):
            spec = spec_of(world, ROWS[size], name == "sharded", rounds + 2)
            sessions[name] = StepsInTurn(session_of(rank, port, spec, data), size)
            steps[name] = sessions[name].step
    peer = "ZeroRedundancyOptimizer" if rank < world else "FSDP2"
    steps[peer], optimizer = PEERS[peer](size, groups[rank // world])
    for number in range(1, rounds + 1):
        for i in range(len(IN_TURN)):
            name = IN_TURN[(number + i) % len(IN_TURN)]
            dist.barrier()
            if name not in steps:
                continue
            sent.count, started = 0, time.perf_counter()
            steps[name](data, number, rank % world)
            told["seconds"].setdefault(name, []).append(time.perf_counter() - started)
            told["sent"][name] = sent.count
    dist.barrier()
    told["state"] = {name: session.state_bytes for name, session in sessions.items()}
    told["state"][peer] = bytes_of(optimizer)
    told["parameters"] = sum(p.nbytes for p in GPT(*SIZES[size]).parameters())
    tell(out, rank, told)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)  # of a DTensor, its part


def measure(size: str, world: int, rounds: int) -> dict[str, Any]:
    told = timed_on_workers(worker, world, size, rounds, workers=2 * world)
    ours, peers = told[:world], told[world:]
    seconds = {
        name: values[SKIPPED:]
        for first in (ours[0], peers[0])
        for name, values in first["seconds"].items()
    }
    beside = {}
    for name in IN_TURN[1:]:
        pairs = zip(seconds["sharded"], seconds[name], strict=True)
        beside[name] = [round(x, 3) for x in median_interval([a / b for a, b in pairs])]
    parameters = ours[0]["parameters"]
    sent = statistics.mean(one["sent"]["sharded"] for one in ours)
    state = {name: max(one["state"][name] for one in ours) for name in IN_OUR_PROCESSES}
    state["FSDP2"] = max(one["state"]["FSDP2"] for one in peers)
    return {
        "parameters": size,
        "workers": world,
        "ms": {name: round(1e3 * statistics.median(of), 2) for name, of in seconds.items()},
        "beside": beside,
        "sent_by_parameters": round(sent / parameters, 3),
        "state_bytes": state,
        "state_bytes_by_formula": STATE_BYTES * parameters // 4 * min(2, world) // world,
        "rounds": len(seconds["sharded"]),
    }


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    found = {}
    for one in results:
        where = f"{one['parameters']}, {one['workers']} workers"
        middle, _, _ = one["beside"]["not sharded"]
        found[f"{where}: {TARGET} of the time of a step that is not sharded"] = middle <= TARGET
        most = 1.1 * one["state_bytes_by_formula"] + (2 << 20)
        found[f"{where}: the state is that of the formula"] = one["state_bytes"]["sharded"] <= most
        limit = 2 + 1 / one["workers"]
        found[f"{where}: 2 + 1/W times the parameters are sent"] = (
            one["sent_by_parameters"] <= limit
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = of_pairs(__doc__, ["0.9M", "4.9M"], arguments)
    if options.quick:
        options.sizes, options.pairs = ["0.9M"], 5
    prepare_environment(os.environ, 1)  # as workers have it, for all
    return conclude("sharding", options, cases(options.sizes, options.pairs), targets)


def cases(sizes: Iterable[str], rounds: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for world in WORLDS:
            yield measure(size, world, rounds)


if __name__ == "__main__":
    sys.exit(main())
