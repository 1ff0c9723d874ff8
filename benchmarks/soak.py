"""Random faults of all kinds on a cluster of hosts of their own, for a while; then what is left,
and the weights.

    python -m benchmarks.soak [--minutes 20] [--mean 10] [--seed 0]

Needs root and iproute2 (see `tests/chaos`). What can go wrong is `tests/chaos/kinds.py`. Every
fault is drawn by the seed: who, what, for how long. When the time is up the run is stopped as an
operator would; the same number of steps is then made undisturbed, and every step's loss and rows
and the final weights must be equal. Goodput: the time of the committed steps, each counted with at
most the median step's, over the wall time from the first step to the last (both as the head's clock
has it). Left over: processes of ours, and what those that lived for more than a minute grew by in a
minute, in open files, threads and memory.

What is wrong is in `problems`, and the results are written in any case.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import glob
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import write
from tests.chaos.cluster import ChaosRun, Cluster
from tests.chaos.hosts import Host, folder
from tests.chaos.job import trainer
from tests.chaos.kinds import CONTROLLER, KINDS, ON_NODES, WORKER

SIDECAR, DRIVER = "heartbeat_sidecar.py", "tests.chaos.job"
OURS = (WORKER, CONTROLLER, SIDECAR, DRIVER)
DISK_MIB = 128
SAY_S, LOOK_S = 30.0, 5.0
STOP_S, GOES_S = 180.0, 30.0  # at most
SETTLED_S, LIVED_S = (
    20.0,
    60.0,
)  # a process's size counts from this age on, and once it has lived so long
GROWTH = {"files": 5, "threads": 5, "mib": 20}  # in a minute, at most


class Faults:
    """Does harm of all kinds, to one node at a time and to one thing of the head's, and puts it
    right after a while."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self._busy: set[Host] = set()
        self._threads: list[threading.Thread] = []
        self.count: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def one(self) -> None:
        """To a host that has none; if each has one, none."""
        name, seconds = self._rng.choice(list(KINDS)), self._rng.uniform(1.0, 8.0)
        hosts = self._cluster.nodes if name in ON_NODES else [self._cluster.head]
        free = [host for host in hosts if host not in self._busy]
        if not free:
            return
        host = self._rng.choice(free)
        self._busy.add(host)
        self.count[name] += 1
        say(f"{name}: {host.address}, {seconds:.1f} s")
        thread = threading.Thread(target=self._do, args=(name, host, seconds), daemon=True)
        self._threads.append(thread)
        thread.start()

    def settle(self) -> None:
        for thread in self._threads:
            thread.join()

    def _do(self, name: str, host: Host, seconds: float) -> None:
        try:
            KINDS[name](self._cluster, host, seconds)
        except Exception:  # the end of a thread: a node that does not come back
            self.problems.append(f"{name} on {host.address}: {traceback.format_exc()[-1500:]}")
        finally:
            self._busy.discard(host)


class Size(NamedTuple):
    """The size of a process: open files, threads, memory."""

    files: int
    threads: int
    mib: int

    @classmethod
    def of(cls, pid: int) -> Size:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return cls(files, int(fields["Threads"]), int(fields["VmRSS"].split()[0]) >> 10)


