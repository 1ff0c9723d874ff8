"""How long a group stands still after a worker is killed, on real Ray actors, and where that time
goes.

    python -m benchmarks.recovery [--kills 30] [--workers 3 5] [--peers] [--quick]

A random worker gets SIGKILL at a random instant. Each worker writes the instant of every loop body
to a file of its own, so nothing is asked of the controller. A pause lasts from the kill to the
first step that the new generation commits, less one median step. The next kill waits until the
group is whole again. Kills that hit a group while it forms are made on purpose and counted apart.
At the end the weights must be those of the undisturbed run, and no worker may have missed,
repeated, or reordered a body. `--peers` measures torchft and Ray Train the same way, if they are
installed (see `benchmarks/peers`). Ends with 1, and says why, if a target was missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import nn
from torch.nn import functional as F

import elastic_dp as edp
from benchmarks import models
from benchmarks.report import each, exit_code, parser_of, run_main

ROOT = str(Path(__file__).parent.parent)
TORCHFT = "torchft 0.2, tuned, 3 workers"
TORCHFT_MS = 110.0  # the median pause of that, where it is not measured beside ours


# -----------------------------------------------------------------------------------------------
# the job


class Points(torch.utils.data.Dataset):
    """Points with a class each; row i is a function of i alone."""

    rows, features = 4096, 64

    def __init__(self) -> None:
        self._x = torch.randn(self.rows, self.features, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[i], "y": self._x[i, :4].argmax()}


def classifier(width: int = 128) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(Points.features, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 4),
    )


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train(ctx: Any) -> None:
    """`config`: `folder` for the logs (None: no log), `width` of the model, `body_s` slept in each
    body; with `gpt`, its width and depth, the model is one."""
    gpt = ctx.config.get("gpt")
    torch.manual_seed(1)
    model = models.GPT(*gpt) if gpt else classifier(ctx.config.get("width", 128))
    loss = models.loss_fn if gpt else loss_fn
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder, body_s = ctx.config["folder"], ctx.config.get("body_s", 0.0)
    log = None if folder is None else open(f"{folder}/{ctx._session.worker}", "w", buffering=1)
    if log is not None:
        note_generations(ctx._session, log)
    for step in ctx.steps(model, optimizer, loss):
        if log is not None:
            log.write(f"body {time.time():.6f} {step.number} {ctx.generation}\n")
        time.sleep(body_s)


def note_generations(session: Any, log: TextIO) -> None:
    """Has a worker write when each generation is formed, and when its state is there."""
    form, get_pieces, formed_at = session.groups.formed, session._get_pieces, 0.0

    def formed() -> Any:
        nonlocal formed_at
        main = form()
        formed_at = time.time()
        return main

    def has_state(*given: Any) -> None:
        log.write(f"timing {session.generation} {formed_at:.6f} {time.time():.6f}\n")
        get_pieces(*given)

    session.groups.formed, session._get_pieces = formed, has_state


def trainer(
    name: str,
    storage: str,
    folder: str | None,
    workers: int,
    *,
    virtual: int | None = None,
    standby: int = 0,
    max_steps: int = 1_000_000,
    train: Callable[[Any], None] = train,
    data: torch.utils.data.Dataset | None = None,
    **config: Any,
) -> edp.ElasticTrainer:
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=storage,
        config={"folder": folder} | config,
        data=edp.MapStyleData(data or Points(), micro_batch_size=8),
        scaling=edp.ScalingConfig(
            min_workers=1,
            max_workers=workers,
            virtual_workers=virtual or workers,
            standby=standby,
            threads_per_worker=1,
        ),
        max_steps=max_steps,
    )


def start_ray(niceness: int = 0, python_path: str = ROOT) -> None:
    """A Ray of this machine alone, its workers at normal priority: Ray's own 15 would measure what
    else runs."""
    import ray

    os.environ["RAY_worker_niceness"] = str(niceness)  # noqa: SIM112
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=12,  # claimed, not owned: workers share the machine's cores
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": python_path}},
    )


# --------------------------------------------------------------------------------------------- the
# record


class Body(NamedTuple):
    """One loop body, as it began: the step before it is committed."""

    time: float
    step: int
    generation: int
    worker: str


class Timing(NamedTuple):
    generation: int
    formed_at: float
    copied_at: float
    worker: str


@dataclass
class Record:
    """What the workers of one run wrote, and the controller's events."""

    bodies: list[Body] = field(default_factory=list)  # by time
    timings: list[Timing] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(folder: str, url: str | None = None) -> Record:
        record = Record()
        for path in Path(folder).iterdir():
            for line in path.read_text().splitlines(keepends=True):
                if not line.endswith("\n"):
                    continue  # its writer was killed
                kind, *words = line.split()
                if kind == "body":
                    at, step, generation = float(words[0]), int(words[1]), int(words[2])
                    record.bodies.append(Body(at, step, generation, path.name))
                else:
                    formed, ready = float(words[1]), float(words[2])
                    record.timings.append(Timing(int(words[0]), formed, ready, path.name))
        record.bodies.sort()
        if url is not None:
            lines = Path(f"{url}/events.jsonl").read_text().splitlines()
            record.events = [json.loads(line) for line in lines]
        return record

    def first_commit_after(self, generation: int, at: float) -> Body | None:
        """The first step that a generation after this one committed after that instant."""
        done = max((b.step for b in self.bodies if b.generation <= generation), default=0)
        later = (b for b in self.bodies if b.generation > generation and b.time > at)
        return next((b for b in later if b.step > done), None)

    def generation_at(self, at: float) -> int:
        return max((b.generation for b in self.bodies if b.time <= at), default=0)

    def step_times(self) -> list[float]:
        """Between consecutive bodies of one worker in one generation."""
        times = []
        for worker in {b.worker for b in self.bodies}:
            own = [b for b in self.bodies if b.worker == worker]
            for a, b in itertools.pairwise(own):
                if a.generation == b.generation:
                    times.append(b.time - a.time)
        return times

    def disorder(self) -> list[str]:
        """Where a process missed, repeated, or reordered a body; and steps that nobody ran."""
        found = []
        for worker in sorted({b.worker for b in self.bodies}):
            steps = [b.step for b in self.bodies if b.worker == worker]
            for a, b in itertools.pairwise(steps):
                if b != a + 1:
                    found.append(f"{worker}: step {b} after {a}")
        ran = {b.step for b in self.bodies}
        found += [f"nobody ran step {s}" for s in range(1, max(ran) + 1) if s not in ran]
        return found


