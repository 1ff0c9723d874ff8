"""Runs tests without a guard of the device path, each in a fork of a process that has imported
torch and pytest already, and nothing of ours: `python -m tests.device.mutant_server`.

It reads a name of a mutant and a test in each line ("": no mutant), and answers with pytest's exit
status, or "timeout", and its output, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# What our modules import. Nothing of it starts a thread.
import cloudpickle  # noqa: F401
import msgpack  # noqa: F401
import pandas  # noqa: F401
import pyarrow.compute
import pyarrow.dataset  # noqa: F401
import pytest
import torch
import torch._dynamo

LIMIT_S = 120.0
_FAILED = 90  # the exit status of a fork that did not come to its end


def serve() -> None:
    assert torch.get_num_threads() == 1, "a fork has no threads for its operators"
    for line in sys.stdin:
        name, test = json.loads(line)
        print(json.dumps(run(name, test)), flush=True)


def run(mutant: str, test: str) -> dict[str, Any]:
    begun_at = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _in_child(mutant, test, output.fileno())
        status: int | str | None = None
        while status is None:
            done, code, used = os.wait4(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
            elif time.monotonic() > begun_at + LIMIT_S:
                status = "timeout"
            else:
                time.sleep(0.01)
        _end(child)
        text = Path(output.name).read_text(errors="replace")[-4000:]
    cpu_s = round(used.ru_utime + used.ru_stime, 2)
    return {"status": status, "cpu_s": cpu_s, "output": text}


def _in_child(mutant: str, test: str, output: int) -> None:
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it takes a second
        if mutant:
            os.environ["DEVICE_MUTANT"] = mutant
        plugins = ["pytest_timeout", "tests.device.device_mutants", "no:cacheprovider"]
        status = int(pytest.main(["-q", "-x", "-m", "", *(f"-p{p}" for p in plugins), test]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(_FAILED)


def _end(child: int) -> None:
    """Whatever it has started is of its session."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve()
