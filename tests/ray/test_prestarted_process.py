"""A process that waits on a node of a real Ray for a worker of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from elastic_dp.cluster.ray.prestart.prestarted_process import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, trainer, undisturbed, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(autouse=True)
def cluster():
    with clusters.nodes(2, forked=False) as cluster:
        yield cluster


def waiting() -> set[int]:
    """The processes with the hook that wait for a worker, and have imported torch."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            has_hook = WORKER_PROCESS_SETUP_HOOK_ENV_VAR in process.environ()
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except (psutil.Error, OSError):
            continue
        if has_hook and "libtorch_cpu" in maps and "IDLE" in " ".join(process.cmdline()):
            found.add(process.pid)
    return found


def test_replacement_gets_waiting_process_and_none_is_left_after_the_run(tmp_path):
    job = trainer(tmp_path, "warm", steps=FOR_EVER, workers=2, warm_processes=1, body_s=0.05)
    run = job.start()
    eventually(lambda: len(run.pids()) == 2 and len(waiting()) == 1)
    (warm,) = waiting()
    os.kill(min(run.pids().values()), signal.SIGKILL)
    eventually(lambda: warm in run.pids().values())
    wait_for(run, lambda status: is_whole(status, 2))
    (took_it,) = (worker for worker, pid in run.pids().items() if pid == warm)
    assert (took_it, "the words of a worker") in list(run.logs())
    log = tmp_path / "warm" / "logs" / f"{took_it}.log"
    eventually(lambda: log.exists() and "the words of a worker" in log.read_text())
    eventually(lambda: len(waiting()) == 1)  # for the next one
    run.stop("seen enough")
    result = run.result()
    assert result.exact and result.weights_sha256 == undisturbed(tmp_path, result.step)
    eventually(lambda: not waiting())
