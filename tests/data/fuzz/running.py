"""Many damaged inputs, in a process that may die of one: `run("parquet", 0, 1000)`, or
`run("csv,tar", …)` by turns.

The process says which input comes next before it begins with it. If it dies, or works longer than
`HANG_S`, that input is a finding, and another process goes on behind it.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_S = 5.0  # of processor time
STUCK_S = 120.0  # of any time: a process that waits and does not work
BEFORE = ""  # code that the process runs first
_START_S = 120.0
_MEMORY = Path("/dev/shm")


@dataclass
class Tried:
    """`findings`: (seed, what was found). `outcomes`: how often each was there."""

    kind: str
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str]] = field(default_factory=list)


def run(
    kind: str,
    first: int,
    count: int,
    on_finding: Callable[[int, str], None] = lambda seed, text: None,
) -> Tried:
    tried, at = Tried(kind), first
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        while at < first + count:
            at = _run_until_death(tried, at, first + count - at, folder, on_finding)
    return tried


def _run_until_death(
    tried: Tried, first: int, count: int, folder: str, on_finding: Callable[[int, str], None]
) -> int:
    """The next seed to try."""
    # The allocator of the system says of too much memory that there is none; others reserve more
    # than they need.
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
    command = [
        sys.executable,
        "-m",
        "tests.data.fuzz.worker",
        tried.kind,
        str(first),
        str(count),
        folder,
        BEFORE,
    ]
    seed, way = first, "start"

    def found(text: str) -> None:
        tried.findings.append((seed, text))
        on_finding(seed, text)

    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        for facts in _said(process):
            seed = facts.get("seed", seed)
            way = facts.get("way", way)
            if "outcome" in facts or "finding" in facts:
                tried.inputs += 1
                tried.outcomes[facts.get("outcome", "finding")] += 1
            if "finding" in facts:
                found(facts["finding"])
            if "hang" in facts:
                process.kill()
                process.wait()
                tried.inputs += 1
                if not way.endswith("reference"):
                    found(f"{way}: no end within {HANG_S:g} s")
                return int(seed) + 1
        code = process.wait()
        if code == 0:
            return first + count
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip()[-2000:]
        if way == "start" or way == "mutate":
            raise RuntimeError(f"the process itself failed at {tried.kind} {seed}: {last}")
        tried.inputs += 1
        if not way.endswith("reference"):
            found(f"{way}: the process ended with {code}: {last[-300:]}")
        return int(seed) + 1


def _said(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Return its lines; a last one, `{"hang": true}`, where it works on one thing for too long."""
    assert process.stdout is not None
    pending, begun, busy = b"", time.monotonic(), _processor_s(process.pid)
    allowed = _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(1.0):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines)
                begun, busy, allowed = time.monotonic(), _processor_s(process.pid), HANG_S
            elif _processor_s(process.pid) - busy > allowed or time.monotonic() - begun > STUCK_S:
                yield {"hang": True}
                return


def _processor_s(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
