"""The driver whose fit() started its own Ray is killed: Ray goes with it, and the same command goes
on from the newest checkpoint."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.storage import Store
from tests.chaos.cluster import ROOT, ChaosRun
from tests.chaos.job import trainer
from tests.patience import eventually

pytestmark = [
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.slow,
]
STEPS = 60
COMMAND = """
import sys, ray
from tests.chaos.job import trainer
from tests.patience import eventually
ray.init(
    address="local", num_cpus=2, resources={"place": 2}, include_dashboard=False,
    log_to_driver=False,
)
trainer(sys.argv[1], "mine", int(sys.argv[2]), every_steps=5).fit()
"""


def start(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "EDP_TEST": str(folder)}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", COMMAND, str(folder), str(STEPS)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, start_new_session=True, **quiet)


@pytest.fixture
def place(tmp_path):
    """Nothing that was started for it outlives the test."""
    yield tmp_path
    for pid in left(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def left(folder):
    """Processes that the command started, or that those did."""
    mark = f"EDP_TEST={folder}".encode()
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in environment_of(pid)]


def environment_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


def test_local_ray_dies_with_its_driver_and_the_same_command_continues_the_run(place):
    calm = trainer(str(place), "calm", STEPS, body_s=0.0).fit(local=True)
    url = str(place / "mine")
    driver = start(place)
    eventually(lambda: [name for name in Catalog(Store(url)).names() if name.step >= 10])
    driver.kill()
    driver.wait()
    eventually(lambda: not left(place))
    run = ChaosRun(place / "mine", start(place))
    result = run.finished()
    assert result["weights_sha256"] == calm.weights_sha256 and result["exact"]
    found = [line["step"] for line in run.lines("events") if line.get("event") == "CheckpointFound"]
    assert found[0] is None and found[1] >= 10
    assert run.driver.wait(60) == 0 and not left(place)
