"""The checks of `python -m benchmarks.gpu_check`: each takes a Setup and returns facts, or raises
what is wrong. Nothing here has a result of its own outside its process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import queue
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks import gpu_step
from benchmarks.models import GPT
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import (
    CheckpointConfig,
    FailureConfig,
    JobSpec,
    MapStyleData,
    ScalingConfig,
)
from elastic_dp.coordinator.messages import DrainNoticed
from elastic_dp.data import open_data
from elastic_dp.device.accelerator import Accelerator, CudaAccelerator
from elastic_dp.device.gpu import nccl_version
from elastic_dp.distributed.device_connection import ABORT_LIMIT_S
from elastic_dp.distributed.nccl_environment import set_nccl_environment
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.exactness.machine_kind import deterministic_kernels, machine_kind
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.local_run import LocalRun
from tests.kit.simulated_device import SimulatedAccelerator, SimulatedDevice

VIRTUAL_WORKERS = 8
CONNECTING_S = 50.0
# For a run. On a GPU less than the limit of its check, so that it says where it stands. A small one
# on a GPU is on a fake one, which is slow.
WAIT_S, WAIT_ON_GPU_S, WAIT_ON_FAKE_S = 100.0, 60.0, 240.0
STEP_S = 140.0  # for the cases of the check of the step
STALL_S = 0.02  # that a step may wait for a snapshot
ROUNDS_S = 15.0  # in which communicators are made again and again
ABORT_S = 0.9  # that an abort takes: an H200 needed 0.5 to 0.9
NOTES = "notes.jsonl"


class Skipped(Exception):
    """This check says nothing here, and why."""


class Wrong(Exception):
    """What was found is not what must be."""


@dataclass(frozen=True)
class Setup:
    device: str  # cuda, cpu
    small: bool
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.small else full

    def note(self, **facts: Any) -> dict[str, Any]:
        """Keep these facts, also if this check fails, hangs, or ends its process later."""
        with (self.folder / NOTES).open("a") as file:
            file.write(json.dumps(facts, default=str) + "\n")
        return facts


@dataclass(frozen=True)
class Check:
    run: Callable[[Setup], dict[str, Any]]
    limit_s: float


# ------------------------------------------------------------------------------------- the jobs


class Rows(torch.utils.data.Dataset):
    """Row i is a function of i alone."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(i)
        image = torch.randn(3, 16, 16, generator=drawn)
        tokens = torch.randint(256, (33,), generator=drawn)
        return {"image": image, "tokens": tokens, "y": image.sum().gt(0).long()}


class ConvNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(width, 2),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)


def build(name: str, width: int) -> nn.Module:
    return ConvNet(width) if name == "conv" else GPT(width, depth=2)


def loss_of(name: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if name == "conv":
        return F.cross_entropy(model(batch["image"]), batch["y"])
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def train(ctx: Any) -> None:
    config = ctx.config
    if config.get("connects"):
        be_another_host()
    with ctx.device:  # initial weights are drawn there
        model = build(config["model"], config["width"])
    if config["processes"] > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=ctx.mesh)
    if config.get("compile") is not None:
        model.compile(**config["compile"])
    optimizer, how = optimizers(model, bool(config["inner"]), config.get("fused", False))
    fault, session = config.get("fault"), ctx._session

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if fault is not None and session.position.step >= 2:
            fail_once(fault, Path(config["fault_file"]), ctx.device)
        return loss_of(config["model"], model, batch)

    how |= {"precision": config["precision"], "clip_norm": 1.0}
    for step in ctx.steps(model, optimizer, loss_fn, **how):
        ctx.log({"loss": step.loss})
        if config.get("kills"):
            note_body(ctx)
        elif config.get("connects"):
            see_connected(ctx, step.number)
        time.sleep(config["body_s"])


def optimizers(
    model: nn.Module, inner: bool, fused: bool
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """The optimizer of `ctx.steps`, and its options for inner steps, if there are any."""
    if not inner:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None), {}
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return outer, {
        "inner_optimizer": lambda model, step: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "inner_clip_norm": 1.0,
    }


def see_connected(ctx: Any, step: int) -> None:
    """Wait in the first body until the devices are connected, and see later that this is used."""
    transport = ctx._session.groups.main.on_device
    until = time.monotonic() + CONNECTING_S
    while step == 1 and not transport.connected and time.monotonic() < until:
        time.sleep(0.02)
    if step == 4 and not transport.switched:
        raise Wrong("gradients do not use the device's communicator")


def note_body(ctx: Any) -> None:
    """Write when the body began, and in which generation; see `pause`. In a group that is whole,
    wait until its devices are connected. After the last kill, end the run."""
    kills, transport = ctx.config["kills"], ctx._session.groups.main.on_device
    with open(Path(kills[0]).parent / f"bodies-{os.getpid()}", "a") as file:
        file.write(f"{time.time_ns()} {ctx.generation}\n")
    until = time.monotonic() + CONNECTING_S
    while ctx.config.get("connects") and ctx.world_size == 3 and not transport.connected:
        if time.monotonic() > until or ctx._session.control._over():
            break
        time.sleep(0.02)
    died_in = [int(Path(kill).read_text() or "0") for kill in kills if Path(kill).exists()]
    if len(died_in) == len(kills) and min(died_in) > 0 and ctx.generation > max(died_in):
        ctx.stop("measured")


