"""The controller dies, or the driver does: the workers train on, somebody takes over, and nothing
shows in the result."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

import elastic_dp as edp
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import (
    FOR_EVER,
    is_whole,
    pid_of_controller,
    pids_of,
    trainer,
    undisturbed,
    wait_for,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.shared():
        yield


def drive(address, path, once):
    """What a driver does that is killed then, in a process of its own."""
    clusters.connect(address)
    slow = WorkerFault("forming", world_size=2, nth=2, action="sleep", seconds=3.0, once=once)
    away(path).start(faults=[slow])
    print("started", flush=True)
    time.sleep(600)


def away(path):
    return trainer(path, "away", steps=FOR_EVER, workers=2, body_s=0.1, every_steps=25)


def start_in_another_process(path, once):
    address = ray.get_runtime_context().gcs_address
    code = "import sys; from tests.ray.test_controller_restart import drive; drive(*sys.argv[1:])"
    driver = subprocess.Popen(
        [sys.executable, "-c", code, address, str(path), str(once)],
        env=os.environ | {"PYTHONPATH": clusters.ROOT},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout.readline() == "started\n"
        driver.kill()


def kill_controller(name):
    os.kill(pid_of_controller(name), signal.SIGKILL)


def follow(run):
    """All that a driver hears of a run, in a thread."""
    lines = []
    thread = threading.Thread(target=lambda: lines.extend(run.events()))
    thread.start()
    return thread, lines


def written(path, file):
    whole = (path / f"{file}.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def what(line):
    return line["time"], line.get("event"), line.get("command"), line.get("text")


def test_a_run_outlives_its_driver_and_its_controller(tmp_path):
    forms = tmp_path / "forms"
    start_in_another_process(tmp_path, forms)
    run = edp.attach("away")
    thread, heard = follow(run)
    wait_for(run, lambda s: is_whole(s, 2) and s["step"] >= 20)
    pids = pids_of(run, ["w1", "w2"])

    step = len(written(tmp_path / "away", "metrics"))
    kill_controller("away")
    eventually(forms.exists, run.status)  # which is slow this time
    # What was made meanwhile is told to the new one, while it forms.
    eventually(lambda: len(written(tmp_path / "away", "metrics")) > step + 5, run.status)
    kill_controller("away")
    wait_for(run, lambda s: s["phase"] == "running")
    assert pids_of(run, pids) == pids

    os.kill(pids["w1"], signal.SIGKILL)
    kill_controller("away")
    wait_for(run, lambda s: s["phase"] == "running" and "w1" not in s["workers"])
    assert pids_of(run, ["w2"])["w2"] == pids["w2"]

    again = away(tmp_path).start()
    assert again.controller == run.controller
    run.stop("enough")
    ended = ray.get(run.controller.wait.remote(None))
    assert ended.result.reason == "enough"
    kill_controller("away")
    thread.join()
    result = run.result()
    assert again.result() == result

    assert result.weights_sha256 == undisturbed(tmp_path, result.step)
    assert (result.reason, result.workers_lost) == ("enough", 1)
    metrics = written(tmp_path / "away", "metrics")
    assert [line["step"] for line in metrics] == list(range(1, result.step + 1))
    assert [line for line in heard if "loss" in line] == metrics
    events = written(tmp_path / "away", "events")
    assert [what(line) for line in heard if "loss" not in line] == [what(line) for line in events]
    assert sum("took over" in line.get("text", "") for line in events) == 3
