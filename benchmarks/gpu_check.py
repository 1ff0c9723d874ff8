"""What is right on this GPU, in under eight minutes, without a network and without Ray.

    python -m benchmarks.gpu_check [--output FILE] [--only NAME …] [--device cpu] [--small]

Each check runs in a process of its own with a limit of its own, so that one that fails or hangs
hides no other; it prints one line, and the file has all of them as JSON. Without a GPU the checks
run on the CPU, those of communicators on a simulated device, which tests this command and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
_WORDS = 220  # of a reason in a line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=report.RESULTS / "gpu_check.json")
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
    only: Sequence[str] | None, device: str | None, small: bool, output: Path
) -> dict[str, dict[str, Any]]:
    """Run the checks one after the other; the file is written after each."""
    ends_at = time.monotonic() + TOTAL_S
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
            device = "cuda" if found[name].get("facts", {}).get("gpu") else "cpu"
        print(line(name, found[name]), flush=True)
        write(output, device or "cpu", small, found)
    return found


def run_apart(name: str, device: str | None, small: bool, limit_s: float) -> dict[str, Any]:
    """Run one check in a process of its own, which is killed with all that it started."""
    begun_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, printed = Path(folder) / "result.json", Path(folder) / "output"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--run", name]
        command += ["--output", str(result), *(["--small"] if small else [])]
        command += [] if device is None else ["--device", device]
        with printed.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(limit_s)
                found: dict[str, Any] = {"status": "failed", "why": f"ended {process.returncode}"}
            except subprocess.TimeoutExpired:
                found = {"status": "timeout", "why": f"no result after {limit_s:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if result.exists():
            found = json.loads(result.read_text())
        if found["status"] in ("failed", "timeout"):
            found["output"] = printed.read_text(errors="replace")[-3000:]
    return found | {"seconds": round(time.monotonic() - begun_at, 1)}


def run_here(name: str, device: str | None, small: bool, result: Path) -> None:
    """The check itself; its end is known by a file that is there as a whole."""
    check = gpu_checks.CHECKS[name]
    try:
        with tempfile.TemporaryDirectory() as folder:
            setup = gpu_checks.Setup(device or "cpu", small, Path(folder))
            found = {"status": "ok", "facts": check.run(setup)}
    except gpu_checks.Skipped as skipped:
        found = {"status": "skipped", "why": str(skipped)}
    except Exception as error:  # whatever torch, a driver or a worker raises
        traceback.print_exc()
        why = str(error).strip().partition("\n")[0]
        found = {"status": "failed", "why": f"{type(error).__name__}: {why}"}
    temporary = result.with_suffix(".part")
    temporary.write_text(json.dumps(found, default=str))
    temporary.rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a check has broken need not be cleaned up


def line(name: str, found: dict[str, Any]) -> str:
    if found["status"] == "ok":
        words = ", ".join(f"{key} {value}" for key, value in found["facts"].items())
    else:
        words = found["why"]
    status = "skipped:" if found["status"] == "skipped" else found["status"]
    return f"{status:<8} {name:<20} {found['seconds']:6.1f} s  {words[:_WORDS]}"


def write(output: Path, device: str, small: bool, found: dict[str, dict[str, Any]]) -> None:
    """Like report.write, to any file, and without a call to a device in this process."""
    output.parent.mkdir(parents=True, exist_ok=True)
    facts = found["environment"].get("facts", {})
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": facts,
        "results": {"device": device, "small": small, "checks": found},
    }
    output.write_text(json.dumps(content, indent=2, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