def fail_once(kind: str, file: Path, device: torch.device) -> None:
    """A fault of the device in the first member that comes here; simulated on the CPU."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return
    if kind == "assert":
        if device.type == "cpu":
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        index = torch.tensor([9], device=device)
        print(torch.zeros(4, device=device)[index].cpu())
    elif kind == "memory":
        if device.type == "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 TiB.")
        torch.empty(1 << 46, dtype=torch.uint8, device=device)
    raise AssertionError("the fault did not happen")


def job(
    setup: Setup,
    *,
    workers: int = 1,
    steps: int = 6,
    model: str = "gpt",
    precision: str | None = None,
    body_s: float = 0.0,
    every_steps: int | None = None,
    exact: bool = True,
    processes: int = 1,
    inner_steps: int | None = None,
    staleness: Literal[0, 1] = 0,
    sharding: Literal["optimizer"] | None = None,
    **config: Any,
) -> JobSpec:
    config |= {"model": model, "precision": precision, "body_s": body_s, "processes": processes}
    config |= {"width": setup.pick(128, 32), "inner": inner_steps}
    wait_on_gpu_s = setup.pick(WAIT_ON_GPU_S, WAIT_ON_FAKE_S)
    config |= {"wait_s": wait_on_gpu_s if setup.on_gpu else WAIT_S}
    # A worker of several processes asks for as many GPUs; see `WorkerJob.shares_gpu`.
    share = {"GPU": processes if processes > 1 else 0.25} if setup.on_gpu else {}
    return JobSpec(
        name="gpu-check",
        data=MapStyleData(Rows(), micro_batch_size=setup.pick(16, 2)),
        config=config,
        scaling=ScalingConfig(
            min_workers=workers,
            max_workers=workers,
            virtual_workers=VIRTUAL_WORKERS,
            threads_per_worker=1,
            resources_per_worker={"CPU": 1, **share},
            processes_per_worker=processes,
        ),
        failure=FailureConfig(heartbeat_timeout_s=30.0),
        checkpoint=CheckpointConfig(every_steps=every_steps),
        exact=exact,
        inner_steps=inner_steps,
        staleness=staleness,
        sharding=sharding,
        max_steps=steps,
    )


Ended = tuple[RunOutcome, list[dict[str, Any]]]  # and its journal


def group(
    spec: JobSpec,
    faults: Sequence[WorkerFault] = (),
    url: str | None = None,
    act: Callable[[ProcessRun], None] = lambda run: None,
    device: SimulatedDevice | None = None,
    shares_gpu: bool = False,
) -> Ended:
    """How a run on processes ended. `act`: called while it runs. `shares_gpu`: see `WorkerJob`."""
    how: dict[str, Any] = {"url": url, "shares_gpu": shares_gpu}
    if device is not None:
        how["host_of"] = device.host_of
    with ProcessRun(spec, train, faults=tuple(faults), **how) as run:
        act(run)
        outcome = run.wait(spec.config["wait_s"])
        lines = [line for *_, line in list(run.journal._kept)]
    if outcome.error is not None:
        raise Wrong(f"the run failed: {outcome.error}\n{outcome.traceback}")
    return outcome, lines


def alone(setup: Setup, spec: JobSpec) -> LocalRun:
    """The run in this process, without a group."""
    prepare_environment(os.environ, 1)
    data = open_data(spec.data, virtual_workers=VIRTUAL_WORKERS, pin=setup.on_gpu)
    run = LocalRun(spec, data, setup.torch_device)
    run.run(train)
    return run


def together(
    setup: Setup, runs: Mapping[str, Callable[[], Ended]]
) -> tuple[dict[str, RunOutcome], dict[str, list[dict[str, Any]]]]:
    """How they ended, and their journals. At the same time, since most of a short run is its
    start."""

    def run(name: str) -> Ended:
        begun_at, said = time.monotonic(), "failed"
        try:
            outcome, lines = runs[name]()
            said = outcome.digest[:16]
        finally:
            setup.note(**{f"run {name}": f"{said}, {time.monotonic() - begun_at:.1f} s"})
        return outcome, lines

    executor = ThreadPoolExecutor(len(runs))  # nobody waits for the others where one fails
    started = {name: executor.submit(run, name) for name in runs}
    ended = {name: future.result() for name, future in started.items()}
    return {n: outcome for n, (outcome, _) in ended.items()}, {n: j for n, (_, j) in ended.items()}


def same(digests: dict[str, str]) -> dict[str, Any]:
    if len(set(digests.values())) != 1:
        raise Wrong(f"the digests differ: {digests}")
    return {"digest": next(iter(digests.values()))[:16], "equal": "+".join(digests)}


# ----------------------------------------------------------------------------------- the checks


def environment(setup: Setup) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    facts = setup.note(
        gpu=None if gpu is None else gpu.name,
        torch=torch.__version__,
        python=platform.python_version(),
        cores=os.cpu_count(),
    )
    if gpu is not None:
        facts |= setup.note(
            memory_gb=round(gpu.total_memory / 1e9, 1),
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
            nccl=nccl_version(),
        )
        facts |= setup.note(kind=machine_kind(torch.device("cuda", 0), exact=True))
    return facts


def exact(setup: Setup, *, model: str, precision: str | None) -> dict[str, Any]:
    """The same bits on 1, 2 and 4 workers, which share the GPU over Gloo."""
    digests, because = digests_by_size(setup, model, precision)
    if because:
        equal = len(set(digests.values())) == 1
        raise Wrong(f"not exact (digests equal: {equal}): {because}")
    return same(digests)


def digests_by_size(
    setup: Setup, model: str, precision: str | None
) -> tuple[dict[str, str], list[str]]:
    """The digests on several numbers of workers, and why the runs say that they are not exact."""
    runs = {
        f"{n} workers": partial(group, job(setup, workers=n, model=model, precision=precision))
        for n in setup.pick((1, 2, 4), (1, 2))
    }
    outcomes, _ = together(setup, runs)
    because = {reason for outcome in outcomes.values() for reason in outcome.inexact_because}
    return {name: outcome.digest for name, outcome in outcomes.items()}, sorted(because)


def changes(setup: Setup) -> dict[str, Any]:
    """Kill and join, drain, and restore after the loss of all: the bits of the undisturbed run."""
    options = {"workers": 2, "steps": setup.pick(80, 10), "body_s": setup.pick(0.1, 0.05)}

    all_die = [fault(setup, f"all-{rank}", step=7, rank=rank) for rank in (0, 1)]
    spec, with_checkpoints = job(setup, **options), job(setup, **options, every_steps=2)
    runs = {
        "undisturbed": partial(group, spec),
        "kill, join": partial(group, spec, [fault(setup, "killed", step=4, rank=1)]),
        "restore": partial(group, with_checkpoints, all_die, str(setup.folder / "run")),
        "drain": partial(group, spec, act=drain_one),
    }
    outcomes, _ = together(setup, runs)
    facts = {
        "killed": outcomes["kill, join"].workers_lost,
        "lost before restore": outcomes["restore"].workers_lost,
        "generations with drain": outcomes["drain"].generations,
    }
    if facts["generations with drain"] < 2 and not setup.small:
        raise Wrong(f"nobody was drained before the run ended: {facts}")
    if facts["killed"] < 1 or facts["lost before restore"] < 2:
        raise Wrong(f"the faults did not happen: {facts}")
    return same({name: outcome.digest for name, outcome in outcomes.items()}) | facts


def gangs(setup: Setup) -> dict[str, Any]:
    """Workers of two processes, over which the model is sharded: one worker, two, two of which a
    process is killed, and two that are restored. All processes share the GPU, so whatever they
    exchange goes through the host: NCCL refuses two ranks on one GPU."""
    options = {"steps": setup.pick(12, 6), "processes": 2, "body_s": 0.05}
    two, with_checkpoints = (
        job(setup, workers=2, **options, every_steps=every) for every in (None, 2)
    )
    run = partial(group, shares_gpu=True, device=None if setup.on_gpu else SimulatedDevice())

    where: dict[str, Any] = {"step": 4, "process": 1}
    all_die = [fault(setup, f"all-{rank}", rank=rank, **where) for rank in (0, 1)]
    runs = {
        "one": partial(run, job(setup, workers=1, **options)),
        "two": partial(run, two),
        "kill": partial(run, two, [fault(setup, "killed", rank=1, **where)]),
        "restore": partial(run, with_checkpoints, all_die, str(setup.folder / "run")),
    }
    return with_losses(setup, runs, {"kill": 1, "restore": 2})


def gangs_over_nccl(setup: Setup) -> dict[str, Any]:
    """The same over NCCL, which must take the processes for those of several hosts: the sharded
    model of a worker, and the gradients between workers. A process is killed while both are used.
    The bits are those through the host."""
    facts = share_the_gpu(setup)
    options = {"steps": setup.pick(40, 24), "processes": 2, "body_s": setup.pick(0.1, 0.05)}
    device = None if setup.on_gpu else SimulatedDevice()
    host = partial(group, shares_gpu=True, device=device)
    connects = job(setup, workers=2, **options, connects=True, host=AnotherHost())
    step = options["steps"] // 2
    one_dies = [fault(setup, "killed", "gather", step=step, rank=1, process=1)]
    runs = {
        "host": partial(host, job(setup, workers=2, **options)),
        "connected": partial(group, connects, device=device),
        "kill": partial(group, connects, one_dies, device=device),
    }
    return facts | with_losses(setup, runs, {"kill": 1})


def inner_steps(setup: Setup) -> dict[str, Any]:
    """Killed in the middle of its inner steps."""
    options = {"model": "conv", "steps": setup.pick(8, 4), "inner_steps": 3}
    return with_a_kill(setup, options, step=3, rank=1, nth=5)


def staleness(setup: Setup) -> dict[str, Any]:
    """With delayed gradients, a lost worker's of the step before are computed again."""
    options = {"model": "conv", "steps": setup.pick(8, 4), "staleness": 1}
    return with_a_kill(setup, options, step=3, rank=1, nth=2)