def outside_load(seconds: float = 2.0) -> float:
    """Cores that something else keeps busy, before we start: the noise in what follows."""

    def busy() -> int:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
        return user + nice + system + irq + softirq

    before = busy()
    time.sleep(seconds)
    return round((busy() - before) / os.sysconf("SC_CLK_TCK") / seconds, 2)


def wait_for(what: Callable[[], bool], timeout_s: float, name: str, pause_s: float = 0.05) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {timeout_s} s for {name}")
        time.sleep(pause_s)


def wait_full(run: Any, workers: int, least_step: int = 0, timeout_s: float = 90.0) -> None:
    """Wait until so many workers train and the group is past forming."""

    def full() -> bool:
        status = run.status()
        if status["phase"] == "over":
            raise RuntimeError(f"the run ended: {run.result()}")
        return (
            status["world_size"] == workers
            and status["phase"] == "running"
            and status["step"] >= least_step
        )

    wait_for(full, timeout_s, f"{workers} workers", 0.1)


def wait_to_form(events: str, since: float, times: int, timeout_s: float = 60.0) -> None:
    """Wait until so many generations were announced since then."""

    def announced() -> bool:
        with open(events, "rb") as file:
            file.seek(max(0, os.stat(events).st_size - 100_000))
            lines = file.read().splitlines(keepends=True)[1:]  # the first may be a part
        found = [line for line in lines if b'"FormGeneration"' in line and line.endswith(b"\n")]
        return sum(json.loads(line)["time"] >= since for line in found) >= times

    wait_for(announced, timeout_s, "a generation to form", 0.001)


