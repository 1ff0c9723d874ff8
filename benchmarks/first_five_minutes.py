"""How long a new user needs, from an empty environment to a report that shows a worker lost and
replaced.

    python -m benchmarks.first_five_minutes [--quick]

The commands are those a user would type, and each must exit with 0: a virtual environment,
`pip install` of torch and of the wheel with the versions of constraints.txt, jobs/gpt.py with two
workers, of which one gets SIGKILL when it trains, and `elastic-dp report` as a page and as JSON.
Building the wheel is not counted, and the times depend on pip's cache and network. `--quick` uses
the present environment. Ends with 1, and says why, if the target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import add_quick, exit_code, write
from elastic_dp.telemetry.journal import read_events

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
TARGET_S = 300.0
STEPS, KILL_AT = 150, 10
PATIENCE_S = 600.0  # for each command


class NewUser:
    """Types commands in a folder of its own, and measures them."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.seconds: dict[str, float] = {}
        inherited = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
        self.environment = inherited | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[what] = round(time.monotonic() - began, 1)
        print(f"{self.seconds[what]:6.1f} s  {what}", flush=True)

    def types(self, what: str, *words: object) -> str:
        """Run a command to its end and return its output."""
        command = [str(word) for word in words]
        with self.timed(what):
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nends with {done.returncode}\n{done.stderr}")
        return done.stdout

    def installs(self, wheel: Path) -> None:
        venv = self.folder / "venv"
        self.types("python -m venv", sys.executable, "-m", "venv", venv)
        self.python = venv / "bin" / "python"
        pip = (self.python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
        self.types("pip install torch", *pip, TORCH)
        self.types("pip install elastic_dp", *pip, f"{wheel}[cli,ui]")

    def trains_and_kills(self, steps: int) -> None:
        """Train, and kill one of two members on the way."""
        shutil.copy(ROOT / "jobs" / "gpt.py", self.folder)  # else the checkout is on the path
        words = (self.python, "gpt.py", "--workers", "2", "--steps", steps, "--name", "first")
        folders = ("--storage-path", "runs", "--data", "data")
        run = self.folder / "runs" / "first"
        with (
            self.timed("train, with a worker killed"),
            open(self.folder / "output", "w+") as output,
            subprocess.Popen(
                [str(word) for word in (*words, *folders)],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as driver,
        ):
            with self.timed("of it, until it trains"):
                wait_until(lambda: trains(run), driver)
            workers_of(driver.pid)[-1].send_signal(signal.SIGKILL)
            if driver.wait(PATIENCE_S) != 0:
                output.seek(0)
                raise SystemExit(f"the job ends with {driver.returncode}\n{output.read()}")


def wait_until(condition: Any, driver: subprocess.Popen[Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if driver.poll() is not None or time.monotonic() > until:
            driver.kill()
            raise SystemExit(f"the job does not train: it ended with {driver.poll()}")
        time.sleep(0.1)


def trains(run: Path) -> bool:
    """Whether the run has made some steps, and two workers are in its group."""
    if not (run / "events.jsonl").exists():
        return False
    lines = [*read_events(str(run))]
    groups = [line["members"] for line in lines if line.get("command") == "FormGeneration"]
    steps = [line["step"] for line in lines if "event" not in line and "command" not in line]
    return max(steps, default=0) >= KILL_AT and len(groups[-1]) == 2


def workers_of(driver: int) -> list[psutil.Process]:
    """Return the processes that train, among those that the driver has started."""
    found = psutil.Process(driver).children(recursive=True)
    workers = [one for one in found if "ray::WorkerActor" in " ".join(one.cmdline())]
    assert workers, "no worker runs"
    return sorted(workers, key=lambda one: one.pid)


def wheel_in(folder: Path) -> Path:
    """Build the wheel from a copy of the sources and return its path."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elastic_dp", source / "elastic_dp", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    home = folder / "user"
    home.mkdir()
    user = NewUser(home, Path(sys.executable))
    if not quick:
        user.environment.pop("PYTHONPATH", None)
        user.installs(wheel_in(folder))
    user.trains_and_kills(60 if quick else STEPS)
    command = user.python.parent / "elastic-dp"
    where = ("report", "first", "--storage-path", "runs")
    user.types("elastic-dp report", command, *where, "-o", "first.html")
    report = json.loads(user.types("elastic-dp report --json", command, *where, "--json"))
    total_s = sum(s for what, s in user.seconds.items() if not what.startswith("of it"))
    page = (home / "first.html").read_text()
    return {
        "seconds": user.seconds,
        "total_s": round(total_s, 1),
        "phase": report["phase"],
        "workers_lost": report["lost"],
        "recovered": report["phase"] == "finished" and "It lost 1 worker" in page,
        "longest_pause_s": max(
            (one["seconds"] for one in report["events"] if one["kind"] == "pause"), default=None
        ),
    }


def targets(results: dict[str, Any]) -> dict[str, bool]:
    return {
        f"from nothing to the report: {TARGET_S:.0f} s": results["total_s"] <= TARGET_S,
        "the report shows the kill and the end of the run": results["recovered"],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-write", action="store_true")
    add_quick(parser)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.quick)
    print(json.dumps(results, indent=1), flush=True)
    if options.quick:
        return 0 if results["recovered"] and results["workers_lost"] == 1 else 1
    if not options.no_write:
        print(write("first_five_minutes", results))
    return exit_code(targets(results))


if __name__ == "__main__":
    sys.exit(main())