def sharding(setup: Setup) -> dict[str, Any]:
    """A sharded optimizer on three workers: over Gloo and over the device's communicator, with a
    loss between its update and the commit, and restored from the parts that they have written. The
    bits are those of one worker whose optimizer is not sharded."""
    facts = share_the_gpu(setup)
    options = {"model": "conv", "steps": setup.pick(12, 8), "body_s": 0.05}
    # Otherwise its steps are counted on the host, of whose memory the simulated device knows
    # nothing.
    options |= {"fused": not setup.on_gpu}
    three = job(setup, workers=3, sharding="optimizer", **options)
    connects = dataclasses.replace(three, config=three.config | {"connects": True})
    connects = on_whole_gpus(setup, connects)
    device = None if setup.on_gpu else SimulatedDevice()
    with_checkpoints = dataclasses.replace(three, checkpoint=CheckpointConfig(every_steps=2))

    all_die = [fault(setup, f"all-{rank}", step=5, rank=rank) for rank in range(3)]
    one_dies = [fault(setup, "killed", "prepared", step=5, rank=1)]
    another_dies = [fault(setup, "connected", "gathered", step=5, rank=2)]
    runs = {
        "one": partial(group, job(setup, workers=1, **options)),
        "three": partial(group, three),
        "kill": partial(group, three, one_dies),
        "restore": partial(group, with_checkpoints, all_die, str(setup.folder / "run")),
        "connected": partial(group, connects, device=device),
        "connected, kill": partial(group, connects, another_dies, device=device),
    }
    outcomes, _ = together(setup, runs)
    lost = {name: outcomes[name].workers_lost for name in ("kill", "restore", "connected, kill")}
    if lost["kill"] != 1 or lost["restore"] < 3 or lost["connected, kill"] != 1:
        raise Wrong(f"the faults did not happen: {lost}")
    return facts | same({name: outcome.digest for name, outcome in outcomes.items()})