class Watch:
    """Looks at our processes again and again, and says how the run gets on."""

    def __init__(self, cluster: Cluster, run: ChaosRun, faults: Faults) -> None:
        self._cluster, self._run, self._faults = cluster, run, faults
        self._first: dict[tuple[str, int], tuple[float, Size]] = {}
        self._last: dict[tuple[str, int], tuple[float, Size]] = {}
        self._seen_at: dict[tuple[str, int], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> dict[str, dict[str, Any]]:
        """In a minute, of each kind of process: the median of those that lived long enough, and the
        most."""
        spans: dict[str, list[float]] = {}
        grown: dict[str, list[list[float]]] = {}
        for key, (since, first) in self._first.items():
            at, last = self._last[key]
            if at - since >= LIVED_S:
                spans.setdefault(key[0], []).append(at - since)
                per_minute = [60 * (b - a) / (at - since) for a, b in zip(first, last, strict=True)]
                grown.setdefault(key[0], []).append(per_minute)
        return {
            kind: {
                "processes": len(each),
                "longest_s": round(max(spans[kind])),
                "median": _sizes(statistics.median, each),
                "most": _sizes(max, each),
            }
            for kind, each in grown.items()
        }

    def _watch(self) -> None:
        say_at = 0.0
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(AssertionError):  # a host could not be looked at
                self._look()
            if time.monotonic() >= say_at:
                say_at = time.monotonic() + SAY_S
                done, members = sum(self._faults.count.values()), self._run.members
                say(f"step {self._run.step}, members {', '.join(members)}; {done} faults so far")

    def _look(self) -> None:
        now = time.monotonic()
        for kind in (WORKER, CONTROLLER, SIDECAR):
            for pid in pids(self._cluster, kind):
                key = kind, pid
                since = self._seen_at.setdefault(key, now)
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    size = now, Size.of(pid)
                    if now - since >= SETTLED_S:
                        self._first.setdefault(key, size)
                        self._last[key] = size


def _sizes(of: Callable[[Any], float], each: list[list[float]]) -> dict[str, float]:
    columns = zip(*each, strict=True)
    return {name: round(of(c), 1) for name, c in zip(Size._fields, columns, strict=True)}


def soak(cluster: Cluster, options: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """Fills `outcome` as it goes on."""
    problems: list[str] = outcome["problems"]
    rng = random.Random(options.seed)
    faults = Faults(cluster, rng)
    faults.problems = problems
    run = _start(cluster)
    try:
        run.wait(_goes)
        with Watch(cluster, run, faults) as watch:
            until = time.monotonic() + 60 * options.minutes
            while time.monotonic() < until and not _over(run):
                faults.one()
                time.sleep(min(30.0, rng.expovariate(1 / options.mean)))
            outcome["faults"] = dict(faults.count)
            faults.settle()
            if run.driver.poll() is not None:
                run.driver = _start(cluster).driver  # the same command again: it attaches
            outcome["growth_in_a_minute"] = growth = watch.growth()
            result = _stopped(cluster, run)
    except BaseException:
        say(run.tail())
        raise
    for kind, found in growth.items():  # what leaks, leaks in all of them
        grown = found["median"]
        problems += [f"{kind} grows: {grown}" for name in GROWTH if grown[name] > GROWTH[name]]
    outcome |= {key: result[key] for key in ("step", "reason", "generations", "workers_lost")}
    lines = run.lines("metrics")
    outcome["goodput"] = _goodput([line["time"] for line in lines])
    problems += [f"left over: {one}" for one in _left(cluster)]
    made = glob.glob(f"{cluster.environment['TMPDIR']}/elastic_dp*")
    problems += [f"left over: {path}" for path in made]
    say("the same steps undisturbed")
    calm = trainer(str(cluster.folder), "calm", result["step"], body_s=0.0).fit(local=True)
    outcome["same_weights"] = calm.weights_sha256 == result["weights_sha256"]
    problems += [] if outcome["same_weights"] else ["the final weights differ"]
    problems += _differences(
        _rows(lines), _rows(ChaosRun(cluster.folder / "calm", None).lines("metrics"))
    )


def _stopped(cluster: Cluster, run: ChaosRun) -> dict[str, Any]:
    """Return its result, after a stop as by an operator."""
    address = f"{cluster.head.address}:6379"
    command = [sys.executable, "-m", "elastic_dp.cli", "stop", "soak", "--address", address]
    until = time.monotonic() + STOP_S
    while not _over(run) and time.monotonic() < until:
        asked = cluster.head.start(command, cluster.environment, f"{cluster.folder}/stop.log")
        with contextlib.suppress(AssertionError):
            run.wait(_over)
        asked.kill()
        asked.wait()
    if run.result is None:
        logs = [f"{cluster.folder}/{name}.log" for name in ("stop", "soak")]
        said = [Path(log).read_text()[-1000:] for log in logs if os.path.exists(log)]
        raise AssertionError("it failed, or was not stopped:\n" + "\n".join(said))
    return run.result


def _start(cluster: Cluster) -> ChaosRun:
    return cluster.run("soak", 10_000_000, every_steps=100)


def _over(run: ChaosRun) -> bool:
    """Whether it has ended, well or badly. Its driver is no sign: it dies with the head."""
    failed = any(line.get("command") == "FailRun" for line in run.lines("events"))
    return run.result is not None or failed


def _goes(run: ChaosRun) -> bool:
    """With all, and a checkpoint: who loses everyone before has nothing to go back to."""
    committed = any((run.folder / "checkpoints" / "seals").glob("step-*"))
    return committed and len(run.members) == 3


def _left(cluster: Cluster) -> list[str]:
    """Processes of ours that are still there half a minute after the end."""
    until = time.monotonic() + GOES_S
    while True:
        left = [f"{kind} {pid}" for kind in OURS for pid in pids(cluster, kind)]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.5)


def _differences(lines: list[Any], calm: list[Any]) -> list[str]:
    """Return how the steps of two runs differ, each (number, loss, rows)."""
    steps, wanted = [line[0] for line in lines], {line[0]: line for line in calm}
    counts = collections.Counter(steps)
    found = {
        "lost": sorted(set(wanted).difference(steps)),
        "repeated": [step for step, count in counts.items() if count > 1],
        "not to be": sorted(set(steps).difference(wanted)),
        "of another loss or of other rows": [
            line[0] for line in lines if line != wanted.get(line[0], line)
        ],
    }
    return [f"{len(s)} steps {what}: {s[:10]}" for what, s in found.items() if s]


def pids(cluster: Cluster, pattern: str) -> list[int]:
    return [pid for host in cluster.network.hosts for pid in host.pids(pattern)]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _goodput(times: list[float]) -> float:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    median = statistics.median(gaps)
    useful = (median if gap < 0 else min(gap, median) for gap in gaps)  # the head's clock was set
    return round(sum(useful) / (times[-1] - times[0]), 4)


def _rows(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["ids"]) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--mean", type=float, default=10, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # so that no host is left
    outcome: dict[str, Any] = {
        "minutes": options.minutes, "mean_s": options.mean, "seed": options.seed, "problems": []
    }  # fmt: skip
    where = Path(folder())
    os.environ["TMPDIR"] = f"{where}/tmp"  # of everything that is started
    os.mkdir(os.environ["TMPDIR"])
    cluster = Cluster(where, memory="rocksdb", disk_mib=DISK_MIB, cable=True)
    try:
        soak(cluster, options, outcome)
    except (Exception, SystemExit) as error:  # told, and what was found until then is written
        traceback.print_exc()
        outcome["problems"].append(f"{type(error).__name__}: {str(error)[-2000:]}")
    finally:
        cluster.close()
    print(json.dumps(outcome, indent=2))
    if not options.no_write:
        print(write("soak", outcome))
    if outcome["problems"]:
        sys.exit("something is wrong")


if __name__ == "__main__":
    main()
