"""Ctrl-C, or SIGTERM, of a driver whose fit() started its own Ray: a checkpoint first, and running
it again goes on from there. What it says reads as what it is, and not as a crash; a second terminal
reaches its Ray by the command that it names."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.storage import Store
from tests.patience import PATIENCE_S
from tests.ray import clusters
from tests.runs import local, spec_of
from tests.train.jobs import clipped_average_norm as plain

pytestmark = pytest.mark.ray

DRIVER = """
import elastic_dp as edp, sys
from tests.runs import spec_of
from tests.train.jobs import clipped_average_norm as plain
spec = spec_of(workers=1, config={"body_s": 0.2})
edp.ElasticTrainer(
    plain, name="mine", storage_path=sys.argv[1], data=spec.data, config=spec.config,
    scaling=spec.scaling, failure=spec.failure, max_steps=100_000,
).fit()
"""


def asked_in_a_second_terminal(said, environment):
    """What the command that the driver names answers. Its Ray asks for the token that it has saved
    in the user's home."""
    named = re.search(r"elastic-dp (status mine --address \S+)", said)
    assert named, said
    words = [sys.executable, "-m", "elastic_dp.cli", *named[1].split(), "--json"]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_driver_saves_says_so_and_exits_without_a_traceback(tmp_path, number):
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    environment |= {"PYTHONPATH": clusters.MINIMAL_PATH, "HOME": str(tmp_path)}
    environment |= clusters.forked_workers()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=clusters.ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        lines = [""]
        while " loss " not in lines[-1]:  # it follows the run
            lines.append(driver.stderr.readline())
            assert lines[-1], "".join(lines)
        assert asked_in_a_second_terminal("".join(lines), environment)["phase"] == "running"
        assert (tmp_path / ".ray" / "auth_token").exists()
        if number is signal.SIGINT:
            os.killpg(driver.pid, number)  # a terminal tells the whole group
        else:
            driver.terminate()
        said = "".join(lines) + driver.communicate()[1]
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 128 + number, said
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
    ended = json.loads((tmp_path / "mine" / "result.json").read_text())
    folder = tmp_path / "mine"
    texts = [line.partition("] ")[2] for line in said.splitlines() if line.startswith("[")]
    assert texts[0].startswith(f"run mine; folder: {folder}; Ray: ")
    assert "elastic-dp status mine --address " in texts[0]
    assert "no node has room" not in said
    assert texts[-2:] == [
        "stopping after this step, with a checkpoint; press Ctrl-C again to end at once",
        f"saved step {ended['step']}; run the same command again to go on from there",
    ]
    assert [name.step for name in Catalog(Store(str(tmp_path / "mine"))).names()] == [ended["step"]]
    spec = spec_of(steps=ended["step"] + 20, workers=1)
    assert local(spec, plain, str(tmp_path / "mine")).digest == local(spec, plain).digest
