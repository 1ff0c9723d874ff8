"""Inner steps (DiLoCo) under kills over a slow link, beside torchft's DiLoCo.

    python -m benchmarks.diloco_kills [--kills 6] [--size 0.9M] [--quick]

Two workers are on two [hosts](slow_link.py), which needs root and Debian's iproute2; the link is
one of 1 Gb/s and 25 ms. Each is an island of its own, and makes 8 inner steps of AdamW between two
exchanges. In turn, one of them gets SIGKILL at a random instant of a round, and a replacement
starts on its host; the next kill comes when both have made a few rounds together. Both systems
train the same GPT on random tokens, with the same number of rows. Ours runs in plain processes (no
Ray) that are forked from one which has imported torch, as a warm process of a run has; torchft as
`benchmarks/peers/torchft_diloco.py` has it, looked for as `benchmarks/peers/__init__.py` says.

Read from files with the instant of each inner step and commit, for each kill:

- lost: inner steps that were made and never committed. Ours: those beyond the 16 of a step.
  torchft: what a replica made since its last commit. The first round of a new one counts as
  committed, though its state is replaced at the end of it.
- still: the longest time in which the survivor began no inner step, up to the first one behind its
  next commit; beside it that of a round without a kill.
- whole: from the kill until both have committed together again.
- cost: what both could have trained in that time. From the last commit before the kill to the
  commit that makes them whole, less the inner steps that were committed meanwhile at the pace of
  rounds without a kill.

With one worker left ours runs both islands in turn, and torchft one: there an outer step of ours
is of the same rows as ever, and one of torchft's of half of them. Ends with 1 if a kill cost ours
as many inner steps as a whole step has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.models import GPT, SIZES, Text, loss_fn
from benchmarks.report import add_quick, each, exit_code
from benchmarks.slow_link import DEVICE, Host, hosts
from benchmarks.step_overhead import ROWS
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import JobSpec, MapStyleData, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun

WORKERS, INNER_STEPS, CALM = 2, 8, 3  # CALM: rounds of both before a kill
RATE_BITS_S, DELAY_S = 1e9, 0.025
WITHIN_S = 2.0  # some two rounds
PATIENCE_S = 120.0
PEER = "torchft 0.2, tuned"


class Line(NamedTuple):
    """A worker began an inner step ("pass"), or committed ("commit"). `number`: ours: the step.
    torchft: of a commit, how many took part."""

    at: float
    kind: str
    number: int


Logs = dict[str, list[Line]]  # by worker
Kills = list[tuple[float, str]]  # when, and the worker


@dataclasses.dataclass(frozen=True)
class Found:
    """What the workers wrote. `lost`: inner steps, for each kill. `together`: whether both took
    part in a commit. `made`: how many inner steps it committed."""

    logs: Logs
    kills: Kills
    lost: list[int]
    together: Callable[[Line], bool]
    made: Callable[[Line], int]

    def of(self, worker: str, kind: str) -> list[Line]:
        return [line for line in self.logs[worker] if line.kind == kind]

    def survivor(self, kill: int) -> str:
        at, victim = self.kills[kill]
        (found,) = (
            name
            for name, lines in self.logs.items()
            if name != victim and lines and lines[0].at < at < lines[-1].at
        )
        return found

    def replacement(self, kill: int) -> str:
        new = {lines[0].at: name for name, lines in self.logs.items() if lines}
        return new[min(at for at in new if at > self.kills[kill][0])]


# ------------------------------------------------------------------------------------------- ours


def train(ctx: Any) -> None:
    torch.manual_seed(1)
    model = GPT(*SIZES[ctx.config["size"]])
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    session = ctx._session
    log = open(f"{ctx.config['folder']}/{session.worker}", "a", buffering=1)

    def timed(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        log.write(f"{time.time():.6f} pass {session.position.step + 1}\n")
        return loss_fn(model, batch)

    def inner(model: torch.nn.Module, step: int) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step in ctx.steps(model, outer, timed, inner_optimizer=inner):
        log.write(f"{time.time():.6f} commit {step.number}\n")


def number_of(worker: str) -> int:
    return int(worker.strip("w").rpartition(".")[2])


def ours(size: str, kills: int, on: Sequence[Host]) -> Found:
    """This process is on the first host. A worker's host follows from its number: in turn, the
    older of two is killed."""
    struck: Kills = []
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        spec = JobSpec(
            name="diloco-kills",
            data=MapStyleData(Text(1_000_000), micro_batch_size=ROWS[size]),
            config={"folder": folder, "size": size},
            scaling=ScalingConfig(
                min_workers=1,
                max_workers=WORKERS,
                virtual_workers=WORKERS,
                threads_per_worker=1,
                stabilization_s=0.0,
            ),
            inner_steps=INNER_STEPS,
            max_steps=1_000_000,
        )
        host_of = lambda worker: on[(number_of(worker) - 1) % len(on)]  # noqa: E731
        with ProcessRun(spec, train, address=on[0].address, host_of=host_of) as run:
            generation = 0
            for _ in range(kills):
                generation = wait_whole(run, generation)
                time.sleep(rng.uniform(0.0, WITHIN_S))
                victim = min(run.worker_group.processes, key=number_of)
                struck.append((time.time(), victim))
                run.worker_group.processes[victim].kill()
            wait_whole(run, generation)
            run.controller.post(StopRequested("measured"))
            outcome = run.wait()
        assert outcome.error is None, outcome.traceback
        logs = {path.name: read(path) for path in Path(folder).iterdir()}
    took_part = Counter(commit.number for commit in all_of(logs, "commit"))
    return Found(
        logs,
        struck,
        lost_by_ours(logs, struck),
        lambda commit: took_part[commit.number] == WORKERS,
        lambda commit: WORKERS * INNER_STEPS,
    )


def all_of(logs: Logs, kind: str) -> Iterator[Line]:
    return (line for line in itertools.chain(*logs.values()) if line.kind == kind)


def read(log: Path) -> list[Line]:
    lines = log.read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [Line(float(at), kind, int(number)) for at, kind, number in words]


def wait_whole(run: ProcessRun, after: int) -> int:
    """Wait until both have made a few rounds together, in a later generation than `after`. Return
    that."""
    until, wanted = time.monotonic() + PATIENCE_S, None
    while True:
        status, generation = run.controller.status(), run.controller.coordinator.generation
        whole = status["world_size"] == WORKERS and status["phase"] == "running"
        if whole and generation > after:
            wanted = status["step"] + CALM if wanted is None else wanted
            if status["step"] >= wanted:
                return generation
        else:
            wanted = None
        assert time.monotonic() < until, status
        time.sleep(0.01)


def lost_by_ours(logs: Logs, kills: Kills) -> list[int]:
    """Return how many inner steps each kill cost: those of the step in flight and of those after
    it, up to the next kill, that were made more than once."""
    ran = Counter(line.number for line in all_of(logs, "pass"))
    commits = [*all_of(logs, "commit")]
    first = [1 + max(line.number for line in commits if line.at <= at) for at, _ in kills]
    return [
        sum(ran[step] - WORKERS * INNER_STEPS for step in range(begin, end))
        for begin, end in itertools.pairwise([*first, max(ran)])
    ]


# ---------------------------------------------------------------------------------------- torchft


def torchft(size: str, kills: int, on: Sequence[Host]) -> Found | str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hosts.json")
        path.write_text(json.dumps([dataclasses.astuple(host) for host in on]))
        arguments = (str(kills), size, str(INNER_STEPS), str(ROWS[size]), str(path))
        python = os.environ.get("TORCHFT_PYTHON", sys.executable)
        found = peers.run(python, "torchft_diloco.py", *arguments, timeout_s=60.0 + 40.0 * kills)
    if isinstance(found, str):
        return found
    logs = {name: [Line(*line) for line in lines] for name, lines in found["logs"].items()}
    struck = [(at, name) for at, name in found["kills"]]
    return Found(
        logs,
        struck,
        lost_by_torchft(logs, struck),
        lambda commit: commit.number == WORKERS,
        lambda commit: commit.number * INNER_STEPS,
    )


def lost_by_torchft(logs: Logs, kills: Kills) -> list[int]:
    """The same, of what a replica made since its last commit. It belongs to the last kill before
    it, and of a killed replica to that kill."""
    lost, died = [0] * len(kills), {name: number for number, (_, name) in enumerate(kills)}
    for name, lines in logs.items():
        waiting: list[float] = []
        for line in lines:
            if line.kind == "pass":
                waiting.append(line.at)
                continue
            for at in waiting[:-INNER_STEPS]:
                lost[max(0, sum(kill <= at for kill, _ in kills) - 1)] += 1
            waiting = []
        if name in died:
            lost[died[name]] += len(waiting)
    return lost


# ----------------------------------------------------------------------------------------- judged


def longest_gap(passes: Sequence[float], since: float, until: float) -> float:
    """Return the longest time between two inner steps, from the one in flight at `since` to the
    first one behind `until`."""
    begin = max(at for at in passes if at <= since)
    end = min((at for at in passes if at > until), default=until)
    within = [at for at in passes if begin <= at < end]
    return max(b - a for a, b in itertools.pairwise([*within, end]))


def judge(found: Found) -> dict[str, Any]:
    calm_s, calm_gaps, still_s, whole_s, windows = [], [], [], [], []
    for kill, (at, _) in enumerate(found.kills):
        survivor = found.survivor(kill)
        passes = [line.at for line in found.of(survivor, "pass")]
        commits = found.of(survivor, "commit")
        before = [line.at for line in commits if line.at <= at][-CALM:]
        for begin, end in itertools.pairwise(before):
            calm_s.append(end - begin)
            calm_gaps.append(longest_gap(passes, begin, end))
        still_s.append(longest_gap(passes, at, next(x.at for x in commits if x.at > at)))
        whole_at = max(
            next(x.at for x in found.of(name, "commit") if x.at > at and found.together(x))
            for name in (survivor, found.replacement(kill))
        )
        whole_s.append(whole_at - at)
        made = sum(found.made(x) for x in commits if before[-1] < x.at <= whole_at)
        windows.append((whole_at - before[-1], made))
    round_s = statistics.median(calm_s)
    cost_s = [took - made * round_s / (WORKERS * INNER_STEPS) for took, made in windows]
    return {
        "kills": len(found.kills),
        "inner_steps_per_s": round(INNER_STEPS / round_s, 2),
        "lost": found.lost,
        "still_ms": [round(1e3 * x) for x in still_s],
        "still_calm_ms": round(1e3 * statistics.median(calm_gaps)),
        "whole_s": [round(x, 1) for x in whole_s],
        "cost_s": [round(x, 1) for x in cost_s],
    }


def measured(size: str, kills: int, on: Sequence[Host]) -> Iterator[tuple[str, Any]]:
    yield "elastic_dp", judge(ours(size, kills, on))
    found = torchft(size, kills, on)
    yield PEER, found if isinstance(found, str) else judge(found)


def of_both(size: str, kills: int, on: Sequence[Host]) -> list[tuple[str, Any]]:
    """This process is on the first host."""
    return [*measured(size, kills, on)]


def targets(results: dict[str, Any]) -> dict[str, bool]:
    lost = max(results["elastic_dp"]["lost"])
    return {"a kill costs fewer inner steps than a whole step has": lost < WORKERS * INNER_STEPS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--size", default="0.9M", choices=list(SIZES))
    add_quick(parser)
    asked = parser.parse_args()
    prepare_environment(os.environ, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE  # torchft's
    with (
        hosts(rate_bits_s=RATE_BITS_S, delay_s=DELAY_S) as on,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), on[0].enter) as first,
    ):
        kills = 2 if asked.quick else asked.kills
        results = first.submit(of_both, asked.size, kills, on).result()
    found = each("diloco_kills", results, keep=not asked.quick)
    return 0 if asked.quick else exit_code(targets(found))


if __name__ == "__main__":
    sys.exit(main())
