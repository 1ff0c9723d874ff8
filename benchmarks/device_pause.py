"""What slow communicators add to the pause: runs on a simulated device whose communicators take 3 s
to connect, in turns with runs where they stand at once.

    python -m benchmarks.device_pause [--rounds 4] [--kills 3]

Three workers are plain processes (no Ray) on the simulated device. A worker gets SIGKILL, by turns
when the communicator carries the gradients and before that may be; its replacement joins by a
planned end. The pause of a kill lasts from the kill to the first step that
all members of the next generation have committed, the pause of a join from the last step of the old
generation. Weights are compared with those of an undisturbed run. Target: the medians differ by at
most 20 ms. Ends with 1, and names the target, if it is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.report import each, exit_code
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.local_run import LocalRun

WORKERS, VIRTUAL = 3, 6
SLOW_S, TARGET_MS = 3.0, 20.0
CALM_STEPS = 20  # of a generation before the next kill


class Points(torch.utils.data.Dataset):
    """Row i is a function of i alone."""

    def __len__(self) -> int:
        return 32_000

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:4].argmax()}


def train(ctx: Any) -> None:
    """Each commit leaves a line, with whether the communicator carries the gradients by now."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session, folder = ctx._session, ctx.config["folder"]

    def loss_fn(m: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(ctx.config["leaf_s"])  # a step of about 10 ms, most of it without the processor
        return F.cross_entropy(m(batch["x"]), batch["y"])

    with open(f"{folder}/{session.worker}", "a", buffering=1) as log:
        for step in ctx.steps(model, optimizer, loss_fn):
            main = session._groups.main
            on_device = None if main is None else main.on_device
            used = int(on_device is not None and on_device.switched)
            where = f"{session.generation} {session.world_size}"
            log.write(f"{step.number} {time.time():.6f} {where} {used}\n")


class Commit(NamedTuple):
    step: int
    time: float
    generation: int
    world_size: int
    used: bool  # the communicator


def commits_of(folder: str) -> list[Commit]:
    """The steps of all workers, in the order of time."""
    found = [
        Commit(int(step), float(at), int(generation), int(size), used == "1")
        for path in Path(folder).iterdir()
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
        for step, at, generation, size, used in [line.split()]
    ]
    return sorted(found, key=lambda commit: commit.time)


def job(folder: str) -> JobSpec:
    return JobSpec(
        name="device-pause",
        data=MapStyleData(Points(), micro_batch_size=1),
        config={"folder": folder, "leaf_s": 0.004},
        scaling=ScalingConfig(
            min_workers=1,
            max_workers=WORKERS,
            virtual_workers=VIRTUAL,
            threads_per_worker=1,
            balance="equal",
            stabilization_s=0.0,
        ),
        max_steps=1_000_000,
    )


def measure(connect_s: float, strikes: Sequence[bool]) -> dict[str, Any]:
    """A run with a kill for each strike, which tells whether the communicator must be used by then.
    Returns its pauses in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        struck: list[float] = []
        generation = 0
        device = SimulatedDevice(connect_s=connect_s)
        with ProcessRun(job(folder), train, device=device) as run:
            for number, used in enumerate(strikes):
                generation = _wait_full(folder, generation, used=used)
                members = run.controller.coordinator.membership.members
                struck.append(time.time())
                run.worker_group.processes[members[number % WORKERS].worker].kill()
            _wait_full(folder, generation, used=strikes[-1])
            run.controller.post(StopRequested("measured"))
            outcome = run.wait()
        assert outcome.error is None, outcome.traceback
        commits = commits_of(folder)
        same = outcome.digest == undisturbed(outcome.step)
    return {"same": same, "used": sum(c.used for c in commits), **pauses(commits, struck)}


def pauses(commits: list[Commit], struck: list[float]) -> dict[str, list[float]]:
    first: dict[int, float] = {}  # generation -> when all members have committed its first step
    last: dict[int, float] = {}
    step: dict[int, int] = {}
    size: dict[int, int] = {}
    for commit in commits:
        g = commit.generation
        step.setdefault(g, commit.step)
        if commit.step == step[g]:
            first[g] = commit.time
        last[g], size[g] = commit.time, commit.world_size
    kills, joins = [], []
    order = sorted(first)
    for before, after in itertools.pairwise(order):
        # Of one generation, however late a survivor commits the step in flight.
        strokes = [at for at in struck if first[before] < at < first[after]]
        if strokes and size[after] < size[before]:
            kills.append(first[after] - strokes[-1])
        elif size[after] > size[before] > 1:
            joins.append(first[after] - last[before])
    return {"kills": kills, "joins": joins}


def undisturbed(steps: int) -> str:
    from elastic_dp.data import open_data

    with tempfile.TemporaryDirectory() as folder:
        config = {"folder": folder, "leaf_s": 0.0}
        spec = dataclasses.replace(job(folder), max_steps=steps, config=config)
        run = LocalRun(spec, open_data(spec.data, virtual_workers=VIRTUAL), torch.device("cpu"))
        run.run(train)
        return run.digest


def _wait_full(folder: str, after: int, *, used: bool) -> int:
    """Waits until a later generation, of all workers, has made its steps, and uses its
    communicator if `used`. Returns its number."""
    limit = time.monotonic() + 150.0
    while time.monotonic() < limit:
        commits = commits_of(folder)
        newest = max((c.generation for c in commits), default=0)
        own = [c for c in commits if c.generation == newest and c.used >= used]
        if (
            newest > after
            and own
            and own[-1].world_size == WORKERS
            and own[-1].step - own[0].step >= CALM_STEPS
        ):
            return newest
        time.sleep(0.02)
    raise TimeoutError("the run did not come to its full size")


def pieces(rounds: int, kills: int) -> Iterator[tuple[str, Any]]:
    found: dict[float, list[dict[str, Any]]] = {0.0: [], SLOW_S: []}
    strikes = [number % 2 == 0 for number in range(kills)]
    for number in range(rounds):
        for connect_s in (0.0, SLOW_S) if number % 2 else (SLOW_S, 0.0):
            found[connect_s].append(measure(connect_s, strikes))
    for connect_s, runs in found.items():
        name = f"connecting takes {connect_s:g} s"
        yield (
            name,
            {kind: _summary([p for r in runs for p in r[kind]]) for kind in KINDS}
            | {"same_weights": all(r["same"] for r in runs)},
        )


KINDS = ("kills", "joins")


def _summary(seconds: list[float]) -> dict[str, Any]:
    ms = sorted(1e3 * s for s in seconds)
    return {
        "count": len(ms),
        "median_ms": round(statistics.median(ms), 1),
        "max_ms": round(ms[-1], 1),
    }


def targets(results: dict[str, Any]) -> dict[str, bool]:
    fast, slow = (results[f"connecting takes {s:g} s"] for s in (0.0, SLOW_S))
    found = {
        f"{kind}: at most {TARGET_MS:g} ms more": (
            slow[kind]["median_ms"] - fast[kind]["median_ms"] <= TARGET_MS
        )
        for kind in KINDS
    }
    return found | {
        "the weights of the undisturbed run": all(r["same_weights"] for r in (fast, slow))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    results = each("device_pause", pieces(asked.rounds, asked.kills), keep=not asked.no_write)
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
