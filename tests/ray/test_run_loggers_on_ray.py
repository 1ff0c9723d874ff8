"""A driver with TensorBoard is killed, and a controller: each step is logged once."""

import os
import signal
import subprocess
import sys

import pytest
import ray

from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, pid_of_controller, trainer, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def logged(path):
    from elastic_dp.integrations.tensorboard import TensorBoardLogger

    job = trainer(path, "logged", steps=FOR_EVER, workers=2, body_s=0.05)
    job.loggers = (TensorBoardLogger(path / "tb"),)
    return job


def drive(address, path):
    """What a driver does that is killed then, in a process of its own."""
    from pathlib import Path

    clusters.connect(address)
    logged(Path(path)).fit()


def steps_and_events(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (path / "tb" / "logged").iterdir()
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    has = shown.Tags()
    if "loss" not in has["scalars"] or not has["tensors"]:
        return [], []
    texts = [e.tensor_proto.string_val[0] for e in shown.Tensors("run_events/text_summary")]
    return [scalar.step for scalar in shown.Scalars("loss")], texts


def test_run_logger_has_each_step_once_after_a_killed_driver_and_a_killed_controller(tmp_path):
    code = "import sys; from tests.ray.test_run_loggers_on_ray import drive; drive(*sys.argv[1:])"
    with clusters.nodes(2):
        address = ray.get_runtime_context().gcs_address
        driver = subprocess.Popen(
            [sys.executable, "-c", code, address, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": clusters.ROOT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            eventually(lambda: list(tmp_path.glob("tb/logged/*/*")))
            eventually(lambda: len(steps_and_events(tmp_path)[0]) >= 20)
        finally:
            driver.kill()
            driver.wait()
        before = len(steps_and_events(tmp_path)[0])
        run = logged(tmp_path).start()
        wait_for(run, lambda status: is_whole(status, 2) and status["step"] > before + 20)
        os.kill(pid_of_controller("logged"), signal.SIGKILL)
        step = wait_for(run, lambda status: status["phase"] == "running")["step"]
        wait_for(run, lambda status: status["step"] > step + 20)
        run.stop("enough")
        last = run.result().step
    steps, texts = steps_and_events(tmp_path)
    assert steps == list(range(1, last + 1))
    kinds = [text.split(b":")[0] for text in texts]
    assert kinds.count(b"start") == kinds.count(b"takeover") == kinds.count(b"end") == 1
