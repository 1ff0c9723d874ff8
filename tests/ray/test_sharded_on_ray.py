"""A sharded optimizer on Ray: its state outlives the controller, and a worker that dies while there
is none."""

import os
import signal

import pytest

from tests.ray import clusters
from tests.ray.jobs import (
    FOR_EVER,
    is_whole,
    members,
    pid_of_controller,
    pids_of,
    trainer,
    undisturbed,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.nodes(4):
        yield


def test_state_outlives_the_controller_and_a_worker_that_dies_meanwhile(tmp_path):
    job = trainer(tmp_path, "apart", steps=FOR_EVER, workers=4, body_s=0.05, sharding="optimizer")
    run = job.start()
    status = wait_for(run, lambda s: is_whole(s, 4) and s["step"] >= 10)
    pids = pids_of(run, members(status))

    os.kill(pid_of_controller("apart"), signal.SIGKILL)
    status = wait_for(run, lambda s: is_whole(s, 4))
    wait_for(run, lambda s: is_whole(s, 4) and s["step"] >= status["step"] + 5)
    assert pids_of(run, pids) == pids

    dies, *others = members(status)
    os.kill(pid_of_controller("apart"), signal.SIGKILL)
    os.kill(pids[dies], signal.SIGKILL)
    wait_for(run, lambda s: is_whole(s, 4) and dies not in s["workers"])
    assert pids_of(run, others).items() >= {worker: pids[worker] for worker in others}.items()
    run.stop("enough")
    result = run.result()
    assert (result.reason, result.workers_lost) == ("enough", 1)
    assert result.weights_sha256 == undisturbed(tmp_path, result.step)
    assert "optimizer's state" not in (tmp_path / "apart" / "events.jsonl").read_text()