def on_whole_gpus(setup: Setup, spec: JobSpec) -> JobSpec:
    """Workers that connect their devices. See `share_the_gpu`."""
    whole_gpu = {"CPU": 1, **({"GPU": 1} if setup.on_gpu else {})}
    scaling = dataclasses.replace(spec.scaling, resources_per_worker=whole_gpu)
    return dataclasses.replace(spec, scaling=scaling)


def with_a_kill(setup: Setup, options: dict[str, Any], **where: Any) -> dict[str, Any]:
    """The same bits on one worker, on two, and on two of which one is killed in a backward pass.
    `where`: of its WorkerFault."""
    two = job(setup, workers=2, **options)
    runs = {
        "one": partial(group, job(setup, workers=1, **options)),
        "two": partial(group, two),
        "kill": partial(group, two, [fault(setup, "killed", **where)]),
    }
    return with_losses(setup, runs, {"kill": 1})


def with_losses(
    setup: Setup, runs: Mapping[str, Callable[[], Ended]], expected: Mapping[str, int]
) -> dict[str, Any]:
    """The same bits of all runs. `expected`: how many workers each of these loses, or more."""
    outcomes, _ = together(setup, runs)
    lost = {name: outcomes[name].workers_lost for name in expected}
    if any(lost[name] < least for name, least in expected.items()):
        raise Wrong(f"the faults did not happen: {lost}")
    return same({name: outcome.digest for name, outcome in outcomes.items()}) | {"lost": lost}


def fault(setup: Setup, name: str, point: str = "backward", **where: Any) -> WorkerFault:
    """Once in the run. `name`: of a file that says that it has happened."""
    return WorkerFault(point, once=str(setup.folder / name), **where)


def drain_one(run: ProcessRun) -> None:
    until = time.monotonic() + WAIT_S
    while run.controller.status()["step"] < 3 and not run.controller.ended.is_set():
        if time.monotonic() > until:
            raise Wrong(f"no steps: {run.controller.status()}")
        time.sleep(0.02)
    membership = run.controller.coordinator.membership
    if membership is not None:
        drained = membership.members[-1].worker
        run.controller.post(DrainNoticed(drained, time.monotonic() + 60.0))


def faults(setup: Setup) -> dict[str, Any]:
    """A device-side assert and too little memory in one member: it is lost, the others go on."""
    options = {"workers": 2, "steps": setup.pick(8, 5)}
    causes = {"assert": "device fault", "memory": "out of memory"}
    runs = {"undisturbed": partial(group, job(setup, **options))}
    for kind in causes:
        file = str(setup.folder / kind)
        runs[kind] = partial(group, job(setup, **options, fault=kind, fault_file=file))
    outcomes, journals = together(setup, runs)
    for kind, cause in causes.items():
        lost = [line for line in journals[kind] if line.get("event") == "WorkerLost"]
        if cause not in [line["cause"] for line in lost]:
            raise Wrong(f"{kind}: the cause {cause!r} is not in {lost}")
    lost_of = {kind: outcomes[kind].workers_lost for kind in causes}
    return same({name: outcome.digest for name, outcome in outcomes.items()}) | lost_of


