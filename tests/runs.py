"""Whole runs on plain processes, for tests: small jobs whose data is made from nothing, and how to drive them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_dp.cluster.controller import Outcome
from elastic_dp.cluster.process_fleet import ProcessRun
from elastic_dp.data import open_data
from elastic_dp.protocol.messages import Event, SizeRequested
from elastic_dp.spec import FailureConfig, JobSpec, MapStyleData, ScalingConfig
from elastic_dp.train.faults import Fault
from elastic_dp.train.run import LocalRun


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
    virtual: int = 8,
    rows: int = 192,
    shape: Sequence[int] = (),
    micro_batch_size: int = 4,
    tail: Any = "drop",
    exact: bool = True,
    config: dict[str, Any] | None = None,
    **scaling: Any,
) -> JobSpec:
    scaling.setdefault("min_workers", 1)
    return JobSpec(
        name="test",
        data=MapStyleData(Points(rows, shape=shape), micro_batch_size=micro_batch_size, tail=tail),
        config=config or {},
        scaling=ScalingConfig(
            max_workers=workers, virtual_workers=virtual, threads_per_worker=1, **scaling
        ),
        failure=FailureConfig(heartbeat_timeout_s=4.0, release_timeout_s=3.0),
        exact=exact,
        max_steps=steps,
    )


def local(spec: JobSpec, train: Callable[..., None]) -> LocalRun:
    """The undisturbed run, in this process."""
    data = open_data(spec.data, virtual_workers=spec.scaling.num_virtual_workers)
    run = LocalRun(spec, data, torch.device("cpu"))
    run.run(train)
    return run


def group(
    spec: JobSpec,
    train: Callable[..., None],
    *,
    faults: tuple[Fault, ...] = (),
    script: Sequence[tuple[int, Event | Callable[[ProcessRun], None]]] = (),
    timeout_s: float = 90.0,
) -> tuple[Outcome, ProcessRun]:
    """A run on processes. `script`: at (or after) a step, post an event or call something with the run."""
    with ProcessRun(spec, train, faults=faults) as run:
        until = time.monotonic() + timeout_s
        for step, action in script:
            while run.controller.status()["step"] < step and not run.controller.ended.is_set():
                assert time.monotonic() < until, run.controller.status()
                time.sleep(0.01)
            if isinstance(action, Event):
                run.controller.post(action)
            else:
                action(run)
        return run.wait(max(1.0, until - time.monotonic())), run


def resize(step: int, size: int) -> tuple[int, Event]:
    return step, SizeRequested(size)
