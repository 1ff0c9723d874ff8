"""What is right on this GPU, in under eight minutes, without a network and without Ray.

    python -m benchmarks.gpu_check [--output FILE] [--only NAME …] [--device cpu] [--small]

Each check runs in a process of its own with a limit of its own, so that one that fails, hangs or
ends its process hides no other; it prints one line. The file has all of them as JSON, written after
each check. A check that does not end in time has its facts so far there, and what each thread of
its processes did. Without a GPU the checks run on the CPU, those of communicators on a simulated
device, which tests this command and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_checks, report

TOTAL_S = 460.0  # for all of them
_WORDS = 220  # of facts or a reason in a line
_OUTPUT = 20_000  # characters of what a check has printed
_STACKS_S = 1.0  # in which a check that is late prints what its threads do
_END_S = 10.0  # in which a killed process ends, unless it is stuck in a driver


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/gpu/DATE-GPU.json, on a GPU"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(gpu_checks.CHECKS))
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="sizes for a test of this command")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in the process of one check
    options = parser.parse_args(arguments)
    if options.run is not None:
        run_here(options.run, options.device, options.small, options.output)
        return 0
    found = run_all(options.only, options.device, options.small, options.output)
    return 1 if any(one["status"] in ("failed", "timeout") for one in found.values()) else 0


def run_all(
    only: Sequence[str] | None, device: str | None, small: bool, output: Path | None
) -> dict[str, dict[str, Any]]:
    """Run the checks one after the other; the file is written after each. On a CPU there is none
    unless `output` names it."""
    ends_at = time.monotonic() + TOTAL_S
    # A check that is late is ended by SIGABRT, and may hold many gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    names = [name for name in gpu_checks.CHECKS if only is None or name in only]
    found: dict[str, dict[str, Any]] = {}
    # First, and also where it is not asked for: it says whether there is a GPU.
    for name in dict.fromkeys(["environment", *names]):
        check = gpu_checks.CHECKS[name]
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            found[name] = {"status": "skipped", "why": "out of time", "seconds": 0.0}
        else:
            found[name] = run_apart(name, device, small, min(check.limit_s, left_s))
        if name == "environment" and device is None:
            device = device_of(found[name])
        print(line(name, found[name]), flush=True)
        for case, one in found[name].get("facts", {}).items() if name == "step" else ():
            print(f"{'':<8} {case:<20} {one}", flush=True)
        if output is None and device == "cuda":
            gpu = str(found["environment"]["facts"].get("gpu", "unknown"))
            words = gpu.lower().replace("nvidia", "").split()
            output = report.RESULTS / "gpu" / f"{time.strftime('%Y-%m-%d')}-{'-'.join(words)}.json"
        if output is not None:
            write(output, device or "cpu", small, found)
    return found


def device_of(environment: dict[str, Any]) -> str:
    """Where the other checks run. If it is not known whether there is a GPU, on it: they must not
    silently test the CPU."""
    return "cpu" if environment["facts"].get("gpu", "not known") is None else "cuda"


def run_apart(name: str, device: str | None, small: bool, limit_s: float) -> dict[str, Any]:
    """Run one check in a process of its own, which is killed with all that it started."""
    begun_at = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        folder = Path(root)
        result, printed = folder / "result.json", folder / "output"
        # For what is printed: the stack of each thread where a process is aborted, also by us, and
        # the warnings of NCCL.
        environment = {"NCCL_DEBUG": "WARN"} | os.environ | {"PYTHONFAULTHANDLER": "1"}
        with printed.open("wb") as file:
            process = subprocess.Popen(
                command_of(name, device, small, result),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        try:
            process.wait(limit_s)
            found: dict[str, Any] = {"status": "failed", "why": f"ended {process.returncode}"}
        except subprocess.TimeoutExpired:
            found = {"status": "timeout", "why": f"no result after {limit_s:.0f} s"}
            signal_all(process.pid, signal.SIGABRT)
            time.sleep(_STACKS_S)
        if not end(process):
            found["why"] += "; its process cannot be killed"
        if result.exists():
            found = json.loads(result.read_text())
        found["facts"] = noted(folder) | found.get("facts", {})
        found["output"] = printed.read_text(errors="replace")[-_OUTPUT:]
    return found | {"seconds": round(time.monotonic() - begun_at, 1)}


def command_of(name: str, device: str | None, small: bool, result: Path) -> list[str]:
    """What runs one check in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--run", name]
    command += ["--output", str(result), *(["--small"] if small else [])]
    return command + ([] if device is None else ["--device", device])


def signal_all(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def end(process: subprocess.Popen[bytes]) -> bool:
    """Kill it with all that it started. Return whether it has ended."""
    signal_all(process.pid, signal.SIGKILL)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def noted(folder: Path) -> dict[str, Any]:
    """What a check has noted, however it has ended; see `Setup.note`."""
    notes = folder / gpu_checks.NOTES
    found: dict[str, Any] = {}
    for text in notes.read_text().splitlines() if notes.exists() else ():
        with contextlib.suppress(ValueError):  # its process ended in the middle of the line
            found |= json.loads(text)
    return found


def run_here(name: str, device: str | None, small: bool, result: Path) -> None:
    """The check itself; its end is known by a file that is there as a whole."""
    check = gpu_checks.CHECKS[name]
    found: dict[str, Any]
    try:
        setup = gpu_checks.Setup(device or "cpu", small, result.parent)
        found = {"status": "ok", "facts": check.run(setup)}
    except gpu_checks.Skipped as skipped:
        found = {"status": "skipped", "why": str(skipped)}
    except Exception as error:  # whatever torch, a driver or a worker raises
        traceback.print_exc()
        why = str(error).strip().partition("\n")[0]
        found = {"status": "failed", "why": f"{type(error).__name__}: {why}"}
    replace(result, json.dumps(found, default=str))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a check has broken need not be cleaned up


def replace(path: Path, text: str) -> None:
    """Write the file so that it is there as a whole, whenever this process ends."""
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)


def line(name: str, found: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in found.get("facts", {}).items())
    words = facts[:_WORDS]
    if found["status"] != "ok":
        words = found["why"][:_WORDS] + (f" ({words})" if facts else "")
    status = "skipped:" if found["status"] == "skipped" else found["status"]
    return f"{status:<8} {name:<20} {found['seconds']:6.1f} s  {words}"


def write(output: Path, device: str, small: bool, found: dict[str, dict[str, Any]]) -> None:
    """Like report.write, to any file, and without a call to a device in this process."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": found["environment"].get("facts", {}),
        "results": {"device": device, "small": small, "checks": found},
    }
    replace(output, json.dumps(content, indent=2, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
