"""Whole runs on plain processes, for tests: small jobs whose data is made from nothing, and how to
drive them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from elastic_dp import ElasticTrainer, Result
from elastic_dp.checkpoint import uploader
from elastic_dp.config import FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import Event, SizeRequested, WorkerId, WorkerLocation
from elastic_dp.data import open_data
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.run_record import RunOutcome
from elastic_dp.testing.process_worker_group import ProcessRun, preload
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.local_run import LocalRun
from tests.kit.simulated_device import SimulatedDevice
from tests.patience import eventually
from tests.short_plans import short_plans

# A worker imports the module of a test that its train function comes from, and so these.
preload("pytest", "hypothesis", "pandas", "elastic_dp.cluster.run_handle")
preload("tests.short_plans_of_workers", __name__)

ENDLESS = 1_000_000  # steps: until it is stopped
# A worker that gets no processor for a while is not dead. Who is killed is known to be at once.
PATIENT = FailureConfig(heartbeat_timeout_s=30.0)


OF_A_JOB = frozenset(one.name for one in fields(JobSpec))


class Points(torch.utils.data.Dataset):
    """`rows` points with a class each; row i is a function of i alone."""

    def __init__(self, rows: int = 192, features: int = 16, shape: Sequence[int] = ()) -> None:
        self.rows, self.shape = rows, tuple(shape) or (features,)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": (x.flatten()[:4].argmax()).long(), "i": torch.tensor(i)}


def spec_of(
    *,
    steps: int = 12,
    workers: int = 3,
    virtual: int | dict[int, int] = 8,
    rows: int = 192,
    shape: Sequence[int] = (),
    micro_batch_size: int = 4,
    tail: Any = "drop",
    **options: Any,
) -> JobSpec:
    """A job with these fields of `JobSpec`, and of its `ScalingConfig`."""
    data = MapStyleData(Points(rows, shape=shape), micro_batch_size=micro_batch_size, tail=tail)
    given: dict[str, Any] = {"data": data, "failure": PATIENT, "max_steps": steps}
    given |= {name: options.pop(name) for name in [*options] if name in OF_A_JOB}
    scaling = {"min_workers": 1, "threads_per_worker": 1} | options
    scaling |= {"max_workers": workers, "virtual_workers": virtual}
    return JobSpec(name="test", scaling=ScalingConfig(**scaling), **given)


def fit(train: Callable[..., None], folder: Any, steps: int, **options: Any) -> Result:
    """Train until step `steps` of the run in this folder, in this process."""
    virtual = options.pop("virtual", 2)
    made: dict[str, Any] = {
        "name": "run",
        "storage_path": str(folder),
        "data": MapStyleData(Points(), micro_batch_size=4),
        "scaling": ScalingConfig(max_workers=2, virtual_workers=virtual),
        "max_steps": steps,
    }
    return ElasticTrainer(train, **made | options).fit(local=True)


def local(
    spec: JobSpec,
    train: Callable[..., None],
    url: str | None = None,
    on_say: Callable[[str], object] | None = None,
) -> LocalRun:
    """The undisturbed run, in this process."""
    with short_plans():
        data = open_data(spec.data, virtual_workers=spec.micro_batches_by_step)
        run = LocalRun(spec, data, torch.device("cpu"), url=url, on_say=on_say)
        run.run(train)
        return run


def warnings_of(train: Callable[..., None], steps: int = 4, **options: Any) -> list[str]:
    """What a run of one worker, in this process, warns of."""
    heard: list[str] = []
    local(spec_of(steps=steps, workers=1, virtual=2, **options), train, on_say=heard.append)
    return [text for text in heard if "WARNING" in text]


def group(
    spec: JobSpec,
    train: Callable[..., None],
    *,
    faults: tuple[WorkerFault, ...] = (),
    script: Sequence[tuple[int, Event | Callable[[ProcessRun], None]]] = (),
    timeout_s: float = 240.0,
    index: Index | None = None,
    url: str | None = None,
    device: SimulatedDevice | None = None,
    location: Callable[[WorkerId], WorkerLocation] | None = None,
    fails: bool = False,
    **where: Any,
) -> tuple[RunOutcome, ProcessRun]:
    """A run on processes. `script`: at (or after) a step, post an event or call something with the
    run. `timeout_s`: for what comes behind it. `device`: what the workers compute on; any test of
    this module's runs on a simulated one with ELASTIC_DP_SIMULATED_DEVICE=1 in the environment.
    `location`: where each worker claims to run. Only a run that `fails` may end with an error.
    `where`: see `ProcessRun`."""
    if device is None and os.environ.get("ELASTIC_DP_SIMULATED_DEVICE"):
        device = SimulatedDevice()
    if device is not None:
        where["host_of"] = device.host_of
    with ProcessRun(
        spec, train, faults=faults, index=index, url=url, location=location, **where
    ) as run:
        for step, action in script:
            eventually(lambda s=step: reached(run, s), run.controller.status)
            if isinstance(action, Event):
                run.controller.post(action)
            else:
                action(run)
        outcome = run.wait(timeout_s)
    assert fails or outcome.error is None, f"{outcome.error}\n{outcome.traceback}"
    return outcome, run


def reached(run: ProcessRun, step: int) -> bool:
    return run.controller.status()["step"] >= step or run.controller.ended.is_set()


def goes_on(run: ProcessRun, steps: int = 1) -> None:
    status = run.controller.status
    until = status()["step"] + steps
    eventually(lambda: status()["step"] >= until or run.controller.ended.is_set(), status)


def at_size(size: int) -> Callable[[ProcessRun], None]:
    """Wait until so many workers train, and make steps."""

    def wait(run: ProcessRun) -> None:
        status = run.controller.status
        eventually(lambda: (status()["world_size"], status()["phase"]) == (size, "running"), status)
        goes_on(run)

    return wait


def in_turn(
    deaths: Iterable[dict[str, Any]], folder: Path, **common: Any
) -> tuple[WorkerFault, ...]:
    """Each of these faults happens in a generation after the one before."""
    faults: list[WorkerFault] = []
    for number, death in enumerate(deaths):
        before = tuple(str(fault.once) for fault in faults)
        once = str(folder / f"fault-{number}")
        faults.append(WorkerFault(**common, **death, once=once, after=before))
    return tuple(faults)


def scaled(spec: JobSpec, **changes: Any) -> JobSpec:
    """Return the job with these other fields of `ScalingConfig`."""
    return replace(spec, scaling=replace(spec.scaling, **changes))


def lines_of(run: ProcessRun) -> list[dict[str, Any]]:
    """Return the lines of its journal, from a copy, since the run may go on meanwhile."""
    return [line for *_, line in list(run.journal._kept)]


def formed_of(run: ProcessRun) -> list[int]:
    """Return the numbers of the generations that were formed, in order. Some may be left out: a
    controller that hears no worker for a second claims one to confirm that it leads."""
    formed = [line for line in lines_of(run) if line.get("command") == "FormGeneration"]
    return sorted({line["generation"] for line in formed})


def losses_of(run: ProcessRun) -> str:
    """Return which workers were lost, and why, for a message."""
    lost = ("WorkerLost", "WorkerFailed", "EvictWorker")
    return "\n".join(
        str(line) for line in lines_of(run) if {line.get("event"), line.get("command")} & {*lost}
    )


def texts_of(run: ProcessRun) -> list[str]:
    return [line["text"] for line in lines_of(run) if line.get("command") == "Explain"]


def never_put_off(train: Callable[..., None]) -> Callable[..., None]:
    """No checkpoint comes later than it is due since the one before is still being written, however
    busy the machine is."""

    def patient(ctx: Any) -> None:
        uploader.PATIENCE_S = 1000.0
        train(ctx)

    return patient


def resize(step: int, size: int) -> tuple[int, Event]:
    return step, SizeRequested(size)
