"""Ctrl-C of a driver whose fit() started its own Ray: a checkpoint first, and running it again goes on from there."""

import json
import os
import signal
import subprocess
import sys

import pytest

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.storage import Store
from tests.ray import clusters
from tests.runs import local, spec_of
from tests.train.jobs import clipped_average_norm as plain

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

DRIVER = """
import elastic_dp as edp, sys
from tests.runs import spec_of
from tests.train.jobs import clipped_average_norm as plain
spec = spec_of(workers=1, config={"body_s": 0.05})
edp.ElasticTrainer(
    plain, name="mine", storage_path=sys.argv[1], data=spec.data, config=spec.config, scaling=spec.scaling,
    failure=spec.failure, max_steps=100_000,
).fit()
"""


def test_the_run_goes_on_from_where_it_was_interrupted(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        cwd=clusters.ROOT,
        env=environment | {"PYTHONPATH": clusters.ROOT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        begun = next(line for line in driver.stderr if " step " in line)  # it follows the run
        os.killpg(driver.pid, signal.SIGINT)  # a terminal tells the whole group
        said = begun + driver.communicate()[1]
    finally:
        driver.kill()
    assert driver.returncode != 0 and "KeyboardInterrupt" in said and "with a checkpoint" in said
    ended = json.loads((tmp_path / "mine" / "result.json").read_text())
    assert [name.step for name in Catalog(Store(str(tmp_path / "mine"))).names()] == [ended["step"]]
    spec = spec_of(steps=ended["step"] + 20, workers=1)
    assert local(spec, plain, str(tmp_path / "mine")).digest == local(spec, plain).digest