def waits(setup: Setup) -> dict[str, Any]:
    """How often the host waits for the device in a step: once."""
    ends: list[int] = []  # of each step, in the list of warnings
    spec = job(setup, steps=setup.pick(40, 6))

    def noted(ctx: Any) -> None:
        log = ctx.log

        def mark(metrics: Any) -> None:
            ends.append(len(caught))
            if setup.on_gpu:
                torch.cuda.set_sync_debug_mode("warn" if len(ends) >= 3 else "default")

        ctx.log = mark
        train(ctx)
        ctx.log = log

    prepare_environment(os.environ, 1)
    data = open_data(spec.data, virtual_workers=VIRTUAL_WORKERS, pin=setup.on_gpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalRun(spec, data, setup.torch_device).run(noted)
    if not setup.on_gpu:
        return {}
    torch.cuda.set_sync_debug_mode("default")
    found = waits_for_the_device(caught, ends[2:])
    facts = setup.note(syncs_per_step=max(map(len, found), default=None))
    check_waits(found)
    return facts


def waits_for_the_device(caught: Sequence[Any], ends: Sequence[int]) -> list[list[str]]:
    """Where the host waits in each step. `ends`: of the steps, in `caught`."""
    words = "synchronizing CUDA operation"
    return [
        [f"{w.filename}:{w.lineno}" for w in caught[begin:end] if words in str(w.message)]
        for begin, end in itertools.pairwise(ends)
    ]


def check_waits(waits: Sequence[Sequence[str]]) -> None:
    for where in waits:
        if len(where) != 1:
            raise Wrong(f"the host waits {len(where)} times for the device in a step: {where}")


def attention(setup: Setup) -> dict[str, Any]:
    """Kernels of attention in an exact run: equal bits in repeated backward passes, and the time of
    a forward and backward pass, relative to torch's own choice."""
    device, facts = setup.torch_device, dict[str, Any]()
    for dtype in (torch.bfloat16, torch.float32):
        drawn = torch.randn(3, *setup.pick((4, 12, 1024, 64), (1, 2, 64, 16)), device=device)
        q, k, v = (x.requires_grad_() for x in drawn.to(dtype).unbind())

        def timed(times: int) -> Iterator[tuple[float, str, tuple[torch.Tensor, ...]]]:
            for _ in range(times):
                begin = time.perf_counter()
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023
                gradients = torch.autograd.grad(y.square().sum(), (q, k, v))  # noqa: B023
                gradients[0].sum().item()
                yield 1e3 * (time.perf_counter() - begin), type(y.grad_fn).__name__, gradients

        def named(all_passes: Sequence[Any]) -> tuple[str, float]:
            return all_passes[0][1], round(statistics.median(ms for ms, *_ in all_passes), 3)

        usual = named([*timed(setup.pick(30, 3))])
        because: list[str] = []
        with deterministic_kernels(True, because, device):
            exact = [*timed(setup.pick(50, 3))]
        facts |= setup.note(**{str(dtype): {"exact": named(exact), "usual": usual}})
        for _, kernel, gradients in exact:
            if not all(map(torch.equal, gradients, exact[0][2])):
                raise Wrong(f"{kernel} in {dtype} gives other bits each time")
        if because:
            raise Wrong(f"not exact in {dtype}: {because}")
    return facts


def step(setup: Setup) -> dict[str, Any]:
    """Steps of a GPT in bf16, compared with a plain loop: see gpu_step.py."""
    facts: dict[str, Any] = {}
    for one in gpu_step.measure_all(small=setup.small or not setup.on_gpu, limit_s=STEP_S):
        facts |= setup.note(**{one.pop("case"): one})
    whys = {name: one["why"] for name, one in facts.items() if "why" in one}
    if failed := {name: why for name, why in whys.items() if why != gpu_step.OUT_OF_TIME}:
        raise Wrong(f"not measured: {failed}")
    return facts


def compiled(setup: Setup, plain: str = "default", graphs: str = "reduce-overhead") -> Any:
    """`torch.compile` beside eager, in the mode `plain` and in one that replays CUDA graphs: nearly
    the same loss, and the same bits with graphs as without."""
    modes: dict[str, dict[str, Any] | None] = {"eager": None}
    modes |= {name: {"mode": name} for name in (plain, graphs)}
    if not setup.on_gpu:  # without a C++ compiler
        modes = {"eager": None, "aot_eager": {"backend": "aot_eager"}}
    losses, digests = {}, {}
    for name, how in modes.items():
        torch._dynamo.reset()
        run = alone(setup, job(setup, steps=setup.pick(10, 4), compile=how))
        losses[name], digests[name] = float(run.logged[-1]["loss"]), run.digest
        setup.note(**{name: f"{losses[name]:.6f}", f"digest of {name}": run.digest[:16]})
    for name, loss in losses.items():
        if abs(loss - losses["eager"]) > 0.02 * abs(losses["eager"]):
            raise Wrong(f"the loss of {name} is {loss}, of eager {losses['eager']}")
    facts: dict[str, Any] = {name: f"{loss:.6f}" for name, loss in losses.items()}
    if graphs in digests:
        facts["equal_with_graphs"] = digests[graphs] == digests[plain]
        # Whoever measures its kernels may choose others the next time.
        if plain == "default" and not facts["equal_with_graphs"]:
            raise Wrong(f"CUDA graphs change bits: {digests}; losses {losses}")
    return facts


def snapshot(setup: Setup) -> dict[str, Any]:
    """Take 20 GB twice, into memory that was made ready before, as a worker does it."""
    nbytes = setup.pick(20 << 30, 32 << 20)
    device = setup.torch_device
    if setup.on_gpu:
        nbytes = min(nbytes, int(0.8 * torch.cuda.mem_get_info()[0]))
    tree = {f"tensor-{i}": torch.full((nbytes // 80,), float(i), device=device) for i in range(20)}
    snapshot, facts = Snapshot(), setup.note(gb=round(nbytes / 1e9, 1))
    resident = memory_used()
    snapshot.take(-1, tree, most_new=-1)
    facts |= setup.note(**making_ready(snapshot, device))
    for step, name in enumerate(("first", "second"), 1):
        if setup.on_gpu:
            torch.cuda.synchronize()
        begun_at = time.perf_counter()
        snapshot.take(step, tree)
        taken_at = time.perf_counter()
        snapshot.memory.copies.wait()
        arrived_at = time.perf_counter()
        facts[f"{name}_stall_s"] = round(taken_at - begun_at, 3)
        facts[f"{name}_copy_s"] = round(arrived_at - begun_at, 3)
        if step == 1:
            facts["host_memory_ratio"] = round((memory_used() - resident) / nbytes, 2)
            facts["registered_gb"] = round(snapshot.memory.copies.registered_bytes / 1e9, 1)
        setup.note(**facts)
    sampled = snapshot.memory.content.view(torch.float32)[::1021].clone()
    least = 0.99 * (nbytes // 80) / 1021
    if not all(int((sampled == float(i)).sum()) >= least for i in range(20)):
        raise Wrong("the snapshot does not hold the state")
    snapshot.memory.close()
    waits = ("first_stall_s", "second_stall_s", "longest_kernel_meanwhile_s")
    if setup.on_gpu and not setup.small and max(facts[name] for name in waits) > STALL_S:
        raise Wrong(f"a step waits for a snapshot: {facts}")
    return facts


def making_ready(snapshot: Snapshot, device: torch.device) -> dict[str, Any]:
    """For how long, and what it keeps waiting: the longest of many small kernels meanwhile."""
    thread = threading.Thread(target=snapshot.memory.make_ready)
    small, longest = torch.ones(64, device=device), 0.0
    begun_at = time.perf_counter()
    thread.start()
    while thread.is_alive():
        at = time.perf_counter()
        small.add_(1).sum().item()
        longest = max(longest, time.perf_counter() - at)
    thread.join()
    return {
        "ready_s": round(time.perf_counter() - begun_at, 2),
        "longest_kernel_meanwhile_s": round(longest, 3),
    }


def memory_used() -> int:
    """Resident bytes of this process."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# ------------------------------------------------------------------------ communicators of devices


def accelerator_for(setup: Setup) -> Accelerator:
    """The GPU, or a simulated device."""
    if not setup.on_gpu:
        return SimulatedAccelerator(SimulatedDevice(reports_failures=True))
    torch.cuda.set_device(0)
    return CudaAccelerator(torch.device("cuda", 0))


def connected(accelerator: Accelerator, rank: int = 0, size: int = 1, store: Any = None) -> Any:
    """A communicator, made and connected as a generation does it."""
    set_nccl_environment(os.environ)
    store = dist.HashStore() if store is None else store
    communicator = accelerator.communicator(store, rank, size, 60.0)
    communicator.connect(lambda: None)
    return communicator


def settle(accelerator: Accelerator) -> None:
    """Wait until the device has done all that this thread has launched."""
    event = accelerator.record()
    while not event.query():
        time.sleep(0.0005)


def spin(setup: Setup, accelerator: Any, seconds: float) -> None:
    """Keep the device busy, and return at once."""
    if setup.on_gpu:
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        accelerator.stream.put(partial(time.sleep, seconds))


def abort(setup: Setup) -> dict[str, Any]:
    """While the device spins: what another thread's copy to the host keeps waiting, and whether an
    abort gets through."""
    device, accelerator = torch.device(setup.device, 0), accelerator_for(setup)
    communicator, value = connected(accelerator), torch.ones(1 << 20, device=device)
    communicator.all_reduce(value).wait()
    settle(accelerator)
    facts: dict[str, float] = {}
    begun_at = time.perf_counter()
    spin(setup, accelerator, setup.pick(6.0, 0.5))
    communicator.all_reduce(value)
    copied = threading.Thread(target=value.cpu)
    copied.start()
    time.sleep(0.3)
    acts: dict[str, Callable[[], Any]] = {
        "allocate": lambda: torch.empty(1 << 24, device=device),
        "query": lambda: accelerator.record().query(),
        "failure": communicator.failure,
        "launch": partial(launch_aside, setup, device),
        "abort": communicator.abort,
    }
    for name, act in acts.items():
        at = time.perf_counter()
        act()
        facts |= setup.note(**{f"{name}_s": round(time.perf_counter() - at, 4)})
    copied.join()
    facts |= setup.note(spin_and_copy_s=round(time.perf_counter() - begun_at, 2))
    # To free memory, CUDA may wait for the kernels of all streams, and so may an abort.
    late = [name for name in ("query_s", "failure_s") if facts[name] > 3.0]
    if late or facts["abort_s"] > ABORT_LIMIT_S:
        raise Wrong(f"blocked by a host copy behind a spinning kernel: {late or 'abort_s'}")
    return facts


def launch_aside(setup: Setup, device: torch.device) -> None:
    if not setup.on_gpu:
        torch.ones(64).add_(1)
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.ones(64, device=device).add_(1)


def free_bytes(setup: Setup) -> int:
    """Return the free memory of the device; a simulated one has the host's."""
    return torch.cuda.mem_get_info()[0] if setup.on_gpu else -memory_used()


def communicators(setup: Setup) -> dict[str, Any]:
    """The first and the second communicator, in time and memory, and many more, for leaks."""
    accelerator, value = accelerator_for(setup), torch.ones(8, device=setup.device)
    facts: dict[str, Any] = {}
    free, kept = free_bytes(setup), []
    for name in ("first", "second"):
        at = time.perf_counter()
        kept.append(connected(accelerator))
        facts |= setup.note(**{f"{name}_s": round(time.perf_counter() - at, 3)})
        before, free = free, free_bytes(setup)
        facts |= setup.note(**{f"{name}_mb": (before - free) >> 20})
    if failures := [one.failure() for one in kept if one.failure() is not None]:
        raise Wrong(f"a communicator that works reports {failures}")
    for communicator in kept:
        communicator.abort()
    kept.clear()
    before = free_bytes(setup)
    begun_at, rounds = time.perf_counter(), 0
    while rounds < setup.pick(50, 5) and time.perf_counter() < begun_at + ROUNDS_S:
        communicator = connected(accelerator)
        communicator.all_reduce(value).wait()
        settle(accelerator)
        communicator.abort()
        del communicator
        rounds += 1
    leaked = before - free_bytes(setup)
    facts |= setup.note(rounds=rounds, leaked_mb=leaked >> 20)
    facts |= setup.note(round_s=round((time.perf_counter() - begun_at) / rounds, 3))
    if leaked > 64 << 20:
        raise Wrong(f"communicators leak {leaked >> 20} MB")
    return facts | {"blocking_s": blocking_s() if setup.on_gpu else None}


def blocking_s() -> float:
    """For how long a communicator connects that blocks meanwhile, as torch's default does."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 1
    begun_at = time.perf_counter()
    backend = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    backend.allreduce([torch.ones(8, device="cuda")]).wait()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - begun_at, 3)
    backend.abort()
    return seconds


def share_the_gpu(setup: Setup) -> dict[str, Any]:
    """Let several ranks of NCCL use one GPU, in processes that start from now on."""
    if not setup.on_gpu:
        return {}
    if tuple(torch.cuda.nccl.version()) >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        return setup.note(ranks_by="NCCL_MULTI_RANK_GPU_ENABLE")
    # An older NCCL takes ranks of one host with one GPU for a mistake. So each says that it is on a
    # host of its own, and they exchange over sockets, as between nodes.
    os.environ |= {_OWN_HOST: "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return setup.note(ranks_by="NCCL_HOSTID")


_OWN_HOST = "GPU_CHECK_OWN_HOST"


def be_another_host() -> None:
    """See `share_the_gpu`. Before this process uses NCCL."""
    if _OWN_HOST in os.environ:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"


class AnotherHost:
    """A part of a job. Each process of a worker unpickles it before it uses NCCL."""

    def __init__(self) -> None:
        self.name = "its own"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        be_another_host()


def several_ranks(setup: Setup) -> dict[str, Any]:
    """Two ranks of one communicator on this GPU, one of which is killed: the other notices, aborts
    while a thread copies from behind the collective, and works on."""
    facts = share_the_gpu(setup)
    context = torch.multiprocessing.get_context("spawn")
    # A queue each: one that two write to stays locked if one of them is killed in a put.
    port, told = context.Value("i", 0), [context.Queue() for _ in range(2)]
    ranks = [
        context.Process(target=one_rank, args=(rank, setup, port, queue_of_rank))
        for rank, queue_of_rank in enumerate(told)
    ]
    for process in ranks:
        process.start()

    def hear(rank: int, limit_s: float) -> Any:
        until = time.monotonic() + limit_s
        while True:
            statuses = [process.exitcode for process in ranks]
            with contextlib.suppress(queue.Empty):
                return told[rank].get(timeout=0.5)
            if any(status not in (None, 0, -signal.SIGKILL) for status in statuses):
                raise Wrong(f"a rank has ended: exit statuses {statuses}")
            if time.monotonic() > until:
                raise Wrong(f"no word in {limit_s:g} s; exit statuses {statuses}")

    sums = [hear(rank, 60.0) for rank in range(2)]
    ranks[1].kill()
    facts |= hear(0, 30.0)
    ranks[0].join(10.0)
    if sums != [3.0, 3.0] or ranks[0].exitcode != 0 or facts["after"] != 1.0:
        raise Wrong(f"the sums are {sums}, the survivor ended with {ranks[0].exitcode}")
    if setup.on_gpu and facts["failure"] is None:
        raise Wrong("NCCL does not report that its peer is gone")
    if facts["abort_s"] > ABORT_LIMIT_S:
        raise Wrong(f"an abort takes {facts['abort_s']} s")
    return facts | {"sums": sums}


def one_rank(rank: int, setup: Setup, port: Any, told: Any) -> None:
    be_another_host()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
    else:
        while not port.value:
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", port.value, is_master=False)
    accelerator = accelerator_for(setup)
    at = time.perf_counter()
    communicator = connected(accelerator, rank, 2, store)
    setup.note(**{f"connect_{rank}_s": round(time.perf_counter() - at, 3)})
    value = torch.full((1 << 20,), rank + 1.0, device=setup.device)
    at = time.perf_counter()
    communicator.all_reduce(value).wait()
    settle(accelerator)
    setup.note(**{f"sum_{rank}_s": round(time.perf_counter() - at, 3)})
    told.put(float(value[0]))
    if rank == 1:
        time.sleep(60.0)  # until it is killed
    communicator.all_reduce(value).wait()  # its peer never comes
    copied = threading.Thread(target=value.cpu)
    copied.start()
    at = time.monotonic()
    until = at + setup.pick(10.0, 1.0)
    while (failure := communicator.failure()) is None and time.monotonic() < until:
        time.sleep(0.01)
    facts = setup.note(failure=failure, noticed_s=round(time.monotonic() - at, 3))
    at = time.perf_counter()
    communicator.abort()
    facts |= setup.note(abort_s=round(time.perf_counter() - at, 3))
    copied.join()
    settle(accelerator)
    again, one = connected(accelerator), torch.ones(1, device=setup.device)
    again.all_reduce(one).wait()
    settle(accelerator)
    told.put(facts | setup.note(after=float(one[0])))
    told.close()
    told.join_thread()
    os._exit(0)


def connected_run(setup: Setup) -> dict[str, Any]:
    """Whole runs of two workers whose gradients use the device's communicator: undisturbed, and
    with a kill while it is used. Their bits are those over Gloo."""
    facts = share_the_gpu(setup)
    options = {"workers": 2, "steps": setup.pick(40, 24), "body_s": setup.pick(0.1, 0.05)}
    spec = job(setup, **options)
    connects = dataclasses.replace(spec, config=spec.config | {"connects": True})
    connects = on_whole_gpus(setup, connects)
    device = None if setup.on_gpu else SimulatedDevice()
    one_dies = [fault(setup, "killed", "gather", step=options["steps"] // 2, rank=1)]
    runs = {
        "Gloo": partial(group, spec),
        "connected": partial(group, connects, device=device),
        "kill": partial(group, connects, one_dies, device=device),
    }
    outcomes, _ = together(setup, runs)
    if outcomes["kill"].workers_lost != 1:
        raise Wrong(f"{outcomes['kill'].workers_lost} workers were lost, and one was killed")
    return facts | same({name: outcome.digest for name, outcome in outcomes.items()})


def pause(setup: Setup) -> dict[str, Any]:
    """From the SIGKILL of one of three workers to the next step that the others commit: while they
    use the device's communicator, over Gloo on the same GPU, and on CPUs. The communicator is
    aborted off the way: the pause is shorter than that takes."""
    facts = share_the_gpu(setup)
    device = None if setup.on_gpu else SimulatedDevice(abort_s=ABORT_S, reports_failures=True)
    on_cpus = dataclasses.replace(setup, device="cpu")
    cases: dict[str, tuple[Setup, dict[str, Any], SimulatedDevice | None]] = {
        "connected": (setup, {"connects": True}, device),
        "gloo": (setup, {}, None),
        **({"cpu": (on_cpus, {}, None)} if setup.on_gpu else {}),
    }
    for name, (where, how, simulated) in cases.items():
        folder = setup.folder / name
        folder.mkdir()
        files = [str(folder / f"kill-{i}") for i in range(2)]
        dies: dict[str, Any] = {"rank": 1, "world_size": 3, "settled": True}
        kills = tuple(
            WorkerFault("gather", once=file, after=tuple(files[:i]), **dies)
            for i, file in enumerate(files)
        )
        spec = job(where, workers=3, steps=100_000, body_s=0.02, kills=files, **how)
        spec = dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, min_workers=2))
        spec = on_whole_gpus(setup, spec) if how else spec
        outcome, _ = group(spec, kills, device=simulated)
        if outcome.workers_lost != len(files):
            raise Wrong(f"{name}: {outcome.workers_lost} of {len(files)} workers were lost")
        facts |= setup.note(**{f"{name}_ms": [pause_ms(folder, Path(file)) for file in files]})
    if max(facts["connected_ms"]) > 1e3 * ABORT_S:
        raise Wrong(f"the pause contains an abort: {facts}")
    return facts


def pause_ms(folder: Path, kill: Path) -> int:
    """From the kill, before which this file was written, to the first body of a later
    generation."""
    died_in, at_ns = int(kill.read_text()), kill.stat().st_mtime_ns
    lines = [line.split() for path in folder.glob("bodies-*") for line in path.open()]
    return round((min(int(ns) for ns, g in lines if int(g) > died_in) - at_ns) / 1e6)


_PRECISIONS = (None, "bf16", "fp16")
_EXACT = {
    f"exact-{model}-{precision or 'fp32'}": Check(
        partial(exact, model=model, precision=precision), 70.0
    )
    for precision in _PRECISIONS
    for model in ("gpt", "conv")
}
_WITH_AUTOTUNE: Any = {"plain": "max-autotune-no-cudagraphs", "graphs": "max-autotune"}

# In this order: what no simulation can tell comes first.
CHECKS: dict[str, Check] = {
    "environment": Check(environment, 60.0),
    "step": Check(step, 150.0),
    "attention": Check(attention, 60.0),
    "abort": Check(abort, 60.0),
    "communicators": Check(communicators, 80.0),
    "several-ranks": Check(several_ranks, 90.0),
    "connected-run": Check(connected_run, 110.0),
    "pause": Check(pause, 150.0),
    "exact-gpt-fp32": _EXACT["exact-gpt-fp32"],
    "exact-conv-fp32": _EXACT["exact-conv-fp32"],
    "faults": Check(faults, 80.0),
    "changes": Check(changes, 110.0),
    "inner-steps": Check(inner_steps, 110.0),
    "staleness": Check(staleness, 110.0),
    "sharding": Check(sharding, 110.0),
    "gangs": Check(gangs, 110.0),
    "snapshot": Check(snapshot, 80.0),
    "waits": Check(waits, 60.0),
    "compile": Check(compiled, 140.0),
    "gangs-over-nccl": Check(gangs_over_nccl, 110.0),
    **_EXACT,
    "compile-max-autotune": Check(partial(compiled, **_WITH_AUTOTUNE), 140.0),
}