def summary(values_ms: Sequence[float]) -> dict[str, Any]:
    if not values_ms:
        return {"count": 0}
    ordered = sorted(values_ms)
    return {
        "count": len(ordered),
        "median_ms": round(statistics.median(ordered), 1),
        "p90_ms": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 1),
        "max_ms": round(ordered[-1], 1),
    }


# -----------------------------------------------------------------------------------------------
# the kills


@dataclass
class Kill:
    at: float
    worker: str


def kill(pids: dict[str, int], rng: random.Random) -> Kill:
    worker = rng.choice(sorted(pids))
    pid = pids.pop(worker)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return Kill(at, worker)


def end(
    run: Any, url: str, storage: str, folder: str, workers: int, **job: Any
) -> tuple[edp.Result, Record, dict[str, Any]]:
    """Stop the run, and compare it with an undisturbed one of this `job`."""
    run.stop("enough")
    result, record = run.result(), Record.read(folder, url)
    calm = trainer("calm", storage, None, workers, max_steps=result.step, **job).fit(local=True)
    exact = result.exact and result.weights_sha256 == calm.weights_sha256
    return result, record, {"exact": exact, "bodies_out_of_order": record.disorder()}


def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    kills, rng = options.kills, random.Random(workers)
    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory() as folder:
        ours = trainer("kills", storage, folder, workers, body_s=options.body_s)
        run = ours.start()
        wait_full(run, workers, 20)
        done: list[Kill] = []
        pids_changed: list[str] = []
        known: dict[str, int] = {}
        for number in range(kills + options.forming_kills):
            wait_full(run, workers)
            time.sleep(rng.uniform(0.3, 0.8))
            pids = run.pids()
            pids_changed += [w for w in pids if known.get(w, pids[w]) != pids[w]]
            known |= pids
            alive = dict(pids)
            done.append(kill(alive, rng))
            if number >= kills:  # another, while they form without it, or with its replacement
                wait_to_form(f"{ours.url}/events.jsonl", done[-1].at, 1 + number % 2)
                time.sleep(rng.uniform(0.0, 0.005))
                done.append(kill(alive, rng))
            time.sleep(1.0)  # asks nothing of the controller while the group recovers
            after = run.pids()
            pids_changed += [w for w, pid in alive.items() if after.get(w, pid) != pid]
            gone = [w for w in alive if w not in after]
            pids_changed += [f"{w} was lost without a kill" for w in gone]
            print(f"{workers} workers, kill {number + 1}: {done[-1].worker}", flush=True)
        wait_full(run, workers)
        result, record, facts = end(run, ours.url, storage, folder, workers)
        return {
            "workers": workers,
            **judge(record, done),
            "steps": result.step,
            "generations": result.generations,
            **facts,
            "survivors_replaced": pids_changed,
        }


def judge(record: Record, kills: Sequence[Kill]) -> dict[str, Any]:
    """The pauses of all kills, those that hit a forming group apart, and what the others consist
    of."""
    step_ms = 1e3 * statistics.median(record.step_times())
    found = []
    for one in kills:
        first = record.first_commit_after(record.generation_at(one.at), one.at)
        if first is not None:
            found.append((one, first))
    pauses, forming, parts = [], [], []
    for one, first in found:
        pause_ms = 1e3 * (first.time - one.at) - step_ms
        into_another = any(other.at < one.at < end.time for other, end in found)
        if into_another or forms_at(record, one.at):
            forming.append(pause_ms)
        elif not any(one.at < other.at < first.time for other in kills):
            pauses.append(pause_ms)
            part = breakdown(record, one, first)
            if part is not None:
                parts.append(part)
    names = list(parts[0]) if parts else []
    return {
        "step_ms": round(step_ms, 2),
        "pause": summary(pauses),
        "pauses_ms": [round(p, 1) for p in pauses],
        "hit_while_forming": summary(forming) | {"forming_deadline_ms": 5000},
        "hit_by_another": len(kills) - len(pauses) - len(forming),
        "median_pause_in_parts_ms": {
            name: round(statistics.median(part[name] for part in parts), 2) for name in names
        },
    }


