"""What a step costs beside plain DDP: the same model in the same two processes, step by step in
turn.

    python -m benchmarks.step_overhead [--pairs 60] [--quick]

Each pair is one of our steps and one of DDP's (`gradient_as_bucket_view=True`), on the same rows,
begun together on both ranks. Modes: fast and exact with one virtual worker per worker, and both
with four, against DDP that accumulates the same four micro-batches without synchronising. Quoted:
the median of the paired ratios of rank 0. Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT, SIZES, RandomTokens, loss_fn
from benchmarks.report import conclude, median_interval, parser_of
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.coordinator.messages import Event, Member, Membership, TrainingPosition, WorkerReady
from elastic_dp.distributed.rendezvous import GroupName, Rendezvous
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.train_function import train_until_released
from elastic_dp.train.worker_session import WorkerSession
from elastic_dp.wording import counted

WORLD = 2
ROWS = {"0.2M": 2, "0.9M": 8, "4.9M": 8, "25.5M": 4}
PAIRS = {
    "0.2M": 3.0,  # 12 blocks of width 32: what is not computing counts most
    "0.9M": 3.0,
    "4.9M": 1.0,
    "25.5M": 0.4,
}  # times --pairs; a small model's steps scatter more


TARGETS, TARGET_ACCUMULATING = {"fast": 1.0, "exact": 1.03}, 1.02


class TcpRendezvous(Rendezvous):
    """For processes without a controller: they meet in a store of torch."""

    def __init__(self, port: int, job: str) -> None:
        super().__init__(job, b"secret", lambda record: None)
        self._port, self._job = port, job

    def store(self, group: GroupName, rank: int, world_size: int, timeout: timedelta) -> Any:
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"{self._job}/{group}", store)


class StaticLink:
    """A controller that forms one generation of all workers, once."""

    def __init__(self, control: WorkerControl, membership: Membership) -> None:
        self._control, self._membership = control, membership

    def post(self, event: Event) -> None:
        if isinstance(event, WorkerReady):
            self._control.form(self._membership)
        elif type(event).__name__ == "WorkerFinished":
            self._control.release("finished")
        elif type(event).__name__ == "WorkerFailed":
            print(event.traceback, file=sys.stderr)  # type: ignore[attr-defined]
            os._exit(1)

    def ignore(self, *given: Any, **named: Any) -> None:
        pass

    register = log = flush = say = wrote = skipped = ignore
    write = write_speed = write_sending = write_fault = write_evaluations = ignore


def worker(
    rank: int, port: int, path: str, size: str, exact: bool, per_worker: int, pairs: int, out: Any
) -> None:
    torch.set_num_threads(1)
    virtual = WORLD * per_worker
    spec = JobSpec(
        name="bench",
        data=DataConfig("none", micro_batch_size=ROWS[size]),
        scaling=ScalingConfig(max_workers=WORLD, virtual_workers=virtual),
        exact=exact,
        max_steps=pairs + 5,
    )
    data = RandomTokens(ROWS[size])
    session = session_of(rank, port, spec, data)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    ours, theirs = [], []

    def train(ctx: Any) -> None:
        model = GPT(*SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(0)
        ddp = DistributedDataParallel(GPT(*SIZES[size]), gradient_as_bucket_view=True)
        ddp_optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
        started = None
        for step in ctx.steps(model, optimizer, loss_fn):
            if started is not None:
                ours.append(time.perf_counter() - started)
            dist.barrier()
            started = time.perf_counter()
            ddp_step(ddp, ddp_optimizer, data, step.number, rank, per_worker)
            theirs.append(time.perf_counter() - started)
            dist.barrier()
            started = time.perf_counter()

    train_until_released(train, session)
    out.put((rank, (ours, theirs)))
    time.sleep(0.3)
    os._exit(0)


def session_of(rank: int, port: int, spec: JobSpec, data: RandomTokens) -> WorkerSession:
    """One of `spec.scaling.max_workers` workers that stay, without a controller."""
    workers = spec.scaling.max_workers
    each = spec.scaling.num_virtual_workers // workers
    members = tuple(
        Member(f"w{r}", ((r * each, (r + 1) * each),), TrainingPosition(0), False)
        for r in range(workers)
    )
    control = WorkerControl()
    link = StaticLink(control, Membership(1, members, "w0", 60.0))
    return WorkerSession(
        spec,
        f"w{rank}",
        data,
        torch.device("cpu"),
        connects_devices=False,
        link=link,
        status=link,
        control=control,
        is_source=rank == 0,
        rendezvous=TcpRendezvous(port, spec.name),
    )


def on_workers(worker: Any, world: int, *args: Any) -> list[Any]:
    """Runs `worker(rank, port, path, *args, out)` in so many processes. Returns what each of them
    tells, by rank. Raises RuntimeError if one ends without a word."""
    context = multiprocessing.get_context("forkserver")  # they import torch once
    context.set_forkserver_preload([worker.__module__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (store.port, f"{folder}/store", *args, out)
        processes = [context.Process(target=worker, args=(r, *given)) for r in range(world)]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        while len(found) < world:
            ended = [r for r, process in enumerate(processes) if process.exitcode is not None]
            while not out.empty():
                rank, told = out.get()
                found[rank] = told
            for lost in set(ended) - set(found):
                for process in processes:
                    process.kill()
                raise RuntimeError(f"worker {lost} ended, with {processes[lost].exitcode}")
            time.sleep(0.05)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(world)]


def ddp_step(
    ddp: Any, optimizer: Any, data: RandomTokens, step: int, rank: int, per_worker: int
) -> None:
    optimizer.zero_grad(set_to_none=True)
    for i in range(per_worker):
        batch = data.batch(step, rank * per_worker + i)
        if i < per_worker - 1:
            with ddp.no_sync():
                (loss_fn(ddp, batch) / per_worker).backward()
        else:
            (loss_fn(ddp, batch) / per_worker).backward()
    optimizer.step()


def measure(size: str, exact: bool, per_worker: int, pairs: int) -> dict[str, Any]:
    (ours, theirs), *_ = on_workers(worker, WORLD, size, exact, per_worker, pairs)
    skip = 5  # first steps allocate
    ours, theirs = ours[skip:], theirs[skip : skip + len(ours) - skip]
    ratio, low, high = median_interval([a / b for a, b in zip(ours, theirs, strict=True)])
    return {
        "parameters": size,
        "mode": "exact" if exact else "fast",
        "virtual_workers_per_worker": per_worker,
        "ours_ms": round(1e3 * statistics.median(ours), 2),
        "ddp_ms": round(1e3 * statistics.median(theirs), 2),
        "ratio": round(ratio, 3),
        "interval": [round(low, 3), round(high, 3)],
        "pairs": len(ours),
    }


def targets(results: list[dict[str, Any]]) -> dict[str, bool]:
    """Missed is what is above beyond doubt: with all of its interval."""
    found = {}
    for one in results:
        per_worker = one["virtual_workers_per_worker"]
        target = TARGETS[one["mode"]] if per_worker == 1 else TARGET_ACCUMULATING
        what = (
            f"{one['parameters']} {one['mode']}, {counted(per_worker, 'virtual worker')} each: "
            f"{target} of DDP's time"
        )
        found[what] = one["interval"][0] <= target
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, pairs=60)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.pairs = list(SIZES)[:1], 5
    prepare_environment(os.environ, 1)  # as workers have it, for both
    return conclude("step_overhead", options, cases(options.sizes, options.pairs), targets)


def cases(sizes: Iterable[str], pairs: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for exact in (False, True):
            for per_worker in (1, 4):
                of_case = pairs * PAIRS[size] / (1 if per_worker == 1 else 2.5)
                yield measure(size, exact, per_worker, round(of_case))


if __name__ == "__main__":
    sys.exit(main())