def forms_at(record: Record, at: float) -> bool:
    """Whether a generation was announced before that instant and had no step before it."""
    announced = [
        (line["time"], line["generation"])
        for line in record.events
        if line.get("command") == "FormGeneration" and line["time"] <= at
    ]
    if not announced:
        return False
    newest = announced[-1][1]
    return record.generation_at(at) < newest


def breakdown(record: Record, one: Kill, first: Body) -> dict[str, float] | None:
    """Milliseconds of each leg of the way from the kill to the first step."""
    lines = [line for line in record.events if one.at <= line["time"] <= first.time]

    def times(what: str, name: str) -> list[float]:
        return [line["time"] for line in lines if line.get(what) == name]

    stops, lost = times("event", "WorkerStopped"), times("event", "WorkerLost")
    claims, forms = times("command", "ClaimGeneration"), times("command", "FormGeneration")
    timings = [t for t in record.timings if t.generation == first.generation]
    if not (stops and lost and claims and forms and timings):
        return None
    formed = max(t.formed_at for t in timings)
    ready = max(t.copied_at for t in timings)
    return {
        "kill_to_first_survivor_stopped": 1e3 * (stops[0] - one.at),
        "kill_to_last_survivor_stopped": 1e3 * (stops[-1] - one.at),
        "kill_to_worker_lost": 1e3 * (lost[0] - one.at),
        "kill_to_claim": 1e3 * (claims[-1] - one.at),
        "last_survivor_stopped_to_announced": 1e3 * (forms[-1] - stops[-1]),
        "announced_to_formed": 1e3 * (formed - forms[-1]),
        "formed_to_ready": 1e3 * (ready - formed),
        "ready_to_first_step": 1e3 * (first.time - ready),
    }


def pieces(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    import ray

    yield "cores_busy_with_other_work", outside_load()
    start_ray()
    try:
        for workers in options.workers:
            yield f"{workers} workers", measure(workers, options)
    finally:
        ray.shutdown()
    if options.peers:
        from benchmarks import peers

        yield from peers.measure_all()


def targets(results: dict[str, Any]) -> dict[str, bool]:
    peer = results.get(TORCHFT)  # a text where it could not be measured
    theirs = peer["pause"].get("median_ms", TORCHFT_MS) if isinstance(peer, dict) else TORCHFT_MS
    found = {}
    for name, one in results.items():
        if not isinstance(one, dict) or "survivors_replaced" not in one:
            continue  # how busy the machine was, or a peer
        median = one["pause"].get("median_ms", float("inf"))
        found[f"{name}: half the median pause of tuned torchft"] = median <= 0.5 * theirs
        forming = one["hit_while_forming"]
        within = forming.get("max_ms", 0.0) <= forming["forming_deadline_ms"]
        found[f"{name}: hit while forming, within its deadline"] = forming["count"] > 0 and within
        found[f"{name}: the weights of the undisturbed run"] = one["exact"]
        found[f"{name}: each body once and in order"] = not one["bodies_out_of_order"]
        found[f"{name}: no survivor is replaced"] = not one["survivors_replaced"]
    return found


def main() -> int:
    parser = parser_of(__doc__, kills=30, forming_kills=12, body_s=0.002)
    parser.add_argument("--workers", type=int, nargs="*", default=[3, 5])
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.forming_kills, options.workers = 2, 0, [3]
        options.peers, options.no_write = False, True
    torch.set_num_threads(1)
    found = targets(each("recovery", pieces(options), keep=not options.no_write))
    return 0 if options.quick else exit_code(found)


if __name__ == "__main__":
    run_main("benchmarks.recovery")
